// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

/// Blocks of CUDA threads on one thread of the process. A CUDA thread is a *lane*: it runs alone until it meets others (a
/// barrier, a warp operation) or returns. In which order lanes take turns is drawn anew at every meeting, so that a kernel whose
/// result hangs on an order that CUDA doesn't promise gives another result under another seed (docs/cuda.md).
namespace tandem::simt_gpu {

/// Sizes and places of blocks and threads, as CUDA has them.
struct uint3 {
  unsigned x, y, z;
};
struct dim3 {  ///< what is not given is 1
  unsigned x, y, z;
  constexpr dim3(unsigned width = 1, unsigned height = 1, unsigned depth = 1) : x(width), y(height), z(depth) {}
};

class Fibre;
struct BlockThread;
/// What a warp's lanes do at a meeting, once for all: `lanes` are the warp's 32 (fewer in a block's last), `mask` those that met.
using Together = void (*)(BlockThread* lanes, unsigned mask);

struct BlockThread {
  enum class State : std::uint8_t { fresh, ready, at_block, at_warp, left };

  uint3 index{};        ///< threadIdx
  unsigned number = 0;  ///< in the block
  State state = State::fresh;
  bool vote = false;
  Fibre* worker = nullptr;     ///< whose stack it lives on; null before it has begun
  const char* file = nullptr;  // where it waits
  int line = 0;
  unsigned mask = 0;
  Together together = nullptr;
  int source = 0;                           ///< lane of the warp that exchange() reads
  alignas(16) std::uint32_t give[10] = {};  ///< operands of what is done together
  alignas(16) std::uint32_t take[4] = {};   ///< its results

  struct Copy {
    void* to;
    const void* from;  ///< null: zeros
  };
  std::vector<Copy> copies;          ///< of cp.async, not done yet
  std::vector<std::size_t> commits;  ///< number of copies behind which each group ends

  void* sanitizer_fibre = nullptr;
  unsigned meetings = 0;
  bool uneven = false;  ///< the lanes of its last meeting had met differently often before
};

/// The block that this thread of the process runs.
struct BlockView {
  dim3 grid, block;
  uint3 index{};
  std::byte* dynamic_shared = nullptr;
};
inline constinit thread_local BlockThread* current_lane = nullptr;
inline constinit thread_local BlockView* current_block = nullptr;

struct GridSpec {
  dim3 grid, block;
  std::size_t shared_bytes = 0;
  std::uint64_t seed = 0;  ///< 0: blocks and lanes in ascending order
};
/// Calls body(closure) once for every thread of every block. Throws GpuError for what a kernel must not do (see docs/cuda.md),
/// with the place of the operation; the other threads of the block are unwound then.
void run_grid(const GridSpec& spec, void (*body)(const void*), const void* closure);

// For lanes.

/// __syncthreads(): returns when all lanes of the block are here; the number of those whose `vote` holds.
int meet_block(bool vote, const char* file, int line);
/// __syncwarp(mask): then `together` has been called, if there is one.
void meet_warp(unsigned mask, Together together, const char* file, int line);
/// `bits` of lane `source` of the warp.
std::uint64_t exchange(unsigned mask, std::uint64_t bits, int source, const char* file, int line);
unsigned ballot(unsigned mask, bool vote, const char* file, int line);

/// For what a kernel did wrong: throws GpuError naming the thread, the block and the place.
[[noreturn]] void fail_lane(const char* what, const char* file, int line);

}  // namespace tandem::simt_gpu
