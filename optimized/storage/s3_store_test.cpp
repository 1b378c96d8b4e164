// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <random>
#include <thread>

#include <fmt/format.h>

#include "core/io/test_folder.h"
#include "optimized/storage/s3_reply.h"
#include "optimized/storage/s3_server_test_support.h"
#include "optimized/storage/s3_store.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kPartBytes = std::size_t{5} << 20;

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }
std::string text_of(std::span<const std::byte> bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

// No two parts of it are alike.
std::string varied(std::size_t bytes) {
  std::string text(bytes, '\0');
  std::uint32_t state = 1;
  for (char& c : text) {
    state = state * 1664525u + 1013904223u;
    c = static_cast<char>(state >> 24);
  }
  return text;
}

std::vector<std::string> keys_of(const std::vector<ObjectInfo>& objects) {
  std::vector<std::string> keys;
  for (const ObjectInfo& info : objects) keys.push_back(info.key);
  return keys;
}

using Keys = std::vector<std::string>;

class S3StoreTest : public ::testing::Test {
 protected:
  S3TestServer server;
  TestFolder folder;
  std::shared_ptr<ObjectStore> store = open_store("s3://bucket/run 1/", server.access());

  // What the store says when it fails: one line that names store and key.
  template <class Error = StoreError, class Call>
  std::string failure_of(const Call& call) {
    const std::string message = message_of<Error>(call);
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    EXPECT_NE(message.find(store->describe()), std::string::npos) << message;
    EXPECT_EQ(message.find("secret"), std::string::npos) << "keys do not belong into messages";
    return message;
  }
  // The fault for the first `times` requests of this method (with this query parameter).
  void fail_first(int times, S3Fault fault, const std::string& method, const std::string& query = {}) {
    server.set_faults([=, left = times](const S3Seen& seen) mutable {
      if (seen.method != method || (!query.empty() && !seen.asks_for(query)) || left == 0) return S3Fault::none;
      --left;
      return fault;
    });
  }
  int num_requests(const std::string& method) const {
    const std::vector<S3Seen> seen = server.seen();
    return static_cast<int>(std::ranges::count(seen, method, &S3Seen::method));
  }
};

TEST_F(S3StoreTest, GivesBackWhatWasPutUnderAnyKey) {
  for (const char* key : {"a", "a/b", "x=y&z+1 %/Größe~.-_", "step-00000001/shard-00000.safetensors", "*'()!@:,;$?#[]"}) {
    store->put(key, bytes_of(key));
    EXPECT_EQ(text_of(store->get(key)), key);
    EXPECT_EQ(store->find(key)->bytes, static_cast<std::int64_t>(std::string(key).size())) << key;
  }
  EXPECT_TRUE(server.objects().contains("run 1/x=y&z+1 %/Größe~.-_")) << "as other programs name it";
  store->put("empty", {});
  EXPECT_TRUE(store->get("empty").empty());
  EXPECT_EQ(text_of(store->get_range("step-00000001/shard-00000.safetensors", {5, 10})), "00000");
  EXPECT_TRUE(store->get_range("a/b", {3, 3}).empty());
  store->remove("a");
  store->remove("a");
  EXPECT_FALSE(store->find("a"));
}

TEST_F(S3StoreTest, ListsAllPagesOfItsOwnPrefixInOrder) {
  Keys expected;
  for (int i = 0; i < 8; ++i) expected.push_back(fmt::format("d/{} &<", i));
  for (const std::string& key : expected) store->put(key, {});
  store->put("e", {});
  server.set_object("run 10/d/1", "of another prefix");
  server.set_object("run 1/d/", "stands for a folder");
  EXPECT_EQ(keys_of(store->list("d/")), expected);
  EXPECT_EQ(num_requests("GET"), 3) << "the server has three keys a page";
  EXPECT_EQ(store->list("").size(), 9U);
  EXPECT_EQ(open_store("s3://bucket/run 10", server.access())->list("d").at(0).bytes, 17);
  EXPECT_EQ(open_store("s3://bucket", server.access())->list("run 10/").size(), 1U);
}

TEST_F(S3StoreTest, SaysWhatIsMissingOrOutOfRange) {
  store->put("a", bytes_of("0123"));
  EXPECT_NE(failure_of<InputError>([&] { (void)store->get("b"); }).find("'b'"), std::string::npos);
  EXPECT_THROW(store->get_file("b", folder / "x"), InputError);
  EXPECT_FALSE(fs::exists(folder / "x"));
  EXPECT_NE(failure_of<InputError>([&] { (void)store->get_range("a", {4, 5}); }), "");
  EXPECT_NE(failure_of<InputError>([&] { (void)store->get_range("a", {5, 5}); }), "");
  EXPECT_THROW(store->put("a//b", {}), ContractError);
  const auto nowhere = open_store("s3://nobucket", server.access());
  for (const std::string& message :
       {message_of<StoreError>([&] { nowhere->put("a", {}); }), message_of<StoreError>([&] { (void)nowhere->get("a"); }),
        message_of<StoreError>([&] { (void)nowhere->list(""); })}) {
    EXPECT_NE(message.find("NoSuchBucket"), std::string::npos) << message;
    EXPECT_NE(message.find("make the bucket"), std::string::npos) << message;
  }
}

TEST_F(S3StoreTest, TheServerRefusesASignatureThatDoesNotFit) {
  StoreAccess wrong = server.access();
  wrong.secret_key += "x";
  const std::string message = message_of<StoreError>([&] { open_store("s3://bucket/run 1", wrong)->put("a", {}); });
  EXPECT_NE(message.find("403 SignatureDoesNotMatch"), std::string::npos) << message;
  EXPECT_NE(message.find("AWS_SECRET_ACCESS_KEY"), std::string::npos) << message;
  EXPECT_EQ(message.find(wrong.secret_key), std::string::npos) << "keys do not belong into messages";
  EXPECT_EQ(server.seen().size(), 1U) << "what is refused is not made again";
  wrong = server.access();
  wrong.access_key = "other";
  EXPECT_NE(message_of<StoreError>([&] { (void)open_store("s3://bucket", wrong)->list(""); }).find("InvalidAccessKeyId"),
            std::string::npos);
}

TEST_F(S3StoreTest, SendsTheSessionTokenSigned) {
  server.require_session_token("token/=");
  EXPECT_NE(failure_of([&] { (void)store->get("a"); }).find("AWS_SESSION_TOKEN"), std::string::npos);
  StoreAccess access = server.access();
  access.session_token = "token/=";
  open_store("s3://bucket", access)->put("a", {});
  const std::string authorization = server.seen().back().headers.at("authorization");
  EXPECT_NE(authorization.find("x-amz-security-token"), std::string::npos) << authorization;
}

TEST_F(S3StoreTest, MakesARequestAgainThatMaySucceedThen) {
  for (const S3Fault fault : {S3Fault::internal_error, S3Fault::slow_down, S3Fault::lost_reply, S3Fault::wrong_etag}) {
    fail_first(2, fault, "PUT");
    store->put("a", bytes_of("content"));
    EXPECT_EQ(text_of(store->get("a")), "content") << static_cast<int>(fault);
  }
  for (const S3Fault fault : {S3Fault::internal_error, S3Fault::closed_mid_body, S3Fault::shortened_body}) {
    fail_first(2, fault, "GET");
    EXPECT_EQ(text_of(store->get("a")), "content") << static_cast<int>(fault);
    fail_first(2, fault, "GET", "list-type");
    EXPECT_EQ(store->list("").size(), 1U) << static_cast<int>(fault);
  }
  for (const S3Fault fault : {S3Fault::internal_error, S3Fault::closed_mid_body}) {
    fail_first(2, fault, "GET");
    EXPECT_EQ(text_of(store->get_range("a", {1, 6})), "onten") << static_cast<int>(fault);
  }
}

TEST_F(S3StoreTest, GivesUpAfterItsAttempts) {
  fail_first(100, S3Fault::slow_down, "PUT");
  const std::string message = failure_of([&] { store->put("a", {}); });
  EXPECT_NE(message.find("'a': status 503 SlowDown"), std::string::npos) << message;
  EXPECT_NE(message.find("3 times"), std::string::npos) << message;
  EXPECT_EQ(num_requests("PUT"), 3);
  server.set_object("run 1/b", "content");
  fail_first(100, S3Fault::shortened_body, "GET");
  EXPECT_NE(failure_of([&] { (void)store->get("b"); }).find("MD5"), std::string::npos);
  EXPECT_EQ(num_requests("GET"), 3);
  fail_first(100, S3Fault::denied, "DELETE");
  EXPECT_NE(failure_of([&] { store->remove("b"); }).find("403 AccessDenied"), std::string::npos);
  EXPECT_EQ(num_requests("DELETE"), 1);
}

TEST_F(S3StoreTest, SaysThatNobodyIsThere) {
  StoreAccess nowhere = server.access();
  nowhere.endpoint = "http://127.0.0.1:1";
  const std::string message = message_of<StoreError>([&] { (void)open_store("s3://bucket", nowhere)->find("a"); });
  EXPECT_NE(message.find("check AWS_ENDPOINT_URL"), std::string::npos) << message;
  EXPECT_NE(message.find("3 times"), std::string::npos) << message;
}

TEST_F(S3StoreTest, SaysThatAHostIsNotFoundHoweverOftenItIsAskedFor) {
  StoreAccess nowhere = server.access();
  nowhere.endpoint = "http://no-such-host.invalid";
  const std::string message = message_of<StoreError>([&] { (void)open_store("s3://bucket", nowhere)->find("a"); });
  EXPECT_NE(message.find("no-such-host.invalid"), std::string::npos) << message;
  EXPECT_NE(message.find("3 times"), std::string::npos) << message;
}

TEST_F(S3StoreTest, GivesUpATransferThatStalls) {
  StoreAccess hasty = server.access();
  hasty.stall_seconds = 1;
  hasty.attempts = 1;
  fail_first(1, S3Fault::stalled, "GET");
  const std::string message = message_of<StoreError>([&] { (void)open_store("s3://bucket", hasty)->get("a"); });
  EXPECT_NE(message.find("too slow"), std::string::npos) << message;
}

TEST_F(S3StoreTest, LetsOneWriterWinEvenWhenItsReplyIsLost) {
  EXPECT_TRUE(store->put_if_absent("a", bytes_of("first")));
  EXPECT_FALSE(store->put_if_absent("a", bytes_of("second")));
  EXPECT_EQ(text_of(store->get("a")), "first");
  fail_first(1, S3Fault::lost_reply, "PUT");
  EXPECT_TRUE(store->put_if_absent("b", bytes_of("mine")));
  fail_first(1, S3Fault::internal_error, "PUT");
  EXPECT_FALSE(store->put_if_absent("b", bytes_of("mine"))) << "the same bytes, of another writer";
}

TEST_F(S3StoreTest, UploadsALargeFileInParts) {
  const std::string content = varied(2 * kPartBytes + 1000);
  const fs::path file = folder.write("input", content);
  store->put_file("big", file);
  EXPECT_EQ(num_requests("PUT"), 3);
  EXPECT_TRUE(server.objects().at("run 1/big") == content);
  store->get_file("big", folder / "output");
  EXPECT_TRUE(TestFolder::read(folder / "output") == content);
  fail_first(2, S3Fault::wrong_etag, "PUT", "partNumber");
  store->put("big", bytes_of(content).first(kPartBytes + 1));
  EXPECT_TRUE(server.objects().at("run 1/big") == content.substr(0, kPartBytes + 1));
  for (const S3Fault fault : {S3Fault::lost_reply, S3Fault::internal_error, S3Fault::error_in_200}) {
    fail_first(2, fault, "POST", "uploadId");
    store->put("big " + std::to_string(static_cast<int>(fault)), bytes_of(content).first(kPartBytes + 1));
  }
  EXPECT_EQ(store->list("big ").size(), 3U);
  EXPECT_EQ(server.unfinished_uploads(), 0U);
}

TEST_F(S3StoreTest, AbortsAnUploadThatFailsInTheMiddle) {
  const fs::path file = folder.write("input", varied(2 * kPartBytes + 1));
  server.set_faults([](const S3Seen& seen) {
    return seen.asks_for("partNumber") && seen.query.at("partNumber") == "2" ? S3Fault::slow_down : S3Fault::none;
  });
  const std::string message = failure_of([&] { store->put_file("big", file); });
  EXPECT_NE(message.find("part 2 of 'big'"), std::string::npos) << message;
  fail_first(3, S3Fault::error_in_200, "POST", "uploadId");
  EXPECT_NE(failure_of([&] { store->put_file("big", file); }), "");
  EXPECT_EQ(server.unfinished_uploads(), 0U);
  EXPECT_TRUE(server.objects().empty());
}

TEST_F(S3StoreTest, TakesUpADownloadWhereItBrokeOff) {
  const std::string content = varied(1 << 20);
  server.set_object("run 1/big", content);
  fail_first(2, S3Fault::closed_mid_body, "GET");
  store->get_file("big", folder / "output");
  EXPECT_TRUE(TestFolder::read(folder / "output") == content);
  const std::vector<S3Seen> seen = server.seen();
  ASSERT_EQ(seen.size(), 3U);
  EXPECT_EQ(seen[1].headers.at("range"), fmt::format("bytes={}-", content.size() / 2));
  EXPECT_TRUE(seen[1].headers.contains("if-match"));
  fail_first(100, S3Fault::closed_mid_body, "GET");
  EXPECT_NE(failure_of([&] { store->get_file("big", folder / "half"); }), "");
  EXPECT_FALSE(fs::exists(folder / "half"));
}

TEST_F(S3StoreTest, StartsAgainWhenTheObjectWasReplacedMeanwhile) {
  const std::string old = varied(100000);
  const std::string replacement(70000, 'n');
  server.set_object("run 1/a", old);
  int count = 0;
  server.set_faults([&](const S3Seen&) {
    if (++count == 2) server.set_object("run 1/a", replacement);  // before the rest of the old one is asked for
    return count == 1 ? S3Fault::closed_mid_body : S3Fault::none;
  });
  EXPECT_TRUE(text_of(store->get("a")) == replacement);
  EXPECT_EQ(server.seen().size(), 3U);
}

TEST_F(S3StoreTest, ServesSeveralThreads) {
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&, i] {
        for (int round = 0; round < 5; ++round) {
          const std::string key = fmt::format("{}/{}", i, round);
          store->put(key, bytes_of(key));
          EXPECT_EQ(text_of(store->get(key)), key);
        }
      });
    }
  }
  EXPECT_EQ(store->list("").size(), 20U);
}

