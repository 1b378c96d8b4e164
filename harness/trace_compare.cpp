// SPDX-License-Identifier: Apache-2.0
#include "harness/trace_compare.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <map>
#include <span>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"
#include "harness/equivalence.h"
#include "harness/trace_compare_assemble.h"

namespace tandem {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::string_view kLoss = "loss";

double norm(std::span<const double> values) {
  double squares = 0;
  for (const double value : values) squares += value * value;
  return std::sqrt(squares);
}

double distance(std::span<const double> a, std::span<const double> b) {
  double squares = 0;
  for (std::size_t i = 0; i < a.size(); ++i) squares += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(squares);
}

std::string indices_of(std::int64_t element, const Shape& shape) {
  Shape indices(shape.size());
  for (std::size_t dim = shape.size(); dim-- > 0;) {
    indices[dim] = element % shape[dim];
    element /= shape[dim];
  }
  return to_string(indices);
}

void name_place(Divergence& divergence, std::string_view name, TraceKind kind) {
  divergence.name = name;
  divergence.kind = kind;
  divergence.phase = kind == TraceKind::parameter ? "parameters" : kind == TraceKind::activation ? "forward" : "backward";
  if (name.starts_with("d.")) name.remove_prefix(2);
  divergence.operation = name;
  if (!name.starts_with("h.")) return;
  int layer = 0;
  const auto [rest, error] = std::from_chars(name.data() + 2, name.data() + name.size(), layer);
  if (error != std::errc()) return;
  divergence.layer = layer;
  name.remove_prefix(static_cast<std::size_t>(rest - name.data()));
  divergence.operation = name.empty() ? "block output" : name.substr(1);
}

// Which entry's part is worst by its root mean square error, and there which element.
void find_worst_part(Divergence& divergence, const TraceSource& source, const AssembledTensor& candidate,
                     std::span<const double> truth) {
  struct Part {
    double squares = 0, count = 0, largest = -1;
    std::size_t element = 0;
  };
  std::map<std::int32_t, Part> parts;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    const double difference = std::abs(candidate.values[i] - truth[i]);
    const double severity = std::isnan(difference) ? kInfinity : difference;
    Part& part = parts[candidate.owner[i]];
    part.squares += severity * severity;
    part.count += 1;
    if (severity <= part.largest) continue;
    part.largest = severity;
    part.element = i;
  }
  const auto worst = std::max_element(parts.begin(), parts.end(), [](const auto& a, const auto& b) {
    return a.second.squares / a.second.count < b.second.squares / b.second.count;
  });
  const auto element = worst->second.element;
  divergence.element = static_cast<std::int64_t>(element);
  divergence.element_indices = indices_of(divergence.element, candidate.shape);
  divergence.value = candidate.values[element];
  divergence.truth = truth[element];
  if (worst->first < 0) {
    divergence.slice = worst->first == AssembledTensor::kSummed ? "sum of partial sums" : "in no entry";
    return;
  }
  const TraceEntry& entry = source.entries()[static_cast<std::size_t>(worst->first)];
  divergence.rank = entry.rank;
  divergence.micro_batch = entry.micro_batch;
  divergence.slice = entry.shard.describe_slices();
}

double divisor(const TraceSource& source, TraceKind kind) {
  const bool gradient = kind == TraceKind::activation_gradient || kind == TraceKind::parameter_gradient;
  return gradient ? source.header().loss_scale : 1;
}

class Comparer {
 public:
  Comparer(const TraceSides& sides, const TraceBounds& bounds) : sides_(sides), bounds_(bounds) {
    yardstick_truth_ = sides.yardstick_truth == nullptr ? sides.truth : sides.yardstick_truth;
    candidate_ = index(sides.candidate);
    yardstick_ = index(sides.yardstick);
    if (yardstick_truth_ != sides.truth) yardstick_truth_groups_ = index(yardstick_truth_);
    truth_order_ = in_execution_order(group_by_tensor(*sides.truth));
  }

