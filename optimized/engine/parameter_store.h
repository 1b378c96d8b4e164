// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/model_config.h"
#include "core/optimizer_config.h"
#include "core/plan.h"
#include "core/shard.h"
#include "optimized/hybrid_parallel/parameter_layout.h"
#include "optimized/memory/arena.h"

namespace tandem {

/// Parameters, gradients and moments that one rank holds: each kind one flat buffer, local tensors in the order of
/// local_parameters() without gaps, so that a gradient bucket is one range.
class ParameterStore {
 public:
  ParameterStore(Arena& arena, const GptConfig& model, const TrainingPlan& plan, OptimizerKind optimizer, int rank = 0);

  [[nodiscard]] const std::vector<LocalParameter>& parameters() const noexcept { return parameters_; }
  [[nodiscard]] std::size_t size() const noexcept { return parameters_.size(); }
  [[nodiscard]] const ParameterSpec& spec(std::size_t index) const { return parameters_[index].spec; }
  [[nodiscard]] std::int64_t num_elements() const noexcept { return offsets_.back(); }
  /// Index in parameters(); throws ContractError for a name that is not held here.
  [[nodiscard]] std::size_t index_of(std::string_view name) const;
  [[nodiscard]] std::optional<std::size_t> find(std::string_view name) const;

  [[nodiscard]] TensorView parameter(std::size_t index) const { return slice(values_, storage_, index); }
  [[nodiscard]] TensorView gradient(std::size_t index) const { return slice(gradients_, accumulate_, index); }
  /// First and second moment; empty views under SGD.
  [[nodiscard]] TensorView first_moment(std::size_t index) const { return slice(first_moments_, master_, index); }
  [[nodiscard]] TensorView second_moment(std::size_t index) const { return slice(second_moments_, master_, index); }
  [[nodiscard]] TensorView all_gradients() const { return flat(gradients_, accumulate_); }
  [[nodiscard]] TensorView all_parameters() const { return flat(values_, storage_); }

  /// What this rank holds of parameter `index`.
  [[nodiscard]] const ShardSpec& shard(std::size_t index) const { return parameters_[index].shard; }

  /// initial_value() everywhere; padding and moments zero.
  void initialise(const GptConfig& model, Initialization how, std::uint64_t seed);
  /// Both moments of every parameter; they are undefined before.
  void zero_moments();
  /// Sets one local tensor from doubles; throws ContractError where the sizes differ.
  static void assign(TensorView target, const std::vector<double>& values);
  [[nodiscard]] static std::vector<double> values_of(TensorView tensor);

 private:
  [[nodiscard]] TensorView slice(const Arena::Buffer& buffer, DType dtype, std::size_t index) const;
  [[nodiscard]] TensorView flat(const Arena::Buffer& buffer, DType dtype) const;

  std::vector<LocalParameter> parameters_;
  std::vector<Shape> shapes_;
  std::vector<std::int64_t> offsets_;  // elements; one more than parameters_
  std::map<std::string, std::size_t, std::less<>> by_name_;
  DType storage_, accumulate_, master_;
  Arena::Buffer values_, gradients_, first_moments_, second_moments_;
};

}  // namespace tandem