// A server that is none of ours: ci/object_store.sh starts one.
class RealS3StoreTest : public ::testing::Test {
 protected:
  static const char* variable(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
  }
  void SetUp() override {
    access.endpoint = variable("TANDEM_TEST_S3_ENDPOINT");
    access.access_key = variable("TANDEM_TEST_S3_ACCESS_KEY");
    access.secret_key = variable("TANDEM_TEST_S3_SECRET_KEY");
    access.part_bytes = kPartBytes;
    bucket = variable("TANDEM_TEST_S3_BUCKET");
    if (access.endpoint.empty() || bucket.empty()) {
      GTEST_SKIP() << "TANDEM_TEST_S3_ENDPOINT, _BUCKET, _ACCESS_KEY, _SECRET_KEY are not set (ci/object_store.sh sets them)";
    }
    std::random_device device;
    store = open_store(fmt::format("s3://{}/test {:08x}", bucket, device()), access);
  }
  void TearDown() override {
    if (store == nullptr) return;
    for (const ObjectInfo& info : store->list("")) store->remove(info.key);
    EXPECT_TRUE(store->list("").empty());
  }

  StoreAccess access;
  std::string bucket;
  std::shared_ptr<ObjectStore> store;
  TestFolder folder;
};

TEST_F(RealS3StoreTest, KeepsObjectsUnderAnyKey) {
  Keys keys = {"*'()!@:,;$?#[]&<>", "a", "a/b", "step-00000001/shard-00000.safetensors", "x=y&z+1 %/Größe~.-_"};
  std::ranges::sort(keys);
  for (const std::string& key : keys) store->put(key, bytes_of(key));
  for (const std::string& key : keys) EXPECT_EQ(text_of(store->get(key)), key);
  EXPECT_EQ(keys_of(store->list("")), keys);
  store->put("a", {});
  EXPECT_EQ(store->find("a")->bytes, 0);
  EXPECT_TRUE(store->get("a").empty());
  EXPECT_FALSE(store->find("b"));
  EXPECT_THROW((void)store->get("b"), InputError);
  EXPECT_EQ(text_of(store->get_range("a/b", {1, 3})), "/b");
  EXPECT_THROW((void)store->get_range("a/b", {1, 4}), InputError);
  EXPECT_THROW((void)store->get_range("a/b", {7, 9}), InputError);
  store->remove("a/b");
  store->remove("a/b");
  EXPECT_FALSE(store->find("a/b"));
}

