// SPDX-License-Identifier: Apache-2.0
#include "suites/hybrid_options.h"

#include <algorithm>

#include <fmt/format.h>

namespace tandem {
namespace {

enum Factor : std::uint8_t {
  tensor,
  sequence_parallel,
  pipeline,
  chunks,
  schedule,
  data,
  context,
  experts,
  accumulation,
  tying,
  dropout,
  rank_order,
  row_shape,
  buckets,
  precision,
  recompute,
  zero
};

constexpr int kMostRanks = 8;
constexpr int kTensor[] = {1, 2, 4};
constexpr int kPipeline[] = {1, 2, 4};
constexpr int kData[] = {1, 2, 3};
constexpr int kContext[] = {1, 2};
constexpr int kAccumulation[] = {1, 2, 4};
constexpr const char* kSchedules[] = {"1f1b", "gpipe", "zb-h1", "zb-v"};
constexpr const char* kOrders[] = {"tensor-context-data-pipeline", "pipeline-data-context-tensor",
                                   "data-tensor-pipeline-context"};
constexpr const char* kPrecisions[] = {"fp32", "bf16", "fp16"};
constexpr const char* kRecomputations[] = {"none", "selective", "full"};
// Dense; four experts on every rank; four experts dealt to two data ranks, two for each token.
struct ExpertChoice {
  int experts, choices, ranks;
};
constexpr ExpertChoice kExperts[] = {{0, 1, 1}, {4, 1, 1}, {4, 2, 2}};

// No value of these makes a plan illegal or legal: what was found for one row holds for all that differ only in them.
constexpr Factor kNeverRefused[] = {tying, dropout, rank_order, row_shape, recompute};

int at(const Row& row, Factor factor) { return row[factor]; }

bool is_legal(const ParallelVariant& variant) {
  // In 16 bits a router's choice may be another one for no fault but rounding.
  if (variant.experts > 0 && variant.precision != "fp32") return false;
  return variant.degrees.world_size() <= kMostRanks && conflicts(plan_of(variant), model_of(variant)).empty();
}

}  // namespace

HybridOptions::HybridOptions() {
  problem_.factors = {
      {"tensor", 3},    {"sequence_parallel", 2}, {"pipeline", 3},     {"chunks", 2},    {"schedule", 4}, {"data", 3},
      {"context", 2},   {"experts", 3},           {"accumulation", 3}, {"tying", 2},     {"dropout", 2},  {"rank_order", 3},
      {"row_shape", 2}, {"buckets", 2},           {"precision", 3},    {"recompute", 3}, {"zero", 4}};
  std::vector<int> all;
  for (std::size_t i = 0; i < problem_.factors.size(); ++i) all.push_back(static_cast<int>(i));
  problem_.pairwise = {all};
  problem_.triplewise = {{tensor, sequence_parallel, pipeline, chunks, data, accumulation, tying, dropout},
                         {zero, tensor, pipeline, data, recompute}};
  problem_.legal = [this](const Row& row) { return is_legal_row(row); };
}

bool HybridOptions::is_legal_row(const Row& row) const {
  std::size_t index = 0;
  std::size_t size = 1;
  Row asked = row;
  for (const Factor ignored : kNeverRefused) asked[ignored] = 0;
  for (std::size_t i = 0; i < asked.size(); ++i) {
    const bool ignored = std::ranges::find(kNeverRefused, static_cast<Factor>(i)) != std::end(kNeverRefused);
    if (ignored) continue;
    index += static_cast<std::size_t>(asked[i]) * size;
    size *= static_cast<std::size_t>(problem_.factors[i].num_values);
  }
  known_.resize(size);
  std::optional<bool>& known = known_[index];
  if (!known) known = is_legal(variant_of(asked));
  return *known;
}

bool HybridOptions::is_legal_without_memory(const Row& row) const { return is_legal(variant_of(row)); }

ParallelVariant HybridOptions::variant_of(const Row& row) const {
  const ExpertChoice& moe = kExperts[at(row, experts)];
  ParallelVariant variant;
  variant.degrees = {kData[at(row, data)], kTensor[at(row, tensor)], kPipeline[at(row, pipeline)], kContext[at(row, context)],
                     moe.ranks};
  variant.pipeline = {kSchedules[at(row, schedule)], 1 + at(row, chunks), ""};
  variant.sequence_parallel = at(row, sequence_parallel) == 1;
  variant.experts = moe.experts;
  variant.choices = moe.choices;
  variant.tied = at(row, tying) == 0;
  variant.micro_batches = kAccumulation[at(row, accumulation)];
  variant.rows = 9;
  // At least one layer a stage, dealt unevenly where there are several.
  const int stages = variant.degrees.pipeline * variant.pipeline.chunks;
  variant.layers = stages == 1 ? 2 : stages + (stages < 8 ? 1 : 0);
  variant.dropout = at(row, dropout) == 1 ? 0.1 : 0.0;
  variant.rank_order = kOrders[at(row, rank_order)];
  variant.row_shape = at(row, row_shape) == 1 ? RowShape::packed : RowShape::skewed;
  variant.bucket_bytes = at(row, buckets) == 1 ? 8192 : 0;
  variant.precision = kPrecisions[at(row, precision)];
  variant.recompute = {kRecomputations[at(row, recompute)], 1};
  variant.zero_stage = at(row, zero);
  return variant;
}

std::string HybridOptions::name_of(const Row& row) const {
  const ParallelVariant v = variant_of(row);
  std::string name =
      fmt::format("d{}-t{}{}-p{}", v.degrees.data, v.degrees.tensor, v.sequence_parallel ? "s" : "", v.degrees.pipeline);
  if (v.degrees.pipeline > 1) name += fmt::format("x{}-{}", v.pipeline.chunks, v.pipeline.effective_schedule());
  if (v.degrees.pipeline == 1 && v.pipeline.schedule != "1f1b") name += fmt::format("-{}", v.pipeline.schedule);
  name += fmt::format("-c{}", v.degrees.context);
  if (v.experts > 0) name += fmt::format("-e{}top{}", v.degrees.expert, v.choices);
  name += fmt::format("-m{}", v.micro_batches);
  if (!v.tied) name += "-untied";
  if (v.dropout > 0) name += "-dropout";
  if (at(row, rank_order) > 0) name += fmt::format("-order{}", at(row, rank_order));
  if (v.row_shape == RowShape::packed) name += "-packed";
  if (v.bucket_bytes > 0) name += "-buckets";
  if (v.precision != "fp32") name += "-" + v.precision;
  if (v.recompute.mode != "none") name += "-" + v.recompute.mode;
  if (v.zero_stage > 0) name += fmt::format("-zero{}", v.zero_stage);
  return name;
}

std::vector<std::pair<std::string, ParallelVariant>> HybridOptions::named(std::span<const std::string_view> rows) const {
  std::vector<std::pair<std::string, ParallelVariant>> variants;
  for (const std::string_view digits : rows) variants.emplace_back(name_of(row_of(digits)), variant_of(row_of(digits)));
  return variants;
}

Row row_of(std::string_view digits) {
  Row row;
  for (const char digit : digits) row.push_back(digit - '0');
  return row;
}

void HybridOptions::for_each(int stride, const std::function<void(const ParallelVariant&)>& use) const {
  std::int64_t rows = 1;
  for (const CoveringFactor& factor : problem_.factors) rows *= factor.num_values;
  for (std::int64_t index = 0; index < rows; index += stride) {
    Row row;
    std::int64_t rest = index;
    for (const CoveringFactor& factor : problem_.factors) {
      row.push_back(static_cast<int>(rest % factor.num_values));
      rest /= factor.num_values;
    }
    use(variant_of(row));
  }
}

}  // namespace tandem
