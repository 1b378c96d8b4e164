// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
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
#include "optimized/zero/host_offload.h"
#include "optimized/zero/ownership.h"

namespace tandem {

/// Parameters, gradients, master copies and moments that one rank holds: each kind one flat buffer, local tensors in the order of
/// local_parameters() without gaps, so that a gradient bucket is one range.
///
/// With ZeRO the optimizer's state (stage 1), also gradients (2), also parameters (3) are kept for owned parts alone: of every
/// unit (parameter_units()) one contiguous range. Whole units of gradients and parameters then exist only between hold_… and
/// drop_…, which the step program asks for. Units with one rank stay whole.
///
/// Where storage is narrower than the master dtype, `stored` values are always the master rounded.
class ParameterStore {
 public:
  /// `host`: where master copies and moments live if the plan offloads them; not null then.
  ParameterStore(Arena& arena, const GptConfig& model, const TrainingPlan& plan, OptimizerKind optimizer, int rank = 0,
                 Arena* host = nullptr, const PitfallSet& pitfalls = {});

  [[nodiscard]] const std::vector<LocalParameter>& parameters() const noexcept { return parameters_; }
  [[nodiscard]] std::size_t size() const noexcept { return parameters_.size(); }
  [[nodiscard]] const ParameterSpec& spec(std::size_t index) const { return parameters_[index].spec; }
  [[nodiscard]] std::int64_t num_elements() const noexcept { return offsets_.back(); }
  /// Index in parameters(); throws ContractError for a name that is not held here.
  [[nodiscard]] std::size_t index_of(std::string_view name) const;
  [[nodiscard]] std::optional<std::size_t> find(std::string_view name) const;
  /// What this rank computes with of parameter `index`.
  [[nodiscard]] const ShardSpec& shard(std::size_t index) const { return parameters_[index].shard; }

  /// A whole local tensor. Throws ContractError where its unit is not here, or holds parameters of an earlier update.
  [[nodiscard]] TensorView parameter(std::size_t index) const;
  [[nodiscard]] TensorView gradient(std::size_t index) const;
  /// All gradients, flat; ContractError where only parts are kept.
  [[nodiscard]] TensorView all_gradients() const;
  [[nodiscard]] DType storage() const noexcept { return storage_; }
  [[nodiscard]] bool has_master_copy() const noexcept { return storage_ != master_; }

  // Owned parts, flat. In the order of parameters; together they are all that the optimizer of this rank updates.
  [[nodiscard]] const std::vector<OwnedPart>& parts() const noexcept { return owned_.parts; }
  [[nodiscard]] std::int64_t owned_elements() const noexcept { return owned_.elements; }
  [[nodiscard]] TensorView stored(const OwnedPart& part) const;
  [[nodiscard]] TensorView gradient(const OwnedPart& part) const;
  /// The copy that is updated: `stored` itself where there is no other.
  [[nodiscard]] TensorView master(const OwnedPart& part) const;
  /// Whether the whole local tensor of parameter `index` is kept between steps, not only the owned part.
  [[nodiscard]] bool keeps_whole(std::size_t index) const { return !deals_parameters(owned_.unit_of[index]); }
  /// Empty views under SGD.
  [[nodiscard]] TensorView first_moment(const OwnedPart& part) const { return in_parts(first_moments_, part); }
  [[nodiscard]] TensorView second_moment(const OwnedPart& part) const { return in_parts(second_moments_, part); }
  /// Optimizer state in host memory: its tensors are, as far as there are such, master copy, first and second moment. Null: it is
  /// on the device.
  [[nodiscard]] HostOffload* offload() noexcept { return offload_.get(); }
  [[nodiscard]] bool keeps_whole_gradients() const noexcept { return zero_stage_ < 2; }
  [[nodiscard]] int zero_stage() const noexcept { return zero_stage_; }
  /// Every gradient that is kept, as one flat tensor: all, or the owned parts.
  [[nodiscard]] TensorView kept_gradients() const;

