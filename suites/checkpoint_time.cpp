// SPDX-License-Identifier: Apache-2.0
// What a checkpoint costs: the step that saves, the steps beside it, and the disk.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <limits>

#include <fmt/format.h>

#include "core/io/file_operations.h"
#include "core/quantile.h"
#include "core/timeline.h"
#include "optimized/comm/world.h"
#include "optimized/machine.h"
#include "suites/checkpoint_cases.h"
#include "suites/one_step.h"
#include "suites/scratch_folder.h"
#include "suites/timing.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr std::chrono::milliseconds kDeadline{120000};
constexpr int kSaves = 15;
constexpr int kRounds = 7;

double seconds_of(const std::function<void()>& action) {
  const std::int64_t begin = Timeline::now_ns();
  action();
  return static_cast<double>(Timeline::now_ns() - begin) * 1e-9;
}

// What else the machine does only adds to it.
double least(const std::vector<double>& values) { return *std::ranges::min_element(values); }

// About 9 million parameters: 108 MB of state, far more than any cache holds.
ParallelVariant large_variant(int data) {
  ParallelVariant variant{.degrees = {.data = data}, .rows = 4, .layers = 3, .dropout = 0.0};
  variant.hidden = 480;
  variant.mlp_hidden = 1920;
  variant.heads = 8;
  return variant;
}

// The engine of one rank, for a script of its own.
struct TimedEngine {
  TimedEngine(const PairInputs& inputs, Communicator& comm)
      : kernels(make_kernels(inputs.plan)),
        engine({&comm, kernels.get(), &arena, nullptr, {}, {}},
               {inputs.model, inputs.plan, own_optimizer(inputs), inputs.schedule, 100, inputs.seed, {}, {}}) {
    engine.store().initialise(inputs.model, inputs.initialization, inputs.seed);
  }
  Arena arena;
  std::unique_ptr<Kernels> kernels;
  Engine engine;
};

struct Times {
  std::vector<double> copy, background, at_once, plain_write;  ///< seconds; rank 0
  std::vector<double> quiet_steps, busy_steps;
  std::int64_t bytes = 0;
};

// A copy of what this rank contributes, from the engine's memory into memory that was touched before.
class PlainCopy {
 public:
  explicit PlainCopy(const ParameterStore& store) : store_(store) {
    for (const OwnedPart& part : store.parts()) {
      for (const TensorView view : {store.master(part), store.first_moment(part), store.second_moment(part)})
        sources_.push_back(view);
    }
    for (const TensorView& source : sources_) bytes_ += source.size_bytes();
    memory_.resize(static_cast<std::size_t>(bytes_), std::byte{1});
  }
  void run() {
    std::size_t at = 0;
    for (const TensorView& source : sources_) {
      std::memcpy(&memory_[at], source.data(), static_cast<std::size_t>(source.size_bytes()));
      at += static_cast<std::size_t>(source.size_bytes());
    }
  }
  // To a new file, and onto the disk.
  void write(const fs::path& file) const {
    FileOperations& files = system_files();
    files.remove(file);
    const int descriptor = files.create(file);
    files.write(descriptor, file, memory_);
    files.sync(descriptor, file);
    files.close(descriptor, file);
  }
  [[nodiscard]] std::int64_t bytes() const noexcept { return bytes_; }

 private:
  const ParameterStore& store_;
  std::vector<TensorView> sources_;
  std::vector<std::byte> memory_;
  std::int64_t bytes_ = 0;
};

// By turns, so that what else the machine does falls on all alike.
Times measure_saving(const PairInputs& inputs, const fs::path& folder, int saves) {
  Times times;
  run_world({.ranks = 1, .deadline = kDeadline}, [&](Communicator& comm) {
    TimedEngine rank(inputs, comm);
    PlainCopy copy(rank.engine.store());
    Checkpointer background({.folder = folder / "background", .keep = 1}, rank.engine);
    Checkpointer at_once({.folder = folder / "at_once", .asynchronous = false, .keep = 1}, rank.engine);
    times.bytes = copy.bytes();
    for (int i = -1; i < saves; ++i) {  // the first touches the memory
      const double copied = seconds_of([&] { copy.run(); });
      const CheckpointInfo info = info_of(inputs, i + 2);
      const double saved = seconds_of([&] { background.save(info); });
      background.finish();
      const double waited = seconds_of([&] { at_once.save(info); });
      const double written = seconds_of([&] { copy.write(folder / "plain"); });
      if (i < 0) continue;
      times.copy.push_back(copied);
      times.background.push_back(saved);
      times.at_once.push_back(waited);
      times.plain_write.push_back(written);
    }
  });
  return times;
}

