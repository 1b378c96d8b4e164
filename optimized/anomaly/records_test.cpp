// SPDX-License-Identifier: Apache-2.0
// What a run keeps of its incidents: batches that are left out, the ledger, bundles.
#include <cmath>
#include <limits>
#include <span>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "core/io/test_folder.h"
#include "core/synthetic_corpus.h"
#include "optimized/anomaly/bundle.h"
#include "optimized/anomaly/ledger.h"
#include "optimized/anomaly/skip_list.h"

namespace tandem {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

PitfallSet with(Pitfall pitfall) { return PitfallSet(std::span(&pitfall, 1)); }

TEST(SkipList, GivesEachStepTheNextBatchThatIsLeft) {
  const SkipList list({5, 6, 9});

  std::vector<std::int64_t> batches;
  for (std::int64_t step = 3; step < 9; ++step) batches.push_back(list.batch_of(step));

  EXPECT_EQ(batches, (std::vector<std::int64_t>{3, 4, 7, 8, 10, 11}));
}

TEST(SkipList, MeansBatchesAndNotUpdates) {
  const std::set<std::int64_t> found = {5, 7};  // first 5 at step 5, then 7, which step 6 took

  const SkipList list(found), planted(found, with(Pitfall::skip_by_update_number));

  EXPECT_EQ(list.batch_of(6), 8);
  EXPECT_EQ(planted.batch_of(6), 7) << "the planted fault does not bring the bad batch back";
  EXPECT_EQ(planted.batch_of(5), list.batch_of(5));
}

TEST(SkippingSource, ReadsWhatARunThatKnewFromTheStartReads) {
  const SyntheticCorpus corpus({.vocabulary = 13, .sequence = 7});
  SkippingSource source(corpus, SkipList({2}));
  EXPECT_EQ(source.training_batch(2, 4).ids, corpus.training_batch(3, 4).ids);

  source.set(SkipList({2, 3}));

  EXPECT_EQ(source.training_rows(2, 4, {1, 3}).ids, corpus.training_rows(4, 4, {1, 3}).ids);
  EXPECT_EQ(source.training_batch(1, 4).ids, corpus.training_batch(1, 4).ids);
  EXPECT_EQ(source.identity(), corpus.identity());
  EXPECT_NE(source.describe().find("without 2 batches"), std::string::npos);
  EXPECT_EQ(source.list().batches().size(), 2U);
}

AnomalyLedger some_ledger() {
  AnomalyLedger ledger;
  ledger.skipped_batches = {7, 12};
  ledger.healthy_steps = {4, 8};
  ledger.rollbacks = {{0, 1}, {4, 2}};
  ledger.incidents = 3;
  return ledger;
}

TEST(AnomalyLedger, IsWhatWasWritten) {
  const TestFolder folder;
  EXPECT_EQ(read_anomaly_ledger(folder.path()), AnomalyLedger());

  write_anomaly_ledger(folder.path(), some_ledger(), system_files());

  EXPECT_EQ(read_anomaly_ledger(folder.path()), some_ledger());
  EXPECT_EQ(read_anomaly_ledger(folder.path()).newest_healthy(), 8);
}

TEST(AnomalyLedger, NamesFileAndFieldOfWhatItCannotRead) {
  const TestFolder folder;
  write_anomaly_ledger(folder.path(), some_ledger(), system_files());
  const std::string good = TestFolder::read(folder / kAnomalyLedgerName);
  const auto error_with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const std::size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    folder.write(kAnomalyLedgerName, text.replace(at, from.size(), to));
    return message_of<InputError>([&] { (void)read_anomaly_ledger(folder.path()); });
  };
  const auto expect = [&](const std::string& error, const std::string& part) {
    EXPECT_NE(error.find(kAnomalyLedgerName), std::string::npos) << error;
    EXPECT_NE(error.find(part), std::string::npos) << error;
  };

  expect(error_with("\"version\": 1", "\"version\": 2"), "field 'version' is 2, this program reads version 1");
  expect(error_with("\"healthy_steps\"", "\"healthy\""), "field 'healthy_steps' is missing");
  expect(error_with("12", "-12"), "field 'skipped_batches[1]' is -12");
  expect(error_with("12", "7"), "field 'skipped_batches[1]' is 7 a second time");
  expect(error_with("\"times\": 2", "\"times\": 2.5"), "field 'rollbacks[1].times' is 2.5");
  folder.write(kAnomalyLedgerName, good.substr(0, good.size() / 2));
  expect(message_of<InputError>([&] { (void)read_anomaly_ledger(folder.path()); }), "truncated");
}

