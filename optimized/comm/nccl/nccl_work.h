// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "optimized/comm/nccl/nccl_endpoint.h"
#include "optimized/comm/nccl/nccl_steps.h"

namespace tandem {

/// A buffer of an operation as the device sees it: itself, or a copy of one that lies in the host's memory.
struct NcclBuffer {
  std::span<std::byte> host;  ///< empty: it lies on the device
  NcclRank::Scratch copy{};
  std::byte* device = nullptr;
};

/// A collective. `call` is what the rank asked for, `carried` what carries it out: of a barrier and a split an all_gather of what
/// the ranks have to tell each other.
class NcclCollective final : public NcclOperation {
 public:
  NcclCollective(std::shared_ptr<NcclEndpoint> endpoint, std::shared_ptr<FlightLog> log, std::uint64_t number, Call call,
                 Call carried, NcclBuffer input, NcclBuffer output);

  [[nodiscard]] const Call& call() const noexcept { return call_; }
  [[nodiscard]] std::uint64_t number() const noexcept { return number_; }

  [[nodiscard]] std::string what() const override { return describe(call_); }
  [[nodiscard]] bool issue(int step, const NcclUse& use) override;
  void begun() override;
  void finished(const std::shared_ptr<Memory::Mark>& begin, const std::shared_ptr<Memory::Mark>& end) override;
  void look(std::chrono::nanoseconds waited) override { endpoint_->look(*this, waited); }

 private:
  const std::shared_ptr<NcclEndpoint> endpoint_;
  const std::shared_ptr<FlightLog> log_;
  const std::uint64_t number_;
  const Call call_, carried_;
  const NcclBuffer input_, output_;
  NcclRank::Scratch parts_;
};

/// One end of a message.
class NcclMessage final : public NcclOperation {
 public:
  NcclMessage(std::shared_ptr<NcclEndpoint> endpoint, std::shared_ptr<FlightLog> log, std::uint64_t number, std::uint64_t group,
              MessageCall call, NcclBuffer buffer);

  [[nodiscard]] const MessageCall& call() const noexcept { return call_; }
  /// What the sender says about it, to the receiver.
  void announce() const;
  /// The rank waits for it from now on.
  void wait_begins();
  [[nodiscard]] std::optional<Clock::duration> waited() const;

  [[nodiscard]] std::string what() const override { return describe(call_, endpoint_->members()); }
  [[nodiscard]] bool may_begin() override;
  [[nodiscard]] bool issue(int step, const NcclUse& use) override;
  void finished(const std::shared_ptr<Memory::Mark>& begin, const std::shared_ptr<Memory::Mark>& end) override;
  void look(std::chrono::nanoseconds time) override { endpoint_->look(*this, time); }

 private:
  [[nodiscard]] int peer() const { return endpoint_->members()[static_cast<std::size_t>(call_.peer)]; }

  const std::shared_ptr<NcclEndpoint> endpoint_;
  const std::shared_ptr<FlightLog> log_;
  const std::uint64_t number_;
  const std::string subject_;
  const MessageCall call_;
  const NcclBuffer buffer_;
  std::atomic<std::int64_t> waits_since_ns_{0};
};

/// Makes the communicator of a part of the group. All ranks of the group take part.
class NcclSplit final : public NcclOperation {
 public:
  /// `colour` is not negative; `key` is this rank's place in the part.
  NcclSplit(std::shared_ptr<NcclEndpoint> endpoint, NcclChannel& part, int colour, int key)
      : endpoint_(std::move(endpoint)), part_(part), colour_(colour), key_(key) {}

  [[nodiscard]] std::string what() const override { return "split"; }
  [[nodiscard]] bool issue(int step, const NcclUse& use) override;
  void look(std::chrono::nanoseconds waited) override;

 private:
  const std::shared_ptr<NcclEndpoint> endpoint_;
  NcclChannel& part_;
  const int colour_, key_;
};

/// The rank's handle of one of them.
class NcclWork final : public Work::State {
 public:
  NcclWork(std::shared_ptr<NcclEndpoint> endpoint, NcclChannel& channel, std::shared_ptr<NcclOperation> operation,
           CommOptions options)
      : endpoint_(std::move(endpoint)), channel_(channel), operation_(std::move(operation)), options_(std::move(options)) {}

  void wait() override { endpoint_->wait(*this); }
  [[nodiscard]] bool done() const noexcept override { return endpoint_->done(*this); }
  void drop() noexcept override { endpoint_->drop(*this); }

 private:
  friend class NcclEndpoint;
  const std::shared_ptr<NcclEndpoint> endpoint_;
  NcclChannel& channel_;  // lives as long as the rank
  const std::shared_ptr<NcclOperation> operation_;
  const CommOptions options_;
  NcclMessage* message_ = nullptr;  // where it is one
  bool is_on_host_ = false;
  std::vector<NcclRank::Scratch> copies_;
  NcclBuffer result_;  // to be copied to the host at the end
};

}  // namespace tandem