TEST_F(RealS3StoreTest, TakesLargeFilesInPartsAndManyObjects) {
  const std::string content = varied(2 * kPartBytes + 1000);
  store->put_file("big", folder.write("input", content));
  EXPECT_EQ(store->find("big")->bytes, static_cast<std::int64_t>(content.size()));
  store->get_file("big", folder / "output");
  EXPECT_TRUE(TestFolder::read(folder / "output") == content);
  constexpr int kMoreThanAPage = 1003;
  for (int i = 0; i < kMoreThanAPage; ++i) store->put(fmt::format("many/{:04}", i), {});
  EXPECT_EQ(store->list("many/").size(), static_cast<std::size_t>(kMoreThanAPage));
}

TEST_F(RealS3StoreTest, LetsOneWriterWin) {
  try {
    EXPECT_TRUE(store->put_if_absent("lock", bytes_of("first")));
  } catch (const StoreError& error) {
    if (std::string(error.what()).find("501") == std::string::npos) throw;
    GTEST_SKIP() << "this server has no conditional writes";
  }
  EXPECT_FALSE(store->put_if_absent("lock", bytes_of("second")));
  EXPECT_EQ(text_of(store->get("lock")), "first");
}

TEST_F(RealS3StoreTest, RefusesWrongKeysAndBuckets) {
  StoreAccess wrong = access;
  wrong.secret_key += "x";
  EXPECT_NE(message_of<StoreError>([&] { (void)open_store("s3://" + bucket, wrong)->list(""); }).find("SignatureDoesNotMatch"),
            std::string::npos);
  const auto nowhere = open_store("s3://tandem-no-such-bucket", access);
  for (const std::string& message :
       {message_of<StoreError>([&] { nowhere->put("a", {}); }), message_of<StoreError>([&] { (void)nowhere->get("a"); }),
        message_of<StoreError>([&] { (void)nowhere->list(""); })}) {
    EXPECT_NE(message.find("NoSuchBucket"), std::string::npos) << message;
  }
}

TEST(S3Retry, WaitsLongerEachTimeUpToABound) {
  EXPECT_DOUBLE_EQ(s3::retry_delay_seconds(1, 0.2, 1), 0.2);
  EXPECT_DOUBLE_EQ(s3::retry_delay_seconds(3, 0.2, 1), 0.8);
  EXPECT_DOUBLE_EQ(s3::retry_delay_seconds(3, 0.2, 0.5), 0.4);
  EXPECT_DOUBLE_EQ(s3::retry_delay_seconds(50, 0.2, 1), 20);
}

}  // namespace
}  // namespace tandem
