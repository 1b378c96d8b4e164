// SPDX-License-Identifier: Apache-2.0
#include "harness/trace_compare_assemble.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

bool is_farther(double candidate, double kept, double truth) {
  // Written so that NaN is farther than any number.
  return !(std::abs(candidate - truth) <= std::abs(kept - truth)) && !std::isnan(kept - truth);
}

bool same_value(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// Number of elements and kind of sum are those of the first entry, or the trace contradicts itself.
void require_alike(const TraceSource& source, const TracedGroup& group) {
  const TraceEntry& first = source.entries()[group.entries.front()];
  for (const std::size_t index : group.entries) {
    const TraceEntry& entry = source.entries()[index];
    if (num_elements(entry.shard.global_shape) != num_elements(first.shard.global_shape)) {
      throw InputError(fmt::format("{}: rank {} states the global shape {}, rank {} {}", group.name, first.rank,
                                   to_string(first.shard.global_shape), entry.rank, to_string(entry.shard.global_shape)));
    }
    if (entry.shard.partial_sum != first.shard.partial_sum) {
      throw InputError(fmt::format("{}: a partial sum on rank {} but not on rank {}", group.name,
                                   first.shard.partial_sum ? first.rank : entry.rank,
                                   first.shard.partial_sum ? entry.rank : first.rank));
    }
  }
}

class Assembly {
 public:
  Assembly(AssembledTensor& tensor, const std::vector<double>* truth) : tensor_(tensor), truth_(truth) {}

  void add_partial(std::size_t i, double value, std::int32_t entry) {
    tensor_.values[i] += value;
    tensor_.owner[i] = tensor_.owner[i] == AssembledTensor::kMissing ? entry : AssembledTensor::kSummed;
  }
  void add(std::size_t i, double value, std::int32_t entry) {
    if (tensor_.owner[i] != AssembledTensor::kMissing) {
      if (same_value(tensor_.values[i], value)) return;
      if (tensor_.num_conflicts++ == 0) tensor_.first_conflict = static_cast<std::int64_t>(i);
      if (truth_ == nullptr || !is_farther(value, tensor_.values[i], (*truth_)[i])) return;
    }
    tensor_.values[i] = value;
    tensor_.owner[i] = entry;
  }

 private:
  AssembledTensor& tensor_;
  const std::vector<double>* truth_;
};

// "d.h.0.attn.c_attn.weight": where it follows the gradient after which it is complete; nothing where none is known.
std::optional<std::size_t> place_of_parameter_gradient(const std::vector<TracedGroup>& ordered, std::string name) {
  if (name == "d.lm_head.weight") name = "d.logits.weight";
  while (name.size() > 2) {
    const std::size_t dot = name.rfind('.');
    if (dot == std::string::npos || dot < 2) break;
    name.resize(dot);
    for (std::size_t i = 0; i < ordered.size(); ++i) {
      if (ordered[i].kind != TraceKind::activation_gradient || ordered[i].name != name) continue;
      std::size_t after = i + 1;
      while (after < ordered.size() && ordered[after].kind == TraceKind::parameter_gradient) ++after;
      return after;
    }
  }
  return {};
}

std::vector<std::uint16_t> as_16_bits(const std::vector<double>& values, DType dtype) {
  std::vector<std::uint16_t> bits;
  for (const double value : values) {
    const auto narrow = static_cast<float>(value);
    bits.push_back(dtype == DType::f16 ? to_f16_bits(narrow) : to_bf16_bits(narrow));
  }
  return bits;
}

void hand_over(const TraceConsumer& consumer, const TraceEntry& entry, std::vector<double>& values) {
  const Shape flat = {static_cast<std::int64_t>(values.size())};
  switch (entry.shard.dtype) {
    case DType::f64: return consumer(entry, view_of(values, flat));
    case DType::f32: {
      std::vector<float> narrow(values.begin(), values.end());
      return consumer(entry, view_of(narrow, flat));
    }
    default: {
      std::vector<std::uint16_t> bits = as_16_bits(values, entry.shard.dtype);
      return consumer(entry, TensorView(bits.data(), entry.shard.dtype, flat));
    }
  }
}

}  // namespace

