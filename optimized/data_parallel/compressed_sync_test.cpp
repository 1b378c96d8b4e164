// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_parallel/compressed_sync.h"

#include <chrono>
#include <vector>

#include <gtest/gtest.h>

#include "optimized/comm/world.h"

namespace tandem {
namespace {

// Whoever has the last sum may leave at once, while the thread that made it is still on its way out of the work: that is no
// failure, and the other rank must not be told of one. Many times, for the moment is short.
TEST(CompressedSync, LeavesOthersAloneWhenItIsDestroyedJustAfterItsLastBucket) {
  constexpr int kTimes = 150;
  GptConfig model{.vocabulary = 5, .sequence = 4, .layers = 1, .hidden = 4, .heads = 2, .mlp_hidden = 6};
  TrainingPlan plan;
  plan.parallel.data = 2;
  plan.overlap.gradients = true;
  plan.compression.codec = "int8";
  run_world({.ranks = 2, .deadline = std::chrono::milliseconds(10000)}, [&](Communicator& comm) {
    Arena arena({.huge_pages = false});
    const auto kernels = make_cpu_kernels({});
    const RankContext context{&comm, kernels.get(), &arena, nullptr, {}, {}};
    ProcessGroups groups(comm, plan);
    const auto parameters = local_parameters(model, plan, groups.grid(), comm.rank());
    std::int64_t elements = 0;
    for (const LocalParameter& parameter : parameters) elements += num_elements(parameter.shard.local_shape());
    for (int time = 0; time < kTimes; ++time) {
      std::vector<float> gradients(static_cast<std::size_t>(elements), 127.0F);
      {
        CompressedSync sync(context, arena, plan, 1, groups, parameters);
        sync.begin_step(0, 1.0);
        sync.start(0, view_of(gradients, {elements}), Progress::background)();
      }
      ASSERT_EQ(gradients.front(), 254.0F);
      comm.barrier();  // throws where a rank has aborted the world
    }
  });
}

}  // namespace
}  // namespace tandem
