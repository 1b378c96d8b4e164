// SPDX-License-Identifier: Apache-2.0
#include "reference/pipeline_schedules.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem::reference {
namespace {

void require_size(std::string_view schedule, PipelineSize size) {
  TANDEM_CHECK(size.ranks > 0 && size.chunks > 0 && size.micro_batches > 0,
               fmt::format("{} ranks, {} chunks, {} micro-batches", size.ranks, size.chunks, size.micro_batches));
  const bool interleaved = schedule == "interleaved";
  TANDEM_CHECK(interleaved || schedule == "gpipe" || schedule == "1f1b" || schedule == "zb-h1",
               fmt::format("no closed form of schedule '{}'", schedule));
  TANDEM_CHECK(interleaved || size.chunks == 1, fmt::format("{} with {} chunks", schedule, size.chunks));
  TANDEM_CHECK(!interleaved || size.micro_batches % size.ranks == 0,
               fmt::format("interleaved, {} micro-batches on {} ranks", size.micro_batches, size.ranks));
}

}  // namespace

double pipeline_idle_time(std::string_view schedule, PipelineSize size, PipelineTimes times) {
  require_size(schedule, size);
  const double others = size.ranks - 1;
  if (schedule == "zb-h1") {
    TANDEM_CHECK(size.micro_batches >= size.ranks, fmt::format("zb-h1, {} micro-batches", size.micro_batches));
    TANDEM_CHECK(times.weight_backward <= std::min(times.forward, times.input_backward), "zb-h1 with long weight parts");
    return others * (times.forward + times.input_backward - times.weight_backward);
  }
  return others * times.work() / size.chunks;
}

double pipeline_bubble_share(std::string_view schedule, PipelineSize size, PipelineTimes times) {
  const double idle = pipeline_idle_time(schedule, size, times);
  return idle / (idle + size.micro_batches * times.work());
}

std::int64_t pipeline_peak_in_flight(std::string_view schedule, PipelineSize size, int rank) {
  require_size(schedule, size);
  TANDEM_CHECK(rank >= 0 && rank < size.ranks, fmt::format("pipeline rank {} of {}", rank, size.ranks));
  const std::int64_t after = size.ranks - rank - 1;
  const std::int64_t all = std::int64_t{size.chunks} * size.micro_batches;
  if (schedule == "gpipe") return all;
  if (schedule == "1f1b") return std::min(all, after + 1);
  if (schedule == "zb-h1") return std::min<std::int64_t>(all, size.ranks);
  return std::min(all, 2 * after + std::int64_t{size.chunks - 1} * size.ranks + 1);
}

}  // namespace tandem::reference
