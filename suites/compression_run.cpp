// SPDX-License-Identifier: Apache-2.0
#include "suites/compression_run.h"

#include <chrono>
#include <cmath>
#include <limits>
#include <memory>

#include <fmt/format.h>

#include <cereal/types/tuple.hpp>

#include "core/io/binary.h"
#include "core/io/hash.h"
#include "optimized/checkpoint/checkpoint.h"
#include "optimized/comm/exchange.h"
#include "optimized/comm/world.h"
#include "optimized/machine.h"
#include "suites/machine_of.h"
#include "suites/one_step.h"

namespace tandem {

template <class Archive>
void serialize(Archive& archive, CodedRecord& record) {
  archive(record.before, record.after, record.residual, record.sum_residual);
}

template <class Archive>
void serialize(Archive& archive, CompressionStep& step) {
  archive(step.step, step.loss, step.loss_scale, step.skipped, step.seconds, step.gradient_bytes, step.tensors, step.hashes);
}

namespace {

constexpr std::chrono::milliseconds kDeadline{20000};
constexpr std::int64_t kValidationRows = 32;

void spoil(ParameterStore& store) {
  const TensorView gradient = store.all_gradients();
  ParameterStore::assign(store.memory(), gradient.flat(gradient.num_elements() / 2, 1),
                         {std::numeric_limits<double>::infinity()});
}

// One rank's part of run_compressed().
class RankRun {
 public:
  RankRun(const CompressionScript& script, const RunContext& context, Communicator& comm)
      : script_(script),
        comm_(comm),
        kernels_(make_kernels(script.inputs.plan, machine_of(context))),
        engine_(with_timeline(comm, kernels_.get(), arena_, timeline_, context), options(script, comm.rank())) {
    if (engine_.compression() == nullptr || !script.record_tensors) return;
    engine_.compression()->set_observer([this](int bucket, std::span<const float> before, std::span<const float> after) {
      const CompressedReductionOptions& reduced = engine_.compression()->options();
      const Interval tensors = reduced.buckets[static_cast<std::size_t>(bucket)].tensors;
      std::size_t first = 0;
      for (std::int64_t t = tensors.begin; t < tensors.end; ++t) {
        const CompressedTensor& tensor = reduced.tensors[static_cast<std::size_t>(t)];
        const auto elements = static_cast<std::size_t>(tensor.elements());
        CodedRecord& record = seen_[tensor.name];
        record.before.assign(before.begin() + static_cast<std::ptrdiff_t>(first),
                             before.begin() + static_cast<std::ptrdiff_t>(first + elements));
        record.after.assign(after.begin() + static_cast<std::ptrdiff_t>(first),
                            after.begin() + static_cast<std::ptrdiff_t>(first + elements));
        first += elements + static_cast<std::size_t>(tensor.padding);
      }
    });
  }

  void run(CompressionRun& result) {
    const PairInputs& inputs = script_.inputs;
    const auto rank = static_cast<std::size_t>(comm_.rank());
    engine_.store().initialise(inputs.model, inputs.initialization, inputs.seed);
    if (!script_.load.empty()) {
      const std::filesystem::path folder = find_checkpoint(script_.load);
      load_checkpoint(folder, read_checkpoint_info(folder), engine_);
    }
    result.start[rank] = record_after(-1, {});
    for (std::int64_t step = script_.first_step; step < inputs.steps; ++step) {
      timeline_.clear();
      const Batch batch = inputs.data->training_batch(step, inputs.plan.batch.rows);
      comm_.barrier();
      const std::int64_t begin = Timeline::now_ns();
      const StepResult done = engine_.train_step(batch, step);
      const double seconds = static_cast<double>(Timeline::now_ns() - begin) * 1e-9;
      result.steps[rank].push_back(record_after(step, done));
      result.steps[rank].back().seconds = seconds;
    }
    if (!script_.save.empty()) save();
    const auto validation = inputs.data->validation_batch(0, kValidationRows);
    const double loss = validation ? engine_.evaluate(*validation) : 0.0;
    if (rank == 0) result.validation_loss = loss;
  }

 private:
  static RankContext with_timeline(Communicator& comm, Kernels* kernels, Arena& arena, Timeline& timeline,
                                   const RunContext& context) {
    comm.set_timeline(&timeline);
    return {&comm, kernels, &arena, &timeline, context.pitfalls, {}};
  }

