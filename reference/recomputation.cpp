// SPDX-License-Identifier: Apache-2.0
#include "reference/recomputation.h"

#include <fmt/format.h>

#include "core/error.h"

namespace tandem::reference {
namespace {

void require_mode(std::string_view mode) {
  TANDEM_CHECK(mode == "none" || mode == "selective" || mode == "full", fmt::format("there is no recomputation '{}'", mode));
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

double blocked_activation_bytes(const GptConfig& model, const RecomputationSize& size, std::string_view mode) {
  require_mode(mode);
  const auto h = static_cast<double>(model.hidden);
  const auto f = static_cast<double>(model.mlp_width());
  const double t = size.tensor_ranks;
  const double slices = size.sequence_parallel ? t : 1;
  const double tokens = static_cast<double>(size.tokens) * size.bytes;
  if (mode == "full") return tokens * h / slices;
  const double cheap = mode == "none" ? 2 * h + f / t : 0;
  return tokens * (cheap + (4 * h + f + model.heads) / t + (2 * h + 4) / slices);
}

double recomputed_flops(const GptConfig& model, const RecomputationSize& size, bool output_kept) {
  const auto h = static_cast<double>(model.hidden);
  const auto f = static_cast<double>(model.mlp_width());
  const auto s = static_cast<double>(size.sequence);
  return 2 * static_cast<double>(size.tokens) * h * (4 * h + (s + 1) + (output_kept ? 1 : 2) * f);
}

}  // namespace tandem::reference
