// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <string_view>

#include <fmt/format.h>

#include "core/error.h"
#include "reference/tensor_parallel.h"
#include "reference/vocabulary_parallel.h"

namespace tandem::reference {
namespace {

/// Part `rank` of `total` that `ranks` divide.
Interval equal_part(const ParameterSpec& parameter, std::int64_t total, int ranks, int rank) {
  TANDEM_CHECK(total % ranks == 0, fmt::format("{}: {} tensor ranks do not divide {}", parameter.name, ranks, total));
  return {rank * (total / ranks), (rank + 1) * (total / ranks)};
}

}  // namespace

TensorSplit tensor_split(const ParameterSpec& parameter) {
  const std::string_view name = parameter.name;
  if (name == "wte.weight" || name == "lm_head.weight") return TensorSplit::vocabulary;
  if (name.ends_with("attn.c_attn.weight") || name.ends_with("attn.c_attn.bias")) return TensorSplit::qkv_columns;
  if (name.ends_with("c_fc.weight") || name.ends_with("c_fc.bias")) return TensorSplit::columns;
  if (name.ends_with("c_proj.weight")) return TensorSplit::rows;
  return TensorSplit::replicated;
}

ShardSpec tensor_shard(const ParameterSpec& parameter, int ranks, int rank) {
  TANDEM_CHECK(ranks > 0 && rank >= 0 && rank < ranks, fmt::format("tensor rank {} of {}", rank, ranks));
  ShardSpec shard = whole(parameter.name, parameter.shape, DType::f32);
  const std::int64_t columns = parameter.shape.back();
  switch (tensor_split(parameter)) {
    case TensorSplit::replicated:
      shard.replica_index = rank;
      shard.replica_count = ranks;
      break;
    case TensorSplit::columns: shard.slices.back() = {equal_part(parameter, columns, ranks, rank)}; break;
    case TensorSplit::qkv_columns: {
      const Interval part = equal_part(parameter, columns / 3, ranks, rank);
      shard.slices.back().clear();
      for (std::int64_t third = 0; third < 3; ++third) {
        const std::int64_t begin = third * (columns / 3);
        shard.slices.back().push_back({begin + part.begin, begin + part.end});
      }
      break;
    }
    case TensorSplit::rows: shard.slices.front() = {equal_part(parameter, parameter.shape.front(), ranks, rank)}; break;
    case TensorSplit::vocabulary: {
      const Interval own = vocabulary_slice(parameter.shape.front(), ranks, rank);
      shard.slices.front() = {own};
      shard.padded_rows = vocabulary_rows(parameter.shape.front(), ranks) - own.size();
      break;
    }
  }
  return shard;
}

template <class Real>
NamedTensors<Real> tensor_slices(const GptConfig& model, const NamedTensors<Real>& global, int ranks, int rank) {
  NamedTensors<Real> local;
  for (const ParameterSpec& parameter : gpt_parameters(model)) {
    const auto values = tensor(global, parameter.name);
    std::vector<Real>& own = local[parameter.name];
    for (const std::int64_t index : global_indices(tensor_shard(parameter, ranks, rank))) {
      own.push_back(index < 0 ? Real{0} : values[static_cast<std::size_t>(index)]);
    }
  }
  return local;
}

template <class Real>
NamedTensors<Real> joined_tensors(const GptConfig& model, const std::vector<RankGradients<Real>>& ranks) {
  NamedTensors<Real> global = zero_tensors<Real>(model);
  for (const ParameterSpec& parameter : gpt_parameters(model)) {
    const auto values = tensor(global, parameter.name);
    for (int r = static_cast<int>(ranks.size()) - 1; r >= 0; --r) {  // rank 0 last: it speaks for replicated tensors
      const auto own = tensor(ranks[static_cast<std::size_t>(r)].gradients, parameter.name);
      const auto indices = global_indices(tensor_shard(parameter, static_cast<int>(ranks.size()), r));
      TANDEM_CHECK(own.size() == indices.size(), fmt::format("{} has {} elements on rank {}", parameter.name, own.size(), r));
      for (std::size_t i = 0; i < own.size(); ++i) {
        if (indices[i] >= 0) values[static_cast<std::size_t>(indices[i])] = own[i];
      }
    }
  }
  return global;
}

TensorParallelExchanges tensor_parallel_exchanges(const GptConfig& model, std::int64_t tokens, TensorParallelLayout layout) {
  const std::int64_t others = layout.ranks - 1;
  const std::int64_t n = tokens * model.hidden;
  std::int64_t replicated = 0;
  for (const ParameterSpec& parameter : gpt_parameters(model)) {
    if (tensor_split(parameter) == TensorSplit::replicated) replicated += parameter.num_elements();
  }
  return {.embedding = 2 * n * others,
          .layers = 8 * n * others * model.layers,
          .head = 2 * n * others,
          .loss = 6 * tokens * others,
          .gradients = layout.sequence_parallel ? 2 * replicated * others : 0};
}

template <class Real>
double tensor_parallel_norm(const GptConfig& model, const std::vector<RankGradients<Real>>& ranks) {
  double squares = 0.0;
  for (const ParameterSpec& parameter : gpt_parameters(model)) {
    const bool replicated = tensor_split(parameter) == TensorSplit::replicated;
    const std::size_t counted = replicated ? 1 : ranks.size();
    for (std::size_t r = 0; r < counted; ++r) {
      for (const Real value : tensor(ranks[r].gradients, parameter.name)) squares += static_cast<double>(value) * value;
    }
  }
  return std::sqrt(squares);
}

template NamedTensors<float> tensor_slices(const GptConfig&, const NamedTensors<float>&, int, int);
template NamedTensors<double> tensor_slices(const GptConfig&, const NamedTensors<double>&, int, int);
template NamedTensors<float> joined_tensors(const GptConfig&, const std::vector<RankGradients<float>>&);
template NamedTensors<double> joined_tensors(const GptConfig&, const std::vector<RankGradients<double>>&);
template double tensor_parallel_norm(const GptConfig&, const std::vector<RankGradients<float>>&);
template double tensor_parallel_norm(const GptConfig&, const std::vector<RankGradients<double>>&);

}  // namespace tandem::reference