  static EngineOptions options(const CompressionScript& script, int rank) {
    const PairInputs& inputs = script.inputs;
    EngineOptions options{inputs.model, inputs.plan, own_optimizer(inputs), inputs.schedule, inputs.steps, inputs.seed, {}, {}};
    if (script.overflows) {
      options.inject_gradient_fault = [&script, rank](ParameterStore& store, std::int64_t step) {
        if (script.overflows(rank, step)) spoil(store);
      };
    }
    return options;
  }

  CompressionStep record_after(std::int64_t step, const StepResult& done) {
    CompressionStep record;
    record.step = step;
    record.loss = done.loss;
    record.skipped = done.skipped;
    for (const Span& span : timeline_.spans()) record.gradient_bytes += span.purpose == Purpose::gradient ? span.bytes : 0;
    const ParameterStore& store = engine_.store();
    for (std::size_t i = 0; script_.record_tensors && i < store.size(); ++i) {
      const HostView host(store.memory(), store.parameter(i), Access::read);
      const TensorView values = host.view();
      record.hashes[store.spec(i).name + " " + store.shard(i).describe_slices()] =
          hash64({static_cast<const std::byte*>(values.data()), static_cast<std::size_t>(values.size_bytes())});
    }
    if (engine_.compression() == nullptr) return record;
    const CompressedReduction& compression = *engine_.compression();
    record.loss_scale = compression.gradient_scale();
    if (!script_.record_tensors) return record;
    record.tensors = std::exchange(seen_, {});
    for (const CompressedTensor& tensor : compression.options().tensors) {
      CodedRecord& of = record.tensors[tensor.name];
      const std::span<const float> residual = compression.residual(tensor.name);
      of.residual.assign(residual.begin(), residual.end());
      const auto owned = compression.sum_residuals(tensor.name);
      if (owned.empty()) continue;
      of.sum_residual.assign(static_cast<std::size_t>(tensor.elements()), std::nanf(""));
      for (const auto& part : owned) std::ranges::copy(part.values, of.sum_residual.begin() + part.first);
    }
    return record;
  }

  void save() {
    const PairInputs& inputs = script_.inputs;
    static_cast<void>(save_checkpoint(script_.save, engine_, {run_config_of(inputs), inputs.steps, "synthetic"}));
  }

  const CompressionScript& script_;
  Communicator& comm_;
  std::unique_ptr<Kernels> kernels_;
  Arena arena_{{.poison = true, .memory = &kernels_->memory()}};
  Timeline timeline_;
  std::map<std::string, CodedRecord> seen_;  // in this step
  Engine engine_;
};

}  // namespace

PairInputs compressed_inputs(const ParallelVariant& variant, const CompressionConfig& compression, const RunContext& context) {
  PairInputs inputs = inputs_of(variant, context);
  inputs.plan.compression = compression;
  return inputs;
}

CompressionRun run_compressed(const CompressionScript& script, const RunContext& context) {
  CompressionRun run;
  const auto ranks = static_cast<std::size_t>(script.inputs.plan.parallel.world_size());
  run.start.resize(ranks);
  run.steps.resize(ranks);
  WorldSettings settings = context.world;
  // Processes have no scratch folder in common.
  if (!script.load.empty() || !script.save.empty()) settings.transport = "threads";
  run_world({.ranks = static_cast<int>(ranks), .deadline = kDeadline, .settings = settings},
            [&](Communicator& comm) { RankRun(script, context, comm).run(run); });
  if (settings.transport == "threads") return run;
  const auto own = static_cast<std::size_t>(job_shape(settings).rank);
  const bool takes_part = own < ranks;
  const std::vector<std::string> parts = all_gather_bytes(
      settings, to_bytes(std::tuple(takes_part ? run.start[own] : CompressionStep(),
                                    takes_part ? run.steps[own] : std::vector<CompressionStep>(), run.validation_loss)));
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    auto [start, steps, validation] = from_bytes<std::tuple<CompressionStep, std::vector<CompressionStep>, double>>(parts[rank]);
    run.start[rank] = std::move(start);
    run.steps[rank] = std::move(steps);
    if (rank == 0) run.validation_loss = validation;
  }
  return run;
}

}  // namespace tandem