  // Units.
  [[nodiscard]] const std::vector<GradientBucket>& units() const noexcept { return owned_.units; }
  [[nodiscard]] int ranks_of(int unit) const { return owned_.ranks[static_cast<std::size_t>(unit)]; }
  [[nodiscard]] Interval owned(int unit) const {
    return owned_.owned[static_cast<std::size_t>(unit)];
  }  ///< of the unit's elements
  [[nodiscard]] TensorView unit_parameters(int unit) const;
  [[nodiscard]] TensorView unit_gradients(int unit) const;
  [[nodiscard]] TensorView owned_parameters(int unit) const;
  [[nodiscard]] TensorView owned_gradients(int unit) const;
  [[nodiscard]] bool holds_parameters(int unit) const { return held_parameters_.contains(unit); }
  [[nodiscard]] bool was_gathered(int unit) const { return held_parameters_.at(unit).version >= 0; }
  void hold_parameters(int unit);  ///< memory for all of them; undefined until gathered
  void drop_parameters(int unit);
  void hold_gradients(int unit);
  void drop_gradients(int unit);
  /// Parameters of `unit` have been gathered: they are as of the last update.
  void stamp(int unit);
  /// All stored parts have been updated: whole units gathered before are stale.
  void count_update() noexcept { ++version_; }

  /// initial_value() everywhere; padding and moments zero.
  void initialise(const GptConfig& model, Initialization how, std::uint64_t seed);
  void zero_moments();
  /// Sets parameter `index` wherever it is kept (whole, part, master copy) from the values of its local tensor, shard(index).
  void set_parameter(std::size_t index, const std::vector<double>& local);
  /// `target` <- values, rounded to its dtype; values of a tensor. With `memory`: of a tensor that may lie there. Without: of one
  /// that is the host's.
  static void assign(Memory& memory, TensorView target, const std::vector<double>& values);
  static void assign(TensorView target, const std::vector<double>& values) { assign(host_memory(), target, values); }
  [[nodiscard]] static std::vector<double> values_of(Memory& memory, TensorView tensor);
  [[nodiscard]] static std::vector<double> values_of(TensorView tensor) { return values_of(host_memory(), tensor); }
  /// Where the tensors lie, but for optimizer state that was left with the host.
  [[nodiscard]] Memory& memory() const noexcept { return arena_.memory(); }

 private:
  struct HeldUnit {
    Arena::Buffer memory;
    std::int64_t version = -1;  ///< of the parameters in it
  };
  [[nodiscard]] bool deals_parameters(int unit) const { return zero_stage_ >= 3 && ranks_of(unit) > 1; }
  [[nodiscard]] bool deals_gradients(int unit) const { return zero_stage_ >= 2 && ranks_of(unit) > 1; }
  [[nodiscard]] TensorView range(const Arena::Buffer& buffer, DType dtype, std::int64_t begin, std::int64_t count) const;
  [[nodiscard]] static TensorView in_parts(TensorView state, const OwnedPart& part);
  void allocate_optimizer_state(OptimizerKind optimizer, const TrainingPlan& plan, Arena* host, const PitfallSet& pitfalls);
  [[nodiscard]] const HeldUnit& held(const std::map<int, HeldUnit>& units, int unit, std::string_view what) const;
  void set(std::size_t index, const std::function<double(std::int64_t element)>& value);

  Arena& arena_;
  std::vector<LocalParameter> parameters_;
  std::vector<Shape> shapes_;
  std::vector<std::int64_t> offsets_;  // elements; one more than parameters_
  std::map<std::string, std::size_t, std::less<>> by_name_;
  DType storage_, accumulate_, master_;
  int zero_stage_;
  Ownership owned_;
  std::int64_t version_ = 0;
  // Whole, or of owned parts alone, by the stage. A unit that is not dealt is whole in either.
  Arena::Buffer values_, gradients_;
  std::vector<Arena::Buffer> optimizer_memory_;
  std::unique_ptr<HostOffload> offload_;
  TensorView masters_, first_moments_, second_moments_;  // of owned parts
  std::map<int, HeldUnit> held_parameters_, held_gradients_;
};

/// Of one part that a rank keeps: its master copy, a moment, ...
using PartView = TensorView (ParameterStore::*)(const OwnedPart&) const;

}  // namespace tandem
