// SPDX-License-Identifier: Apache-2.0
#include "suites/trace.h"

#include <algorithm>
#include <map>
#include <span>

#include <fmt/format.h>

#include "core/io/trace_file_writer.h"
#include "harness/trace_compare_assemble.h"

namespace tandem {
namespace {

template <class Real>
void hand_over(const TraceConsumer& consumer, const std::string& name, TraceKind kind, Shape shape,
               std::span<const Real> values) {
  const TraceEntry entry = whole_entry(name, kind, shape, dtype_of<Real>);
  // A view has no constant form; consumers only read.
  consumer(entry, TensorView(const_cast<Real*>(values.data()), dtype_of<Real>, shape));
}

std::int64_t num_traced(const GptConfig& model) {
  const std::int64_t of_block = model.experts > 0 ? 9 : 10;
  return 2 * (3 + of_block * model.layers) + static_cast<std::int64_t>(gpt_parameters(model).size());
}

template <class Real>
double run_as(const TracedStep& step, DType precision, const TraceConsumer& consumer) {
  const std::int64_t tokens = step.batch.rows * step.batch.sequence;
  auto parameters = reference::converted<Real>(step.parameters);
  reference::Pass<Real> pass;
  pass.valid_tokens = step.batch.valid_tokens();
  pass.dropout = step.dropout;
  pass.trace = [&](std::string_view name, std::span<const Real> values) {
    const TraceKind kind = name.starts_with("d.") ? TraceKind::activation_gradient : TraceKind::activation;
    const auto width = static_cast<std::int64_t>(values.size()) / tokens;
    hand_over(consumer, std::string(name), kind, {tokens, width}, values);
  };
  pass.rounding.storage = precision;
  reference::round_all(precision, parameters);
  auto gradients = reference::zero_tensors<Real>(step.model);
  const double loss = reference::loss_and_gradients(step.model, parameters, step.batch, pass, gradients);
  for (const ParameterSpec& spec : gpt_parameters(step.model)) {
    std::vector<Real>& values = gradients.at(spec.name);
    reference::round_all<Real>(precision, values);
    hand_over<Real>(consumer, "d." + spec.name, TraceKind::parameter_gradient, spec.shape, values);
  }
  return loss;
}

void write_whole_parameters(const TraceReader& trace, const TraceConsumer& consumer) {
  static_cast<void>(merge_trace(trace, [&](const TraceEntry& entry, TensorView values) {
    if (entry.kind == TraceKind::parameter) consumer(entry, values);
  }));
}

std::int64_t tokens_of(const TraceReader& trace) {
  if (trace.batch()) return trace.batch()->rows * trace.batch()->sequence;
  for (const TraceEntry& entry : trace.entries()) {
    if (entry.kind != TraceKind::activation || entry.shard.global_shape.size() < 2) continue;
    return num_elements(entry.shard.global_shape) / entry.shard.global_shape.back();
  }
  return trace.header().model.sequence;
}

// Truth and yardstick made from what one trace starts from.
struct References {
  std::unique_ptr<TraceRecorder> truth, yardstick;
};

References references_for(const TraceReader& trace, const TraceHeader& precision_of, bool needs_truth,
                          const TraceProgress& progress) {
  TracedStep step = traced_step(trace);
  step.progress = progress;
  References references;
  if (needs_truth) references.truth = record_reference(step, ReferenceSide::truth);
  if (precision_of.precision != DType::f64) {
    references.yardstick = record_reference(step, ReferenceSide::yardstick, precision_of.precision);
  }
  return references;
}

const TraceHeader& coarser(const TraceHeader& a, const TraceHeader& b) {
  return unit_roundoff(a.precision) >= unit_roundoff(b.precision) ? a : b;
}

void require_same_model(const TraceReader& a, const TraceReader& b) {
  if (a.header().model == b.header().model) return;
  throw InputError(
      fmt::format("{} and {}: traces of different models; both must state the same \"model\"", a.where(), b.where()));
}

}  // namespace

TraceHeader reference_header(const TracedStep& step, ReferenceSide side, DType precision) {
  TraceHeader header;
  header.is_reference = side == ReferenceSide::truth;
  header.precision = header.is_reference ? DType::f64 : precision;
  header.accumulate = header.gradient_accumulate = header.precision == DType::f64 ? DType::f64 : DType::f32;
  header.framework = fmt::format("tandem reference {}", name(header.precision));
  header.model = step.model;
  header.step = step.step;
  if (step.dropout) {
    header.dropout = TraceDropout::tandem;
    header.dropout_seed = step.dropout->seed;
    header.dropout_step = step.dropout->step;
  }
  return header;
}

double run_traced_reference(const TracedStep& step, ReferenceSide side, DType precision, const TraceConsumer& consumer) {
  std::int64_t done = 0;
  const TraceConsumer counted = [&](const TraceEntry& entry, TensorView values) {
    consumer(entry, values);
    if (step.progress) step.progress(++done, num_traced(step.model), fmt::format("the reference in {}", name(entry.shard.dtype)));
  };
  if (side == ReferenceSide::truth || precision == DType::f64) return run_as<double>(step, DType::f64, counted);
  return run_as<float>(step, precision, counted);
}

std::unique_ptr<TraceRecorder> record_reference(const TracedStep& step, ReferenceSide side, DType precision) {
  auto recorder = std::make_unique<TraceRecorder>(reference_header(step, side, precision));
  recorder->header().loss = run_traced_reference(step, side, precision, recorder->consumer());
  return recorder;
}

std::optional<std::string> reason_not_traceable(const TraceReader& trace) {
  if (!trace.batch()) return "it carries no batch";
  if (trace.header().dropout == TraceDropout::other)
    return "its dropout masks are those of another program; record it without dropout";
  std::map<std::string, std::int64_t> sizes;
  for (const TraceEntry& entry : trace.entries()) {
    if (entry.kind == TraceKind::parameter) sizes[entry.name] = num_elements(entry.shard.global_shape);
  }
  if (sizes.empty()) return "it carries no weights";
  for (const ParameterSpec& spec : gpt_parameters(trace.header().model)) {
    const auto found = sizes.find(spec.name);
    if (found == sizes.end()) return fmt::format("it carries no weights \"{}\"", spec.name);
    if (found->second != spec.num_elements()) {
      return fmt::format("its weights \"{}\" have {} elements, its model asks for {}", spec.name, found->second,
                         to_string(spec.shape));
    }
  }
  return {};
}

TracedStep traced_step(const TraceReader& trace) {
  if (const auto reason = reason_not_traceable(trace)) {
    throw InputError(fmt::format("{}: the reference cannot run this step: {}", trace.where(), *reason));
  }
  const TraceHeader& header = trace.header();
  TracedStep step;
  step.model = header.model;
  step.batch = *trace.batch();
  step.step = header.step;
  if (header.dropout == TraceDropout::tandem) step.dropout = reference::DropoutStep{header.dropout_seed, header.dropout_step};
  for (const TracedGroup& group : group_by_tensor(trace)) {
    if (group.kind != TraceKind::parameter) continue;
    AssembledTensor tensor = assemble(trace, group);
    if (tensor.num_missing > 0) {
      throw InputError(fmt::format("{}: {} of {} elements of the weights \"{}\" are in no file; give the folders of all ranks",
                                   trace.where(), tensor.num_missing, tensor.values.size(), group.name));
    }
    step.parameters.emplace(group.name, std::move(tensor.values));
  }
  // Weights of a framework that the model has no place for (masks, a copy of the tied head) say nothing.
  const std::vector<ParameterSpec> specs = gpt_parameters(step.model);
  std::erase_if(step.parameters, [&](const auto& parameter) {
    return std::none_of(specs.begin(), specs.end(), [&](const ParameterSpec& spec) { return spec.name == parameter.first; });
  });
  return step;
}

void write_reference_trace(const TraceReader& trace, const std::filesystem::path& folder, const TraceProgress& progress) {
  TracedStep step = traced_step(trace);
  step.progress = progress;
  TraceWriter writer(folder, reference_header(step, ReferenceSide::truth));
  write_whole_parameters(trace, writer.consumer());
  writer.header().loss = run_traced_reference(step, ReferenceSide::truth, DType::f64, writer.consumer());
  writer.set_batch(step.batch);
  writer.close();
}

std::vector<std::string> write_merged_trace(const TraceReader& trace, const std::filesystem::path& folder) {
  TraceHeader header = trace.header();
  header.ranks = 1;
  TraceWriter writer(folder, header);
  std::vector<std::string> notes = merge_trace(trace, writer.consumer());
  if (trace.batch()) writer.set_batch(*trace.batch());
  writer.close();
  return notes;
}

TraceComparison compare_with_own_reference(const TraceReader& trace, const TraceProgress& progress) {
  const References references = references_for(trace, trace.header(), true, progress);
  return compare_traces({&trace, references.truth.get(), references.yardstick.get()},
                        trace_bounds(trace.header(), tokens_of(trace)));
}

TraceComparison compare_two_traces(const TraceReader& a, const TraceReader& b, const TraceProgress& progress) {
  require_same_model(a, b);
  const bool a_is_truth = a.header().is_reference && !b.header().is_reference;
  const TraceReader& candidate = a_is_truth ? b : a;
  const TraceReader& truth = a_is_truth ? a : b;
  const bool two_candidates = !truth.header().is_reference;
  const TraceHeader* other = two_candidates ? &truth.header() : nullptr;
  TraceBounds bounds = trace_bounds(candidate.header(), tokens_of(candidate), other);
  if (two_candidates) bounds.allowances = 2;

  const TraceHeader& precision_of = two_candidates ? coarser(candidate.header(), truth.header()) : candidate.header();
  const TraceReader* source = !reason_not_traceable(truth) ? &truth : !reason_not_traceable(candidate) ? &candidate : nullptr;
  References references;
  if (source != nullptr) references = references_for(*source, precision_of, two_candidates, progress);
  const TraceSource* yardstick_truth = &truth;
  if (two_candidates) yardstick_truth = references.truth.get();
  return compare_traces({&candidate, &truth, references.yardstick.get(), yardstick_truth}, bounds);
}

}  // namespace tandem