// Ends the program, so to speak, before its n-th request.
class DyingFiles final : public FileOperations {
 public:
  struct Death {};
  explicit DyingFiles(int requests) : left_(requests) {}
  int create(const std::filesystem::path& file) override { return step(), inner_.create(file); }
  void write(int descriptor, const std::filesystem::path& file, std::span<const std::byte> bytes) override {
    if (left_ == 0) inner_.write(descriptor, file, bytes.first(bytes.size() / 2));
    step();
    inner_.write(descriptor, file, bytes);
  }
  void sync(int descriptor, const std::filesystem::path& file) override { step(), inner_.sync(descriptor, file); }
  void close(int descriptor, const std::filesystem::path& file) override { step(), inner_.close(descriptor, file); }
  void rename(const std::filesystem::path& from, const std::filesystem::path& to) override { step(), inner_.rename(from, to); }
  bool exchange(const std::filesystem::path& one, const std::filesystem::path& other) override {
    return step(), inner_.exchange(one, other);
  }
  void sync_folder(const std::filesystem::path& folder) override { step(), inner_.sync_folder(folder); }
  void make_folder(const std::filesystem::path& folder) override { step(), inner_.make_folder(folder); }
  void remove(const std::filesystem::path& path) override { step(), inner_.remove(path); }

 private:
  void step() {
    if (left_-- == 0) throw Death();
  }
  FileOperations& inner_ = system_files();
  int left_;
};

TEST(AnomalyLedger, IsTheOldOrTheNewOneWhereverTheProgramEnds) {
  AnomalyLedger changed = some_ledger();
  changed.skipped_batches.insert(20);
  bool finished = false;
  int old = 0, renewed = 0;
  for (int requests = 0; !finished; ++requests) {
    ASSERT_LT(requests, 50);
    const TestFolder folder;
    write_anomaly_ledger(folder.path(), some_ledger(), system_files());
    DyingFiles files(requests);
    try {
      write_anomaly_ledger(folder.path(), changed, files);
      finished = true;
    } catch (const DyingFiles::Death&) {
    }

    const AnomalyLedger found = read_anomaly_ledger(folder.path());

    EXPECT_TRUE(found == some_ledger() || found == changed) << requests;
    ++(found == changed ? renewed : old);
  }
  EXPECT_GT(old, 2);
  EXPECT_GT(renewed, 0);
}

IncidentBundle some_bundle() {
  IncidentBundle bundle;
  bundle.config.model.layers = 3;
  bundle.config.seed = 77;
  bundle.data = "text.txt";
  bundle.data_identity = "text of 12 bytes";
  bundle.start_step = 4;
  bundle.checkpoint = "step-00000004";
  bundle.skipped_batches = {2};
  bundle.step = 6;
  bundle.batch = 7;
  bundle.losses = {2.5, kNan, kInfinity};
  bundle.gradient_norms = {0.1, -kInfinity, 1e300};
  bundle.findings = {"rank 1: loss or gradient is not finite (loss)"};
  bundle.batch_hash = {1, 2};
  return bundle;
}

TEST(IncidentBundle, KeepsWhatReplaysIt) {
  const TestFolder folder;
  std::filesystem::create_directory(folder / "step-00000004");
  folder.write("step-00000004/shard", "contents");

  const std::filesystem::path where = write_bundle(folder.path(), 3, some_bundle(), system_files());
  std::filesystem::remove_all(folder / "step-00000004");  // as retention does
  const IncidentBundle read = read_bundle(where);

  EXPECT_EQ(where, folder / "incident-003");
  EXPECT_EQ(TestFolder::read(where / "step-00000004" / "shard"), "contents");
  EXPECT_EQ(to_json(read.config), to_json(some_bundle().config));
  EXPECT_EQ(read.data + read.data_identity + read.checkpoint, "text.txttext of 12 bytesstep-00000004");
  EXPECT_EQ(read.start_step, 4);
  EXPECT_EQ(read.step, 6);
  EXPECT_EQ(read.batch, 7);
  EXPECT_EQ(read.skipped_batches, some_bundle().skipped_batches);
  EXPECT_EQ(read.findings, some_bundle().findings);
  EXPECT_EQ(read.batch_hash, some_bundle().batch_hash);
  EXPECT_EQ(read.losses[0], 2.5);
  EXPECT_TRUE(std::isnan(read.losses[1]));
  EXPECT_EQ(read.losses[2], kInfinity);
  EXPECT_EQ(read.gradient_norms, some_bundle().gradient_norms);
}

