// SPDX-License-Identifier: Apache-2.0
// The step programs of a layout as files for other simulators.
#include <fmt/format.h>

#include "cli/scale_command.h"
#include "core/error.h"
#include "optimized/engine/lower.h"
#include "optimized/scaling/chakra.h"
#include "optimized/scaling/export_programs.h"

namespace tandem {

std::string export_step(const ScaleArguments& arguments) {
  const char* const option = arguments.chakra.empty() ? "--export-programs" : "--chakra";
  if (arguments.model.empty() || arguments.clusters.size() != 1 || arguments.devices.size() != 1) {
    throw InputError(fmt::format("{}: give one --model, one --cluster and one size for --gpus", option));
  }
  const ModelShape shape = read_model_shape(arguments.model);
  const std::optional<GptConfig> model = gpt_config_of(shape);
  if (!model) {
    throw InputError(
        fmt::format("{}: the engine has no step program for {}; it trains models of the GPT-2 kind", option, shape.name));
  }
  const ClusterSpec cluster = read_cluster(arguments.clusters.front());
  require_sizes(arguments, cluster);
  const Workload workload =
      workload_at(arguments, shape, layout_of(arguments, usual_precision(cluster)), arguments.devices.front());
  require_legal(workload.plan, *model);
  const std::int64_t sequence = workload.tokens_per_row();
  std::string text;
  if (!arguments.programs_file.empty()) {
    export_programs(workload.plan, *model, sequence, cluster, arguments.programs_file);
    text += fmt::format("step programs of {} ranks: {}\n", workload.plan.parallel.world_size(), arguments.programs_file);
  }
  if (!arguments.chakra.empty()) {
    const ChakraFiles files = write_chakra([&](int rank) { return lower(workload.plan, *model, sequence, rank); }, workload.plan,
                                           cost_on(cluster, workload.plan, *model, sequence), arguments.chakra);
    text += fmt::format("execution traces of {} ranks, {} operations: {}.0.et ...; groups: {}\n", files.traces.size(),
                        files.nodes, arguments.chakra, files.groups.string());
  }
  return text;
}

}  // namespace tandem
