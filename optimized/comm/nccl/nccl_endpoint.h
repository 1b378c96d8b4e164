// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/timeline.h"
#include "optimized/comm/call.h"
#include "optimized/comm/flight_recorder.h"
#include "optimized/comm/message.h"
#include "optimized/comm/nccl/nccl_rank.h"
#include "optimized/comm/work_state.h"

namespace tandem {

class NcclCollective;
class NcclMessage;
class NcclWork;

/// The ranks of one communicator as one of them sees them, over NCCL. Used by the rank's thread, but for look().
///
/// Collectives run on a channel of the group. Messages run on one channel for each direction between two ranks, so that no order
/// in which ranks post sends and receives can block them; a receive is given to NCCL when the sender has said what comes, and
/// only if that is what is expected.
class NcclEndpoint : public std::enable_shared_from_this<NcclEndpoint> {
 public:
  NcclEndpoint(std::shared_ptr<NcclRank> rank, std::uint64_t id, std::vector<int> members, int index,
               std::shared_ptr<NcclChannel> channel);
  NcclEndpoint(const NcclEndpoint&) = delete;
  NcclEndpoint& operator=(const NcclEndpoint&) = delete;
  ~NcclEndpoint();

  [[nodiscard]] int rank() const noexcept { return index_; }
  [[nodiscard]] int size() const noexcept { return static_cast<int>(members_.size()); }
  [[nodiscard]] int world_rank() const noexcept { return members_[static_cast<std::size_t>(index_)]; }
  [[nodiscard]] const std::vector<int>& members() const noexcept { return members_; }
  [[nodiscard]] NcclRank& here() const noexcept { return *rank_; }
  [[nodiscard]] WorldState& world() const noexcept { return rank_->world(); }

  [[nodiscard]] std::shared_ptr<NcclWork> issue(Call call);
  [[nodiscard]] std::shared_ptr<NcclWork> issue(MessageCall call);
  void barrier();
  [[nodiscard]] std::shared_ptr<NcclEndpoint> split(int colour, int key);

  void set_memory(Memory* memory) noexcept { memory_ = memory; }
  void set_timeline(Timeline* timeline);
  [[nodiscard]] std::int64_t bytes_sent(Purpose purpose) const noexcept {
    return bytes_sent_[static_cast<std::size_t>(purpose)].load();
  }
  void require_none_dropped() const;

  // Of NcclWork.
  void wait(NcclWork& work);
  [[nodiscard]] bool done(const NcclWork& work) const noexcept;
  void drop(NcclWork& work) noexcept;

  // Of the operations; any thread.
  void look(const NcclCollective& collective, std::chrono::nanoseconds waited);
  void look(const NcclMessage& message, std::chrono::nanoseconds waited);
  /// The calls of two ranks do not match.
  void fail_contract(const std::string& text);
  void keep_span(Span span, std::shared_ptr<Memory::Mark> begin, std::shared_ptr<Memory::Mark> end);

 private:
  struct KeptSpan {
    Span span;
    std::shared_ptr<Memory::Mark> begin, end;
  };
  using Flights = std::vector<RankFlights>;

  [[nodiscard]] std::shared_ptr<NcclWork> issue_collective(Call call, Call carried);
  [[nodiscard]] std::vector<std::int64_t> gather(CallKind kind, std::vector<std::int64_t> own);
  [[nodiscard]] bool on_device(std::span<const std::byte> first, std::span<const std::byte> second,
                               const std::string& what) const;
  [[nodiscard]] NcclChannel& message_channel(int from, int to);
  [[nodiscard]] bool is_timed() const;
  void record_spans();
  void compare_digests(const std::vector<std::int64_t>& digests);
  [[nodiscard]] std::shared_ptr<Memory::Mark> await_taken(const NcclWork& work);
  void await_device(const NcclWork& work, Memory::Mark& end);
  [[noreturn]] void fail_out(const NcclWork& work);
  void note_dropped(const std::string& what) noexcept;
  [[nodiscard]] std::vector<int> missing(const Flights& flights, std::uint64_t number) const;
  [[nodiscard]] std::optional<std::string> find_disagreement(const Flights& flights, std::uint64_t number) const;
  void time_out(const std::string& what, const std::vector<int>& ranks, const Flights& flights);

  const std::shared_ptr<NcclRank> rank_;
  const std::uint64_t id_;
  const std::vector<int> members_;
  const int index_;
  const std::shared_ptr<NcclChannel> channel_;
  const std::shared_ptr<FlightLog> log_;
  std::map<std::pair<int, int>, std::shared_ptr<NcclChannel>> message_channels_;  // by places in the group: from, to
  std::array<std::atomic<std::int64_t>, kPurposes> bytes_sent_{};
  Memory* memory_ = nullptr;
  Timeline* timeline_ = nullptr;
  std::uint64_t number_ = 0;  // collectives issued
  std::uint64_t digest_ = 0;  // of them
  std::string dropped_;       // not empty: the communicator is unusable
  std::mutex spans_mutex_;
  std::vector<KeptSpan>
      spans_;  // of operations that are done; recorded by the rank's thread, which alone knows that the timeline lives
};

/// The endpoint of all ranks of the world.
[[nodiscard]] std::shared_ptr<NcclEndpoint> make_nccl_endpoint(const std::shared_ptr<NcclRank>& rank);

}  // namespace tandem
