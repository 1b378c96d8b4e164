// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "optimized/comm/nccl/nccl_operation.h"

namespace tandem {

class NcclRank;

/// One communicator of NCCL and the lane that its operations run on, in the order in which they were issued.
///
/// NCCL's calls do not block (ncclConfig_t::blocking = 0), and neither does anything here: what cannot go on yet is gone on with
/// by the next call of advance(), which the rank's watchdog makes every millisecond and whoever waits all the time. Any thread.
class NcclChannel {
 public:
  /// Comes into being once all members have made theirs. `members` are world ranks, `index` is this rank's place among them;
  /// `subject` is the same in all of them and nowhere else in the world.
  NcclChannel(NcclRank& rank, std::string subject, std::vector<int> members, int index);
  /// A part of another, made by an operation of that one, which calls ncclCommSplit on place_for_split() and then adopt().
  NcclChannel(NcclRank& rank, std::vector<int> members, int index);
  NcclChannel(const NcclChannel&) = delete;
  NcclChannel& operator=(const NcclChannel&) = delete;
  ~NcclChannel();

  [[nodiscard]] ncclComm_t* place_for_split() noexcept { return &comm_; }
  void adopt();

  /// `after` may be null.
  void issue(const std::shared_ptr<NcclOperation>& operation, std::shared_ptr<Memory::Mark> after, Memory::Timed timed);
  /// Does what can be done without waiting. True: something is under way.
  bool advance() noexcept;
  /// Lets the operation that waits look around, now and then.
  void look();

  struct Progress {
    std::shared_ptr<Memory::Mark> end;  ///< null: NCCL has not taken the whole operation yet
    bool is_done = false;               ///< seen to be done, while the world was well
  };
  [[nodiscard]] Progress progress(const NcclOperation& operation) const;
  /// Nothing waits or is under way.
  [[nodiscard]] bool is_idle() const;
  /// It has come into being, and NCCL has taken the last call; before, NCCL refuses to close it.
  [[nodiscard]] bool is_settled() const;
  /// True: it had not begun, and will not.
  [[nodiscard]] bool take_back(const NcclOperation& operation);

  void register_buffer(void* address, std::int64_t size_bytes);
  void deregister_buffer(void* address) noexcept;

  /// Ends what is under way; the stream comes free.
  void abort() noexcept;
  // The end of a world that went well: all members call the first, then the second until it says true.
  void begin_closing();
  [[nodiscard]] bool close();

 private:
  enum class State : std::uint8_t {
    connecting,  ///< the id of the communicator is not here yet, or the split it comes from is not done
    settling,    ///< NCCL is at the last call
    ready,
    aborted,
  };
  using Lock = std::unique_lock<std::mutex>;

  void require(ncclResult_t result, const std::string& what) const;
  void connect();
  [[nodiscard]] bool has_settled();
  [[nodiscard]] bool begin_next();
  void issue_step();
  void retire();
  void register_pending();
  [[nodiscard]] std::shared_ptr<NcclOperation> waiting() const;

  NcclRank& rank_;
  const std::string subject_;  // empty: of a split
  const std::vector<int> members_;
  const int index_;
  const std::unique_ptr<Memory> lane_;

  mutable std::mutex mutex_;
  State state_ = State::connecting;
  ncclComm_t comm_ = nullptr;
  ncclUniqueId id_{};                                  // of member 0
  std::deque<std::shared_ptr<NcclOperation>> queue_;   // not begun
  std::shared_ptr<NcclOperation> current_;             // some of its steps are issued
  std::deque<std::shared_ptr<NcclOperation>> issued_;  // all are
  Clock::time_point remote_error_since_{};
  struct Region {
    std::int64_t size_bytes = 0;
    void* handle = nullptr;
    bool is_pending = true;
  };
  std::map<void*, Region> regions_;
};

}  // namespace tandem