TEST(IncidentBundle, OldOnesGo) {
  const TestFolder folder;
  std::filesystem::create_directory(folder / "step-00000004");
  for (std::int64_t number = 1; number <= static_cast<std::int64_t>(kKeptBundles) + 2; ++number)
    static_cast<void>(write_bundle(folder.path(), number, some_bundle(), system_files()));

  EXPECT_FALSE(std::filesystem::exists(folder / "incident-001"));
  EXPECT_FALSE(std::filesystem::exists(folder / "incident-002"));
  EXPECT_TRUE(std::filesystem::exists(folder / "incident-003"));
  EXPECT_TRUE(std::filesystem::exists(folder / fmt::format("incident-{:03}", kKeptBundles + 2)));
}

TEST(IncidentBundle, TheOneJustWrittenStaysThoughOthersHaveHigherNumbers) {
  const TestFolder folder;
  std::filesystem::create_directory(folder / "step-00000004");
  for (std::int64_t number = 1; number <= static_cast<std::int64_t>(kKeptBundles); ++number)
    static_cast<void>(write_bundle(folder.path(), 100 + number, some_bundle(), system_files()));

  const std::filesystem::path written = write_bundle(folder.path(), 1, some_bundle(), system_files());

  EXPECT_EQ(read_bundle(written).step, some_bundle().step);
  EXPECT_FALSE(std::filesystem::exists(folder / "incident-101"));
  EXPECT_TRUE(std::filesystem::exists(folder / "incident-102"));
  EXPECT_FALSE(std::filesystem::exists(folder / "incident-101.unfinished"));
}

TEST(IncidentBundle, IsWholeOrNotThereWhereverTheProgramEnds) {
  bool finished = false;
  int absent = 0;
  for (int requests = 0; !finished; ++requests) {
    ASSERT_LT(requests, 50);
    const TestFolder folder;
    std::filesystem::create_directory(folder / "step-00000004");
    DyingFiles files(requests);
    try {
      write_bundle(folder.path(), 3, some_bundle(), files);
      finished = true;
    } catch (const DyingFiles::Death&) {
    }
    if (std::filesystem::exists(folder / "incident-003")) {
      EXPECT_EQ(read_bundle(folder / "incident-003").step, 6) << requests;
    } else {
      ++absent;
    }
    EXPECT_NO_THROW(write_bundle(folder.path(), 3, some_bundle(), system_files())) << "what was left is no obstacle";
  }
  EXPECT_GT(absent, 3);
}

TEST(IncidentBundle, SaysWhatIsWrongWithOne) {
  const TestFolder folder;
  IncidentBundle bundle = some_bundle();
  bundle.checkpoint.clear();
  const std::filesystem::path where = write_bundle(folder.path(), 12, bundle, system_files());
  const std::string good = TestFolder::read(where / "bundle.json");
  const auto error_with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    text.replace(text.find(from), from.size(), to);
    folder.write("incident-012/bundle.json", text);
    return message_of<InputError>([&] { (void)read_bundle(where); });
  };

  EXPECT_NE(error_with("\"checkpoint\": \"\"", "\"checkpoint\": \"gone\"").find("field 'checkpoint' is 'gone'"),
            std::string::npos);
  EXPECT_NE(error_with("\"start_step\": 4", "\"start_step\": 9").find("field 'start_step' is 9"), std::string::npos);
  EXPECT_NE(error_with("\"nan\"", "\"nam\"").find("field 'losses[1]'"), std::string::npos);
  EXPECT_NE(error_with("00000000000000010000000000000002", "12").find("field 'batch_xxh3_128'"), std::string::npos);
  EXPECT_NE(message_of<InputError>([&] { (void)read_bundle(folder / "nothing"); }).find("no such file"), std::string::npos);
  EXPECT_THROW(write_bundle(folder.path(), 1, some_bundle(), system_files()), IoError) << "its checkpoint is not there";
}

}  // namespace
}  // namespace tandem
