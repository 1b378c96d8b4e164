// SPDX-License-Identifier: Apache-2.0
#include "reference/recomputation.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem::reference {
namespace {

void require_mode(std::string_view mode) {
  TANDEM_CHECK(mode == "none" || mode == "selective" || mode == "full", fmt::format("there is no recomputation '{}'", mode));
}

struct MlpBytes {
  double kept = 0;        // with selective recomputation too
  double after_gelu = 0;  // without any alone
};

MlpBytes mlp_bytes(const GptConfig& model, const RecomputationSize& size, double x, double w) {
  const auto h = static_cast<double>(model.hidden);
  const double f = static_cast<double>(model.mlp_width()) / size.tensor_ranks;
  const auto n = static_cast<double>(size.tokens);
  if (model.experts == 0) return {n * f * x, n * f * x};
  const std::int64_t rows = size.tokens / size.sequence;
  const std::int64_t group_rows = size.expert_group_rows > 0 ? size.expert_group_rows : rows * size.expert_ranks;
  const std::int64_t capacity = model.expert_capacity(size.sequence);
  const auto sent = static_cast<double>(model.experts * rows * capacity);
  const auto received = static_cast<double>(model.experts / size.expert_ranks * group_rows * capacity);
  const double routing = n * (model.experts + model.expert_choices) * w;
  return {routing + received * (h + f) * x + sent * h * x, received * f * x};
}

}  // namespace

double published_activation_bytes(const GptConfig& model, const RecomputationSize& size, std::string_view mode) {
  require_mode(mode);
  const auto h = static_cast<double>(model.hidden);
  const double sbh = static_cast<double>(size.tokens) * h;
  const double matrix = mode == "none" ? 5.0 * model.heads * static_cast<double>(size.sequence) / h : 0.0;
  const double t = size.tensor_ranks;
  if (mode == "full") return 2 * sbh;
  if (size.sequence_parallel) return sbh / t * (34 + matrix);
  return sbh * (10 + 24 / t + matrix / t);
}

double activation_bytes(const GptConfig& model, const RecomputationSize& size, std::string_view mode) {
  require_mode(mode);
  const auto h = static_cast<double>(model.hidden);
  const double t = size.tensor_ranks;
  const double slices = size.sequence_parallel ? t : 1;
  const double x = size.bytes;
  const double w = std::max(4, size.bytes);
  const auto n = static_cast<double>(size.tokens);
  const double out = n * h * x / slices;
  if (mode == "full") return out;
  const MlpBytes mlp = mlp_bytes(model, size, x, w);
  const double middle = n * h * x / slices;
  const double statistics = 4 * n * w / slices;
  const double attention = 4 * n * h * x / t + (size.materialized ? 0 : n * model.heads * w / t);
  const double selective = out + middle + statistics + attention + mlp.kept;
  if (mode == "selective") return selective;
  const double matrix = size.materialized ? n * model.heads * static_cast<double>(size.sequence) * x / t : 0;
  return selective + 2 * n * h * x + mlp.after_gelu + matrix;
}

double blocked_activation_bytes(const GptConfig& model, const RecomputationSize& size, std::string_view mode) {
  RecomputationSize blocked = size;
  blocked.materialized = false;
  return activation_bytes(model, blocked, mode);
}

std::vector<ByteTerm> differences_from_published(const GptConfig& model, const RecomputationSize& size, std::string_view mode) {
  require_mode(mode);
  TANDEM_CHECK(model.experts == 0 && model.mlp_width() == 4 * model.hidden && size.bytes == 2,
               "the published formulas are for a dense MLP of width 4 hidden and 2 bytes an element");
  const auto nh = static_cast<double>(size.tokens * model.hidden);
  const auto na = static_cast<double>(size.tokens) * model.heads;
  const double matrix = na * static_cast<double>(size.sequence);
  const double t = size.tensor_ranks;
  const double slices = size.sequence_parallel ? t : 1;
  std::vector<ByteTerm> terms;
  const auto add = [&](const char* reason, double bytes) {
    if (bytes != 0) terms.push_back({reason, bytes});
  };
  if (mode == "full") {
    add("input of a layer in slices", -2 * nh * (1 - 1 / slices));
    return terms;
  }
  add("masks of residual dropout", -2 * nh / slices);
  add("mean and 1/stddev of norms", 16 * static_cast<double>(size.tokens) / slices);
  if (!size.materialized) add("log-sum-exp", 4 * na / t);
  if (mode == "selective") {
    add("outputs of norms made again", -4 * nh / slices);
    add("output of GELU made again", -8 * nh / t);
    return terms;
  }
  add("mask of attention's dropout", -matrix / t);
  add("probabilities after dropout", -2 * matrix / t);
  if (!size.materialized) add("probabilities", -2 * matrix / t);
  add("outputs of norms whole", 4 * nh * (1 - 1 / slices));
  return terms;
}

double recomputed_flops(const GptConfig& model, const RecomputationSize& size, bool output_kept) {
  const auto h = static_cast<double>(model.hidden);
  const auto f = static_cast<double>(model.mlp_width());
  return attention_core_flops(model, size) + 2 * static_cast<double>(size.tokens) * h * (4 * h + (output_kept ? 1 : 2) * f);
}

double attention_core_flops(const GptConfig& model, const RecomputationSize& size) {
  return 2 * static_cast<double>(size.tokens * model.hidden * (size.sequence + 1));
}

}  // namespace tandem::reference
