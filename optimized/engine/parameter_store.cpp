// SPDX-License-Identifier: Apache-2.0
#include "optimized/engine/parameter_store.h"

#include <fmt/format.h>

namespace tandem {
namespace {

// Elements of a floating tensor of the host, `value(i)` rounded to its dtype.
void assign_elements(TensorView target, const std::function<double(std::int64_t)>& value) {
  if (!target) return;
  const std::int64_t count = target.num_elements();
  if (target.dtype() == DType::f64) {
    for (std::int64_t i = 0; i < count; ++i) target.as<double>()[static_cast<std::size_t>(i)] = value(i);
  } else if (target.dtype() == DType::f32) {
    for (std::int64_t i = 0; i < count; ++i) target.as<float>()[static_cast<std::size_t>(i)] = static_cast<float>(value(i));
  } else {
    auto* const bits = static_cast<std::uint16_t*>(target.data());
    const bool brain = target.dtype() == DType::bf16;
    for (std::int64_t i = 0; i < count; ++i) {
      // The stored copy is the fp32 master rounded: rounding twice is its definition.
      const auto master = static_cast<float>(value(i));
      bits[i] = brain ? to_bf16_bits(master) : to_f16_bits(master);
    }
  }
}

void assign_elements(Memory& memory, TensorView target, const std::function<double(std::int64_t)>& value) {
  HostView host(memory, target, Access::write);
  assign_elements(host.view(), value);
  host.finish();
}

void zero(Memory& memory, TensorView tensor) {
  if (!tensor) return;
  Memory& own = memory.holds(tensor.data()) ? memory : host_memory();
  own.set_bytes(tensor.data(), 0, tensor.size_bytes());
}

}  // namespace

ParameterStore::ParameterStore(Arena& arena, const GptConfig& model, const TrainingPlan& plan, OptimizerKind optimizer, int rank,
                               Arena* host, const PitfallSet& pitfalls)
    : arena_(arena),
      parameters_(local_parameters(model, plan, ProcessGrid(plan), rank)),
      offsets_{0},
      storage_(plan.numerics.storage),
      accumulate_(plan.numerics.accumulate),
      master_(plan.numerics.master),
      zero_stage_(plan.zero_stage),
      owned_(ownership(parameters_, plan, ProcessGrid(plan), rank)) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    shapes_.push_back(parameters_[i].shard.local_shape());
    offsets_.push_back(offsets_.back() + parameters_[i].num_elements());
    by_name_.emplace(parameters_[i].spec.name, i);
  }
  const Shape all = {num_elements()};
  const Shape parts = {owned_.elements};
  values_ = arena.allocate(storage_, zero_stage_ >= 3 ? parts : all, MemoryCategory::parameters);
  gradients_ = arena.allocate(accumulate_, zero_stage_ >= 2 ? parts : all, MemoryCategory::gradients);
  allocate_optimizer_state(optimizer, plan, host, pitfalls);
}

void ParameterStore::allocate_optimizer_state(OptimizerKind optimizer, const TrainingPlan& plan, Arena* host,
                                              const PitfallSet& pitfalls) {
  std::vector<TensorView*> tensors;
  if (has_master_copy()) tensors.push_back(&masters_);
  if (optimizer == OptimizerKind::adamw) tensors.insert(tensors.end(), {&first_moments_, &second_moments_});
  if (tensors.empty()) return;
  if (plan.offload == "optimizer") {
    TANDEM_CHECK(host != nullptr, "offloaded optimizer state needs a host arena");
    HostOffloadOptions options;
    options.tensors = static_cast<int>(tensors.size());
    options.elements = owned_.elements;
    options.dtype = master_;
    options.pitfalls = pitfalls;
    offload_ = std::make_unique<HostOffload>(arena_, *host, options);
    for (std::size_t i = 0; i < tensors.size(); ++i) *tensors[i] = offload_->host(static_cast<int>(i));
    return;
  }
  // Sharding that keeps the whole state beside the shard costs what it was meant to save.
  const bool keeps_all = pitfalls.on(Pitfall::full_optimizer_state_kept);
  for (TensorView* tensor : tensors) {
    optimizer_memory_.push_back(arena_.allocate(master_, {owned_.elements}, MemoryCategory::optimizer));
    *tensor = optimizer_memory_.back().view(master_, {owned_.elements});
    if (keeps_all) optimizer_memory_.push_back(arena_.allocate(master_, {num_elements()}, MemoryCategory::optimizer));
  }
}

std::size_t ParameterStore::index_of(std::string_view name) const {
  const auto found = by_name_.find(name);
  TANDEM_CHECK(found != by_name_.end(), fmt::format("this rank holds no parameter '{}'", name));
  return found->second;
}