  void run(TraceComparison& comparison) {
    measure_scales();
    bool loss_done = false;
    for (const TracedGroup& group : truth_order_) {
      const bool backward = group.kind == TraceKind::activation_gradient || group.kind == TraceKind::parameter_gradient;
      if (backward && !loss_done) loss_done = compare_loss(comparison);
      const auto found = candidate_.find(key(group));
      if (found != candidate_.end()) {
        compare(comparison, group, found->second);
        candidate_.erase(found);
      } else if (group.kind != TraceKind::parameter) {
        note(comparison, TraceProblem::tensor_missing, group);
      }
    }
    if (!loss_done) compare_loss(comparison);
    for (const TracedGroup& group : in_execution_order(group_by_tensor(*sides_.candidate))) {
      if (candidate_.contains(key(group)) && group.kind != TraceKind::parameter)
        note(comparison, TraceProblem::unknown_tensor, group);
    }
  }

 private:
  using Key = std::pair<TraceKind, std::string>;
  using Index = std::map<Key, TracedGroup>;
  static Key key(const TracedGroup& group) { return {group.kind, group.name}; }
  static Index index(const TraceSource* source) {
    Index result;
    if (source == nullptr) return result;
    for (TracedGroup& group : group_by_tensor(*source)) result.emplace(key(group), group);
    return result;
  }

  static void note(TraceComparison& comparison, TraceProblem problem, const TracedGroup& group) {
    Divergence divergence;
    divergence.problem = problem;
    divergence.error = divergence.error_over_bound = kInfinity;
    name_place(divergence, group.name, group.kind);
    comparison.incomplete.push_back(std::move(divergence));
  }

  // What a tensor with a true value of zero is measured against.
  void measure_scales() {
    std::map<TraceKind, double> squares;
    for (const TracedGroup& group : truth_order_) {
      if (group.kind == TraceKind::parameter) continue;
      const std::vector<double> values = assemble(*sides_.truth, group, nullptr, divisor(*sides_.truth, group.kind)).values;
      const double size = norm(values);
      squares[group.kind] += size * size;
      scales_[group.kind].num_elements += static_cast<double>(values.size());
    }
    for (const auto& [kind, sum] : squares) scales_[kind].norm = std::sqrt(sum);
  }

  void compare(TraceComparison& comparison, const TracedGroup& group, const TracedGroup& candidate_group) {
    const AssembledTensor truth = assemble(*sides_.truth, group, nullptr, divisor(*sides_.truth, group.kind));
    const TraceEntry& stated = sides_.candidate->entries()[candidate_group.entries.front()];
    if (num_elements(stated.shard.global_shape) != static_cast<std::int64_t>(truth.values.size())) {
      TraceVerdict verdict = sized_differently(group, stated.shard.global_shape, truth.shape);
      comparison.tensors.push_back(std::move(verdict));
      return;
    }
    const AssembledTensor candidate =
        assemble(*sides_.candidate, candidate_group, &truth.values, divisor(*sides_.candidate, group.kind));
    const std::vector<double> yardstick = values_of(sides_.yardstick, yardstick_, group, truth.values.size());
    const std::vector<double> yardstick_truth =
        yardstick_truth_ == sides_.truth ? std::vector<double>()
                                         : values_of(yardstick_truth_, yardstick_truth_groups_, group, truth.values.size());
    comparison.tensors.push_back(judge(group, candidate, truth.values, yardstick, yardstick_truth));
  }

  static TraceVerdict sized_differently(const TracedGroup& group, const Shape& candidate, const Shape& truth) {
    TraceVerdict verdict;
    verdict.tensor.stage = name(group.kind);
    verdict.tensor.tensor = group.name;
    verdict.tensor.error = kInfinity;
    Divergence divergence;
    divergence.problem = TraceProblem::size_differs;
    name_place(divergence, group.name, group.kind);
    divergence.slice = fmt::format("shape {} instead of {}", to_string(candidate), to_string(truth));
    divergence.error = divergence.error_over_bound = kInfinity;
    verdict.divergence = divergence;
    return verdict;
  }

  static std::vector<double> values_of(const TraceSource* source, const Index& groups, const TracedGroup& group, std::size_t n) {
    const auto found = groups.find(key(group));
    if (source == nullptr || found == groups.end()) return {};
    std::vector<double> values = assemble(*source, found->second, nullptr, divisor(*source, group.kind)).values;
    return values.size() == n ? values : std::vector<double>();
  }

