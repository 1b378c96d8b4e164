// SPDX-License-Identifier: Apache-2.0
#include "optimized/storage/s3_session.h"

#include <chrono>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "optimized/storage/s3_digest.h"

namespace tandem::s3 {
namespace {

// Known to this call alone: says whether an object is the one that it wrote.
std::string draw_writer() {
  std::random_device device;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", device(), device(), device(), device());
}

Doubt differs_from(std::span<const std::byte> bytes) {
  return [md5 = to_hexadecimal(md5_bytes(bytes))](const Reply& reply) -> std::string {
    const std::string stored = content_md5_of(reply);
    if (stored.empty() || stored == md5) return {};
    return fmt::format("the store has other bytes than were sent (ETag {}, not {})", stored, md5);
  };
}

}  // namespace

Session::Session(std::string bucket, std::string prefix, StoreAccess access)
    : bucket_(std::move(bucket)), prefix_(std::move(prefix)), client_(std::move(access)), draws_(std::random_device{}()) {}

std::string Session::describe() const {
  return fmt::format("s3://{}{}{} at {}", bucket_, prefix_.empty() ? "" : "/", prefix_, access().endpoint);
}

void Session::refuse(const char* action, const std::string& key, const Reply& reply) const {
  const std::string tries = reply.attempts > 1 ? fmt::format(" (tried {} times)", reply.attempts) : std::string{};
  throw StoreError(fmt::format("{}: cannot {} '{}': {}{}", describe(), action, key, reason_of(reply), tries));
}

void Session::wait_before_retry(int failures) {
  double draw = 0;
  {
    const std::lock_guard lock(mutex_);
    draw = std::uniform_real_distribution<double>(0.5, 1.0)(draws_);
  }
  std::this_thread::sleep_for(std::chrono::duration<double>(retry_delay_seconds(failures, access().first_delay_seconds, draw)));
}

Reply Session::ask(const Request& request, const Doubt& doubt) {
  for (int attempt = 1;; ++attempt) {
    Reply reply = client_.perform(request);
    reply.attempts = attempt;
    if (reply.good() && doubt) reply.failure = doubt(reply);
    if (!may_succeed_again(reply) || attempt >= access().attempts) return reply;
    wait_before_retry(attempt);
  }
}

void Session::put(const std::string& key, std::span<const std::byte> bytes) {
  const Reply reply = ask({.method = "PUT", .path = path_of(key), .body = bytes}, differs_from(bytes));
  if (!reply.good()) refuse("write", key, reply);
}

bool Session::put_if_absent(const std::string& key, std::span<const std::byte> bytes) {
  const std::string writer = draw_writer();
  const Reply reply =
      ask({.method = "PUT", .path = path_of(key), .headers = {"If-None-Match: *", "x-amz-meta-writer: " + writer}, .body = bytes},
          differs_from(bytes));
  if (reply.good()) return true;
  if (!reply.failure.empty() || reply.status != 412) refuse("write", key, reply);
  if (reply.attempts == 1) return false;
  // An attempt whose reply was lost may have been carried out: the object that is in the way may be ours.
  const Reply there = ask({.method = "HEAD", .path = path_of(key)});
  if (!there.good()) refuse("write", key, there);
  return there.header("x-amz-meta-writer") == writer;
}

}  // namespace tandem::s3
