// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "core/model_config.h"
#include "core/optimizer_config.h"
#include "core/plan.h"
#include "core/shard.h"
#include "optimized/memory/arena.h"

namespace tandem {

/// Parameters, gradients and moments of one rank: each kind one flat buffer, tensors in definition order without gaps, so that a
/// gradient bucket is one range.
class ParameterStore {
 public:
  ParameterStore(Arena& arena, const GptConfig& model, const TrainingPlan& plan, OptimizerKind optimizer);

  [[nodiscard]] const std::vector<ParameterSpec>& specs() const noexcept { return specs_; }
  [[nodiscard]] std::int64_t num_elements() const noexcept { return offsets_.back(); }
  /// Index in specs(); throws ContractError for an unknown name.
  [[nodiscard]] std::size_t index_of(std::string_view name) const;

  [[nodiscard]] TensorView parameter(std::size_t index) const { return slice(parameters_, storage_, index); }
  [[nodiscard]] TensorView gradient(std::size_t index) const { return slice(gradients_, accumulate_, index); }
  /// First and second moment; empty views under SGD.
  [[nodiscard]] TensorView first_moment(std::size_t index) const { return slice(first_moments_, master_, index); }
  [[nodiscard]] TensorView second_moment(std::size_t index) const { return slice(second_moments_, master_, index); }
  [[nodiscard]] TensorView all_gradients() const { return flat(gradients_, accumulate_); }
  [[nodiscard]] TensorView all_parameters() const { return flat(parameters_, storage_); }

  /// What this rank holds of parameter `index`.
  [[nodiscard]] ShardSpec shard(std::size_t index) const;

  /// initial_value() everywhere; moments zero.
  void initialise(const GptConfig& model, Initialization how, std::uint64_t seed);
  /// Both moments of every parameter; they are undefined before.
  void zero_moments();
  /// Sets one tensor of a flat kind from doubles; throws ContractError where the sizes differ.
  static void assign(TensorView target, const std::vector<double>& values);
  [[nodiscard]] static std::vector<double> values_of(TensorView tensor);

 private:
  [[nodiscard]] TensorView slice(const Arena::Buffer& buffer, DType dtype, std::size_t index) const;
  [[nodiscard]] TensorView flat(const Arena::Buffer& buffer, DType dtype) const;

  std::vector<ParameterSpec> specs_;
  std::vector<std::int64_t> offsets_;  // elements; one more than specs_
  std::map<std::string, std::size_t, std::less<>> by_name_;
  DType storage_, accumulate_, master_;
  int data_ranks_;
  Arena::Buffer parameters_, gradients_, first_moments_, second_moments_;
};

}  // namespace tandem