  TraceVerdict judge(const TracedGroup& group, const AssembledTensor& candidate, const std::vector<double>& truth,
                     const std::vector<double>& yardstick, const std::vector<double>& yardstick_truth) {
    const double rounding = bounds_.rounding(group.kind);
    TraceVerdict verdict;
    TensorVerdict& tensor = verdict.tensor;
    tensor.stage = name(group.kind);
    tensor.tensor = group.name;
    // 16-bit roundoff would call every tensor zero that is a quarter of the others' size.
    tensor.absolute = is_judged_absolutely(scales_[group.kind], {group.name, truth, bounds_.backward_length, false},
                                           std::min(bounds_.storage_roundoff, 0x1p-24));
    const double share = scales_[group.kind].share(static_cast<double>(truth.size()));
    tensor.error = distance(candidate.values, truth) / (tensor.absolute ? 1 : norm(truth));
    tensor.yardstick_error = yardstick_error(truth, yardstick, yardstick_truth, tensor.absolute);
    tensor.floor = tensor.absolute ? rounding * share : rounding;
    tensor.bound = bounds_.allowances * rounding_bound(tensor.yardstick_error, tensor.floor);
    verdict.replica_conflicts = candidate.num_conflicts;
    if (candidate.num_missing > 0) tensor.error = kInfinity;
    if (tensor.holds()) return verdict;
    verdict.divergence = located(tensor, group, candidate, truth);
    tensor.worst_index = verdict.divergence->element;
    tensor.worst_value = verdict.divergence->value;
    tensor.worst_truth = verdict.divergence->truth;
    return verdict;
  }

  [[nodiscard]] double yardstick_error(const std::vector<double>& truth, const std::vector<double>& yardstick,
                                       const std::vector<double>& yardstick_truth, bool absolute) const {
    if (yardstick.empty()) return 0;
    if (yardstick_truth_ != sides_.truth && yardstick_truth.empty()) return 0;
    const std::vector<double>& against = yardstick_truth.empty() ? truth : yardstick_truth;
    return distance(yardstick, against) / (absolute ? 1 : norm(against));
  }

  Divergence located(const TensorVerdict& tensor, const TracedGroup& group, const AssembledTensor& candidate,
                     const std::vector<double>& truth) const {
    Divergence divergence;
    name_place(divergence, group.name, group.kind);
    divergence.error = tensor.error;
    divergence.bound = tensor.bound;
    divergence.error_over_bound = error_over_bound(tensor);
    find_worst_part(divergence, *sides_.candidate, candidate, truth);
    if (candidate.num_missing > 0) {
      divergence.problem = TraceProblem::part_missing;
      const auto at =
          std::find(candidate.owner.begin(), candidate.owner.end(), AssembledTensor::kMissing) - candidate.owner.begin();
      divergence.rank = divergence.micro_batch = -1;
      divergence.slice = fmt::format("{} of {} elements in no entry", candidate.num_missing, candidate.owner.size());
      divergence.element = at;
      divergence.element_indices = indices_of(at, candidate.shape);
    } else if (!std::isfinite(divergence.value)) {
      divergence.problem = TraceProblem::not_finite;
    } else if (candidate.num_conflicts > 0) {
      divergence.problem = TraceProblem::replicas_differ;
    }
    return divergence;
  }

