// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/memory.h"
#include "optimized/comm/nccl/nccl_channel.h"
#include "optimized/comm/nccl/nccl_functions.h"
#include "optimized/comm/world_state.h"

namespace tandem {

/// What NCCL works on in this process. Tests give an emulated one.
struct NcclDevice {
  std::shared_ptr<const NcclFunctions> nccl;
  std::function<std::unique_ptr<Memory>()> new_lane;  ///< of the rank's device
  /// The stream of a lane; makes its device the calling thread's.
  std::function<void*(Memory& lane)> native_stream;
};

/// What all communicators of one rank of one world share: the device, its channels, letters from the other ranks, and the
/// watchdog: a thread that goes on with what is under way, looks after what waits, and ends everything once the world has failed.
///
/// Letters are short texts that travel apart from NCCL, in order between two ranks: ids of communicators, and what the two ends
/// of a message mean by it.
class NcclRank final : public WorldState::Sleepers, public std::enable_shared_from_this<NcclRank> {
 public:
  /// Sends a letter to another rank; never blocks. The other end calls heard().
  using Post = std::function<void(int to, const std::string& letter)>;

  NcclRank(std::shared_ptr<WorldState> world, int rank, NcclDevice device, Post post);
  NcclRank(const NcclRank&) = delete;
  NcclRank& operator=(const NcclRank&) = delete;
  ~NcclRank() override;
  /// Begins to watch.
  void start();

  [[nodiscard]] WorldState& world() const noexcept { return *world_; }
  [[nodiscard]] int rank() const noexcept { return world_rank_; }
  [[nodiscard]] const NcclDevice& device() const noexcept { return device_; }
  [[nodiscard]] const NcclFunctions& nccl() const noexcept { return *device_.nccl; }

  void heard(int from, const std::string& letter);
  void tell(int to, const std::string& subject, const std::string& text);
  /// The next letter from this rank on this subject, if it is here.
  [[nodiscard]] std::optional<std::string> take(int from, const std::string& subject);

  /// Kept until the world ends, however long its communicators live: closing one takes all its members.
  [[nodiscard]] std::shared_ptr<NcclChannel> add(std::shared_ptr<NcclChannel> channel);
  /// This rank has failed: "rank 2 failed: ...".
  void fail(const std::string& reason) noexcept;
  void wake() noexcept override;

  /// Waits until nothing is under way, and communicators that nothing was asked of are there. Throws what the world fails of.
  void drain();
  /// Ends everything that is under way; nothing can be issued any more.
  void abort_all() noexcept;
  /// The end of a world that went well for all ranks: frees what NCCL holds. Throws TimeoutError where another rank does not do
  /// so.
  void close_all();

  void register_buffer(void* address, std::int64_t size_bytes);
  void deregister_buffer(void* address) noexcept;

  /// Device memory for copies of host buffers and for sums; any thread. What is not given back is freed with this.
  struct Scratch {
    std::byte* data = nullptr;
    std::int64_t size_bytes = 0;
  };
  [[nodiscard]] Scratch take_scratch(std::int64_t size_bytes);
  void give_back(const Scratch& scratch);
  /// host memory <- device memory, behind the mark. Blocks.
  void read_behind(Memory::Mark& mark, const void* from, void* to_host, std::int64_t size_bytes);

  /// The number of the next group; groups agree on the highest of their members'.
  std::atomic<std::uint64_t> next_group{1};

 private:
  void watch(const std::stop_token& stop);
  [[nodiscard]] std::vector<std::shared_ptr<NcclChannel>> channels() const;

  const std::shared_ptr<WorldState> world_;
  const int world_rank_;
  const NcclDevice device_;
  const Post post_;

  std::mutex mutex_;  // letters, the flag; nothing else is locked under it
  std::condition_variable_any changed_;
  bool is_woken_ = false;
  std::map<std::pair<int, std::string>, std::deque<std::string>> letters_;
  mutable std::mutex channels_mutex_;  // channels, regions; taken before a channel's own
  std::vector<std::shared_ptr<NcclChannel>> channels_;
  std::map<void*, std::int64_t> regions_;

  std::mutex lane_mutex_;
  std::unique_ptr<Memory> lane_;  // for scratch memory, and what is read from it
  std::vector<Scratch> free_, all_;
  std::jthread watchdog_;
};

}  // namespace tandem