std::optional<std::size_t> ParameterStore::find(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? std::nullopt : std::optional(found->second);
}

TensorView ParameterStore::range(const Arena::Buffer& buffer, DType dtype, std::int64_t begin, std::int64_t count) const {
  if (!buffer) return {};
  return {static_cast<std::byte*>(buffer.data()) + begin * static_cast<std::int64_t>(size_bytes(dtype)), dtype, {count}};
}

TensorView ParameterStore::in_parts(TensorView state, const OwnedPart& part) {
  return state ? state.flat(part.at, part.elements.size()) : state;
}

const ParameterStore::HeldUnit& ParameterStore::held(const std::map<int, HeldUnit>& units, int unit,
                                                     std::string_view what) const {
  const auto found = units.find(unit);
  TANDEM_CHECK(found != units.end(),
               fmt::format("{} of unit {} ({}...) are not here", what, unit,
                           spec(static_cast<std::size_t>(owned_.units[static_cast<std::size_t>(unit)].parameters.begin)).name));
  return found->second;
}

TensorView ParameterStore::unit_parameters(int unit) const {
  const auto u = static_cast<std::size_t>(unit);
  const std::int64_t count = owned_.units[u].elements.size();
  if (deals_parameters(unit)) return range(held(held_parameters_, unit, "parameters").memory, storage_, 0, count);
  return range(values_, storage_, zero_stage_ >= 3 ? owned_.at[u] : owned_.units[u].elements.begin, count);
}

TensorView ParameterStore::unit_gradients(int unit) const {
  const auto u = static_cast<std::size_t>(unit);
  const std::int64_t count = owned_.units[u].elements.size();
  if (deals_gradients(unit)) return range(held(held_gradients_, unit, "gradients").memory, accumulate_, 0, count);
  return range(gradients_, accumulate_, zero_stage_ >= 2 ? owned_.at[u] : owned_.units[u].elements.begin, count);
}

TensorView ParameterStore::owned_parameters(int unit) const {
  const auto u = static_cast<std::size_t>(unit);
  if (!deals_parameters(unit)) return unit_parameters(unit).flat(owned_.owned[u].begin, owned_.owned[u].size());
  return range(values_, storage_, owned_.at[u], owned_.owned[u].size());
}

TensorView ParameterStore::owned_gradients(int unit) const {
  const auto u = static_cast<std::size_t>(unit);
  if (!deals_gradients(unit)) return unit_gradients(unit).flat(owned_.owned[u].begin, owned_.owned[u].size());
  return range(gradients_, accumulate_, owned_.at[u], owned_.owned[u].size());
}

TensorView ParameterStore::parameter(std::size_t index) const {
  const int unit = owned_.unit_of[index];
  if (deals_parameters(unit)) {
    // Weights of an earlier update are as good as any other numbers to every kernel: only the stamp tells.
    const std::int64_t version = held(held_parameters_, unit, "parameters").version;
    TANDEM_CHECK(version == version_, version < 0 ? fmt::format("{} is read before its unit is gathered", spec(index).name)
                                                  : fmt::format("{} is stale: gathered after update {}, read after update {}",
                                                                spec(index).name, version, version_));
  }
  const std::int64_t in_unit = offsets_[index] - owned_.units[static_cast<std::size_t>(unit)].elements.begin;
  return {unit_parameters(unit).flat(in_unit, parameters_[index].num_elements()).data(), storage_, shapes_[index]};
}

TensorView ParameterStore::gradient(std::size_t index) const {
  const int unit = owned_.unit_of[index];
  const std::int64_t in_unit = offsets_[index] - owned_.units[static_cast<std::size_t>(unit)].elements.begin;
  return {unit_gradients(unit).flat(in_unit, parameters_[index].num_elements()).data(), accumulate_, shapes_[index]};
}

TensorView ParameterStore::all_gradients() const {
  TANDEM_CHECK(zero_stage_ < 2, "gradients are kept in parts");
  return range(gradients_, accumulate_, 0, num_elements());
}

TensorView ParameterStore::kept_gradients() const {
  return range(gradients_, accumulate_, 0, zero_stage_ >= 2 ? owned_.elements : num_elements());
}

TensorView ParameterStore::stored(const OwnedPart& part) const {
  const auto u = static_cast<std::size_t>(part.unit);
  return owned_parameters(part.unit).flat(part.at - owned_.at[u], part.elements.size());
}

TensorView ParameterStore::gradient(const OwnedPart& part) const {
  const auto u = static_cast<std::size_t>(part.unit);
  return owned_gradients(part.unit).flat(part.at - owned_.at[u], part.elements.size());
}