  bool compare_loss(TraceComparison& comparison) const {
    const auto& candidate = sides_.candidate->header().loss;
    const auto& truth = sides_.truth->header().loss;
    if (!candidate || !truth) return true;
    TraceVerdict verdict;
    TensorVerdict& tensor = verdict.tensor;
    tensor.stage = tensor.tensor = kLoss;
    const double unit = *truth == 0 ? 1 : std::abs(*truth);
    tensor.error = std::abs(*candidate - *truth) / unit;
    const bool has_yardstick = sides_.yardstick != nullptr && sides_.yardstick->header().loss && yardstick_truth_->header().loss;
    if (has_yardstick)
      tensor.yardstick_error = std::abs(*sides_.yardstick->header().loss - *yardstick_truth_->header().loss) / unit;
    tensor.floor = bounds_.rounding(TraceKind::activation_gradient);
    tensor.bound = bounds_.allowances * rounding_bound(tensor.yardstick_error, tensor.floor);
    if (!tensor.holds()) {
      Divergence divergence;
      name_place(divergence, kLoss, TraceKind::activation);
      divergence.problem = std::isfinite(*candidate) ? TraceProblem::beyond_bound : TraceProblem::not_finite;
      divergence.error = tensor.error;
      divergence.bound = tensor.bound;
      divergence.error_over_bound = error_over_bound(tensor);
      divergence.value = *candidate;
      divergence.truth = *truth;
      verdict.divergence = divergence;
    }
    comparison.tensors.push_back(std::move(verdict));
    return true;
  }

  TraceSides sides_;
  TraceBounds bounds_;
  const TraceSource* yardstick_truth_ = nullptr;
  Index candidate_, yardstick_, yardstick_truth_groups_;
  std::vector<TracedGroup> truth_order_;
  std::map<TraceKind, StageScale> scales_;
};

}  // namespace

double TraceBounds::rounding(TraceKind kind) const {
  if (kind == TraceKind::parameter) return storage_roundoff;
  const double of_sums = kind == TraceKind::parameter_gradient ? gradient_roundoff : accumulate_roundoff;
  return std::max(storage_roundoff, of_sums * std::sqrt(kind == TraceKind::activation ? forward_length : backward_length));
}

TraceBounds trace_bounds(const TraceHeader& header, std::int64_t tokens, const TraceHeader* other) {
  TraceBounds bounds;
  bounds.storage_roundoff = unit_roundoff(header.precision);
  bounds.accumulate_roundoff = unit_roundoff(header.accumulate);
  bounds.gradient_roundoff = unit_roundoff(header.gradient_accumulate);
  if (other != nullptr) {
    bounds.storage_roundoff = std::max(bounds.storage_roundoff, unit_roundoff(other->precision));
    bounds.accumulate_roundoff = std::max(bounds.accumulate_roundoff, unit_roundoff(other->accumulate));
    bounds.gradient_roundoff = std::max(bounds.gradient_roundoff, unit_roundoff(other->gradient_accumulate));
  }
  const GptConfig& model = header.model;
  bounds.forward_length = static_cast<double>(std::max(tokens, model.mlp_width()));
  bounds.backward_length = std::max(bounds.forward_length, static_cast<double>(model.vocabulary));
  return bounds;
}

TraceComparison compare_traces(const TraceSides& sides, const TraceBounds& bounds, Completeness completeness) {
  TANDEM_CHECK(sides.candidate != nullptr && sides.truth != nullptr);
  TraceComparison comparison;
  comparison.candidate = sides.candidate->header().framework;
  comparison.truth = sides.truth->header().framework;
  comparison.bounds = bounds;
  comparison.has_yardstick = sides.yardstick != nullptr;
  comparison.must_be_complete = completeness == Completeness::required;
  for (const TraceEntry& entry : sides.candidate->entries()) comparison.recorded_kinds.insert(entry.kind);
  Comparer(sides, bounds).run(comparison);
  const bool compared = std::any_of(comparison.tensors.begin(), comparison.tensors.end(), [](const TraceVerdict& verdict) {
    return verdict.tensor.stage != name(TraceKind::parameter);
  });
  if (!compared) throw InputError("the traces have no tensor in common; names are those of docs/trace_format.md");
  return comparison;
}

std::optional<Divergence> TraceComparison::first_divergence() const {
  for (const TraceVerdict& verdict : tensors) {
    if (verdict.divergence) return verdict.divergence;
  }
  if (!must_be_complete) return {};
  for (const Divergence& divergence : incomplete) {
    if (recorded_kinds.contains(divergence.kind)) return divergence;
  }
  return {};
}

std::optional<Divergence> first_divergence(const TraceSource& recorded, const TraceSource& truth, const TraceSource* yardstick,
                                           const TraceBounds& bounds) {
  return compare_traces({&recorded, &truth, yardstick}, bounds, Completeness::required).first_divergence();
}

}  // namespace tandem
