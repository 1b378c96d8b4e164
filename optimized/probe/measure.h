// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "optimized/comm/communicator.h"
#include "optimized/probe/probe.h"

namespace tandem::probing {

/// Attention whose time stands for that of others: causal, blocked.
struct AttentionProbe {
  std::int64_t rows = 1, sequence = 512;
  int heads = 4;
  std::int64_t head_size = 64;
  DType dtype = DType::f32;
};

/// What one rank measured of itself. Bytes per second count what is read and what is written.
struct MachineFigures {
  std::vector<MatrixSample> matrices;
  double copy_bytes_per_second = 0, add_bytes_per_second = 0;  ///< memcpy and Kernels::add, far beyond the caches
  double fastest_copy_bytes_per_second = 0;                    ///< copied, counted once, in the caches too
  double snapshot_bytes_per_second = 0;                        ///< from a GPU into host memory; 0: half of what is copied
  AttentionProbe attention;
  double attention_seconds = 0;  ///< forward of that; and backward
  double attention_backward_seconds = 0;
  bool converts_bf16 = false;
  double core_share = 1;  ///< time that the thread was on its core, of the time that passed
  // Of a GPU; empty, 0: they are a CPU's.
  std::string gpu;
  double gpu_memory_bytes = 0;
  int multiprocessors = 0;
};
/// On one thread, in about `seconds`; times are those of the thread's core. All of the rank's own memory is touched before
/// anything is timed.
[[nodiscard]] MachineFigures measure_machine(double seconds);
/// The same of a GPU, by its own clock, with larger shapes; takes 4 GiB of its memory. "simt": small ones, to see that it runs.
[[nodiscard]] MachineFigures measure_gpu(const std::string& backend, int device, double seconds);

/// Where a rank is: node by host, or by the link's ranks_per_node.
struct RankPlace {
  int node = 0, local = 0;
};

/// Bandwidth of one rank's messages to its neighbour while all ranks of the level send at once.
struct CrowdSample {
  int level = 0;  ///< 0 in the node, 1 between nodes
  std::int64_t bytes = 0;
  double seconds = 0;  ///< of one message each, least
};
struct LinkFigures {
  std::vector<LinkSample> links;  ///< where this rank is the lower one of the pair
  std::vector<CrowdSample> crowd;
  std::vector<CollectiveSample> collectives;  ///< of the groups that this rank is the first of; no predictions
  double message_seconds = 0;                 ///< 8 bytes to the quicker of two neighbours, which do the same; 0: none
};
/// Collective: ping-pong between chosen pairs of each level, one pair at a time; then everybody at once; then sums. Messages of a
/// shaped link are waited for asleep.
[[nodiscard]] LinkFigures measure_links(Communicator& comm, const std::vector<RankPlace>& places, bool shaped, double seconds);

/// Writes, syncs and reads one file in `folder`, which is removed. Throws IoError.
[[nodiscard]] StorageSample measure_storage(const std::string& folder, double seconds);

[[nodiscard]] inline double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace tandem::probing