std::vector<TracedGroup> group_by_tensor(const TraceSource& source) {
  std::vector<TracedGroup> groups;
  std::map<std::pair<std::string, TraceKind>, std::size_t> index;
  const std::vector<TraceEntry>& entries = source.entries();
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const auto [place, is_new] = index.emplace(std::pair(entries[i].name, entries[i].kind), groups.size());
    if (is_new) groups.push_back({entries[i].name, entries[i].kind, {}});
    groups[place->second].entries.push_back(i);
  }
  for (TracedGroup& group : groups) {
    std::stable_sort(group.entries.begin(), group.entries.end(), [&](std::size_t a, std::size_t b) {
      return std::pair(entries[a].rank, entries[a].micro_batch) < std::pair(entries[b].rank, entries[b].micro_batch);
    });
  }
  return groups;
}

std::vector<TracedGroup> in_execution_order(std::vector<TracedGroup> groups) {
  std::vector<TracedGroup> ordered;
  for (const TraceKind kind : {TraceKind::parameter, TraceKind::activation, TraceKind::activation_gradient}) {
    for (const TracedGroup& group : groups) {
      if (group.kind == kind) ordered.push_back(group);
    }
  }
  std::vector<TracedGroup> last;  // what several modules add to, as the tied embedding
  for (TracedGroup& group : groups) {
    if (group.kind != TraceKind::parameter_gradient) continue;
    if (const auto place = place_of_parameter_gradient(ordered, group.name)) {
      ordered.insert(ordered.begin() + static_cast<std::ptrdiff_t>(*place), std::move(group));
    } else {
      last.push_back(std::move(group));
    }
  }
  ordered.insert(ordered.end(), last.begin(), last.end());
  return ordered;
}

AssembledTensor assemble(const TraceSource& source, const TracedGroup& group, const std::vector<double>* truth, double divisor) {
  TANDEM_CHECK(!group.entries.empty());
  require_alike(source, group);
  const TraceEntry& first = source.entries()[group.entries.front()];
  AssembledTensor tensor;
  tensor.shape = first.shard.global_shape;
  tensor.dtype = first.shard.dtype;
  tensor.values.resize(static_cast<std::size_t>(num_elements(tensor.shape)));
  tensor.owner.assign(tensor.values.size(), AssembledTensor::kMissing);
  TANDEM_CHECK(truth == nullptr || truth->size() == tensor.values.size());
  Assembly assembly(tensor, truth);
  for (const std::size_t index : group.entries) {
    const TraceEntry& entry = source.entries()[index];
    if (size_bytes(entry.shard.dtype) > size_bytes(tensor.dtype)) tensor.dtype = entry.shard.dtype;
    const std::vector<double> values = source.values(index);
    const std::vector<std::int64_t> places = global_indices(entry, source.header().model.head_size());
    TANDEM_CHECK(places.size() == values.size());
    for (std::size_t i = 0; i < places.size(); ++i) {
      if (places[i] < 0) continue;
      const auto to = static_cast<std::size_t>(places[i]);
      if (entry.shard.partial_sum) {
        assembly.add_partial(to, values[i] / divisor, static_cast<std::int32_t>(index));
      } else {
        assembly.add(to, values[i] / divisor, static_cast<std::int32_t>(index));
      }
    }
  }
  tensor.num_missing = std::count(tensor.owner.begin(), tensor.owner.end(), AssembledTensor::kMissing);
  return tensor;
}

std::vector<std::string> merge_trace(const TraceSource& source, const TraceConsumer& consumer) {
  std::vector<std::string> notes;
  for (const TracedGroup& group : group_by_tensor(source)) {
    AssembledTensor tensor = assemble(source, group);
    if (tensor.num_missing > 0) {
      const auto at = std::find(tensor.owner.begin(), tensor.owner.end(), AssembledTensor::kMissing) - tensor.owner.begin();
      throw InputError(
          fmt::format("{} {}: {} of {} elements are in no file, the first is {}; add the trace of the rank that has them",
                      group.name, to_string(tensor.shape), tensor.num_missing, tensor.values.size(), at));
    }
    if (tensor.num_conflicts > 0) {
      notes.push_back(fmt::format("{}: replicas differ in {} of {} elements, the first is {}; kept that of the lowest rank",
                                  group.name, tensor.num_conflicts, tensor.values.size(), tensor.first_conflict));
    }
    const bool summed = group.entries.size() > 1 && source.entries()[group.entries.front()].shard.partial_sum;
    hand_over(consumer, whole_entry(group.name, group.kind, tensor.shape, summed ? DType::f64 : tensor.dtype), tensor.values);
  }
  return notes;
}

}  // namespace tandem