TensorView ParameterStore::master(const OwnedPart& part) const {
  return has_master_copy() ? in_parts(masters_, part) : stored(part);
}

void ParameterStore::hold_parameters(int unit) {
  const Shape shape = {owned_.units[static_cast<std::size_t>(unit)].elements.size()};
  held_parameters_.insert_or_assign(unit, HeldUnit{arena_.allocate(storage_, shape, MemoryCategory::parameters)});
}

void ParameterStore::hold_gradients(int unit) {
  const Shape shape = {owned_.units[static_cast<std::size_t>(unit)].elements.size()};
  held_gradients_.insert_or_assign(unit, HeldUnit{arena_.allocate(accumulate_, shape, MemoryCategory::gradients)});
}

void ParameterStore::drop_parameters(int unit) { held_parameters_.erase(unit); }
void ParameterStore::drop_gradients(int unit) { held_gradients_.erase(unit); }

void ParameterStore::stamp(int unit) { held_parameters_.at(unit).version = version_; }

void ParameterStore::set(std::size_t index, const std::function<double(std::int64_t)>& value) {
  const OwnedPart* own = nullptr;
  for (const OwnedPart& part : owned_.parts) own = part.parameter == index ? &part : own;
  const bool has_master = has_master_copy() && own != nullptr;
  HostView known(memory(), has_master ? master(*own) : TensorView(), Access::write);
  assign_elements(known.view(), [&](std::int64_t element) { return value(own->elements.begin + element); });
  known.finish();
  // Initial values are expensive: what a master copy has is read from there.
  const float* const masters = has_master ? known.view().as<float>().data() : nullptr;
  const auto element_value = [&](std::int64_t element) {
    const bool owned = masters != nullptr && element >= own->elements.begin && element < own->elements.end;
    return owned ? static_cast<double>(masters[element - own->elements.begin]) : value(element);
  };
  if (!deals_parameters(owned_.unit_of[index])) {
    assign_elements(memory(), parameter(index), element_value);
  } else if (own != nullptr) {
    assign_elements(memory(), stored(*own), [&](std::int64_t element) { return element_value(own->elements.begin + element); });
  }
}

void ParameterStore::set_parameter(std::size_t index, const std::vector<double>& local) {
  TANDEM_CHECK(static_cast<std::int64_t>(local.size()) == parameters_[index].num_elements(),
               fmt::format("{} values for {} elements", local.size(), parameters_[index].num_elements()));
  set(index, [&](std::int64_t element) { return local[static_cast<std::size_t>(element)]; });
}

void ParameterStore::zero_moments() {
  zero(memory(), first_moments_);
  zero(memory(), second_moments_);
}

void ParameterStore::initialise(const GptConfig& model, Initialization how, std::uint64_t seed) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const bool is_whole = parameters_[i].shard.is_whole();
    const std::vector<std::int64_t> indices = is_whole ? std::vector<std::int64_t>() : global_indices(parameters_[i].shard);
    set(i, [&](std::int64_t element) {
      const std::int64_t index = is_whole ? element : indices[static_cast<std::size_t>(element)];
      return index < 0 ? 0.0 : initial_value(model, parameters_[i].spec, how, seed, index);
    });
  }
  zero_moments();
}

void ParameterStore::assign(Memory& memory, TensorView target, const std::vector<double>& values) {
  TANDEM_CHECK(target.num_elements() == static_cast<std::int64_t>(values.size()),
               fmt::format("{} values for {} elements", values.size(), target.num_elements()));
  assign_elements(memory, target, [&](std::int64_t element) { return values[static_cast<std::size_t>(element)]; });
}

std::vector<double> ParameterStore::values_of(Memory& memory, TensorView there) {
  const HostView host(memory, there, Access::read);
  const TensorView tensor = host.view();
  std::vector<double> values;
  values.reserve(static_cast<std::size_t>(tensor.num_elements()));
  if (tensor.dtype() == DType::f64) {
    values.assign(tensor.as<double>().begin(), tensor.as<double>().end());
  } else if (tensor.dtype() == DType::f32) {
    values.assign(tensor.as<float>().begin(), tensor.as<float>().end());
  } else {
    const auto* const bits = static_cast<const std::uint16_t*>(tensor.data());
    const bool brain = tensor.dtype() == DType::bf16;
    for (std::int64_t i = 0; i < tensor.num_elements(); ++i)
      values.push_back(brain ? from_bf16_bits(bits[i]) : from_f16_bits(bits[i]));
  }
  return values;
}

}  // namespace tandem