// Steps by turns with nothing beside them and with a checkpoint being written.
Times measure_steps(const PairInputs& inputs, const fs::path& folder) {
  Times times;
  run_world({.ranks = inputs.plan.parallel.world_size(), .deadline = kDeadline}, [&](Communicator& comm) {
    TimedEngine rank(inputs, comm);
    Checkpointer checkpointer({.folder = folder, .keep = 1}, rank.engine);
    const Batch batch = inputs.data->training_batch(0, inputs.plan.batch.rows);
    std::int64_t step = 0;
    const auto steps = [&](std::vector<double>& seconds) {
      for (int i = 0; i < 4; ++i) {
        comm.barrier();
        const double one = seconds_of([&] {
          rank.engine.train_step(batch, step++);
          checkpointer.poll();
        });
        if (comm.rank() == 0) seconds.push_back(one);
      }
    };
    std::vector<double> warm_up;
    steps(warm_up);
    for (int i = 0; i < kRounds; ++i) {
      steps(times.quiet_steps);
      checkpointer.save(info_of(inputs, step));
      steps(times.busy_steps);
      checkpointer.finish();
    }
  });
  return times;
}

std::optional<std::string> cannot_time(const RunContext&) { return too_busy_to_time(); }

Case timed_case(const std::string& name, const std::string& summary, const ParallelVariant& variant) {
  Case result = checkpoint_case("time/" + name, summary, variant);
  result.quick = false;
  result.timed = true;
  result.unavailable = cannot_time;
  return result;
}

std::vector<Property> blocking_times(const RunContext& context, int saves) {
  const ScratchFolder scratch("checkpoint-time");
  const Times times = measure_saving(inputs_of(large_variant(1), context), scratch.path(), saves);
  const double copy = least(times.copy);
  const double background = least(times.background);
  const double at_once = median(times.at_once);
  const double written = median(times.plain_write);
  return {
      {"blocking_over_copy", background / copy, Relation::at_most, 1.3,
       fmt::format("{:.0f} MB: a plain copy takes {:.1f} ms, save() {:.1f} ms; least of {} by turns",
                   static_cast<double>(times.bytes) * 1e-6, 1e3 * copy, 1e3 * background, saves),
       -1, ""},
      {"blocking_at_once_over_blocking", at_once / background, Relation::at_least, 2 / 1.3,
       fmt::format("at once it is a copy and a write, {:.1f} ms, of which the write takes no less than the copy", 1e3 * at_once),
       -1, ""},
      {"time_at_once_over_plain_write", at_once / written, Relation::at_most, 3.0,
       fmt::format("copied, hashed and written: three passes over the bytes; one write and fsync of them takes {:.1f} ms, {:.2f} "
                   "GB/s",
                   1e3 * written, static_cast<double>(times.bytes) * 1e-9 / written),
       -1, ""}};
}

Case blocking_case() {
  const ParallelVariant variant = large_variant(1);
  Case result = timed_case("blocking", "save() stands in training's way as long as a copy of the state in memory", variant);
  result.execute = [](const RunContext& context) {
    CaseEvidence evidence;
    evidence.properties = checkpoint_blocking_times(context, kSaves);
    return evidence;
  };
  return result;
}

Case interference_case() {
  const ParallelVariant variant = large_variant(1);
  Case result = timed_case("interference", "steps beside a checkpoint that is being written", variant);
  result.execute = [variant](const RunContext& context) {
    const ScratchFolder scratch("checkpoint-time");
    const Times times = measure_steps(inputs_of(variant, context), scratch.path());
    const double quiet = median(times.quiet_steps);
    const double busy = median(times.busy_steps);
    CaseEvidence evidence;
    evidence.properties = {
        {"busy_step_over_quiet_step", busy / quiet, Relation::at_most, 2.0,
         fmt::format("a writer on the step's own core would take half of it; {:.1f} ms alone, {:.1f} ms beside the writer",
                     1e3 * quiet, 1e3 * busy),
         -1, ""}};
    return evidence;
  };
  return result;
}

}  // namespace

std::vector<Property> checkpoint_blocking_times(const RunContext& context, int saves) { return blocking_times(context, saves); }

void add_checkpoint_time_cases(CaseList& cases) {
  cases.push_back(blocking_case());
  cases.push_back(interference_case());
}

}  // namespace tandem
