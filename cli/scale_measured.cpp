// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/data_source.h"
#include "cli/job.h"
#include "cli/scale_command.h"
#include "cli/scaling_report.h"
#include "cli/terminal.h"
#include "core/error.h"
#include "core/usable_cores.h"
#include "harness/measurement.h"
#include "harness/text_table.h"
#include "optimized/engine/lower.h"
#include "optimized/scaling/replay.h"
#include "optimized/training/trainer.h"
#include "suites/timing.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

// Small enough that ranks on one machine do not take minutes.
GptConfig own_model() { return {.vocabulary = 256, .sequence = 128, .layers = 4, .hidden = 128, .heads = 4}; }
constexpr std::int64_t kOwnRows = 8;
constexpr std::int64_t kWarmUpSteps = 2;

struct MeasuredPoint {
  int ranks = 1;
  double step_seconds = 0, low = 0, high = 0;  ///< median, 10th and 90th percentile
  double communication_share = 0;              ///< that nothing hides, mean over ranks
  double predicted_seconds = 0, predicted_share = 0;
  double tokens = 0;
};

TrainReport run(const GptConfig& model, const TrainingPlan& plan, const ScaleArguments& arguments, const WorldSettings& world) {
  TrainOptions options;
  options.config.model = model;
  options.config.plan = plan;
  options.config.steps = arguments.steps + kWarmUpSteps;
  options.config.evaluate_batches = 1;
  DataCache cache;
  const std::unique_ptr<BatchSource> source = open_data("synthetic", options.config, cache);
  options.data = source.get();
  options.data_name = "synthetic";
  options.world = world;
  options.stop = arguments.stop;
  return train(options);
}

// Seconds of each operation on a rank that nobody disturbs, by what the timeline calls it: the median over steps.
std::map<std::string, double> seconds_by_name(const std::vector<Span>& spans) {
  std::map<std::pair<std::string, int>, double> sums;
  for (const Span& span : spans) {
    const bool works = span.activity == Activity::compute || span.activity == Activity::optimizer;
    if (works && span.step >= kWarmUpSteps)
      sums[{span.name, span.step}] += static_cast<double>(span.end_ns - span.begin_ns) * 1e-9;
  }
  std::map<std::string, std::vector<double>> samples;
  for (const auto& [key, seconds] : sums) samples[key.first].push_back(seconds);
  std::map<std::string, double> medians;
  for (auto& [name, values] : samples) medians[name] = summarise(std::move(values)).median;
  return medians;
}

std::string span_name(const Operation& op) {
  if (op.kind == OpKind::optimizer) return "optimizer";
  return op.kind == OpKind::gradient_norm ? "gradient_norm" : to_string(op);
}

Summary step_summary(const TrainReport& report) {
  return summarise({report.step_seconds.begin() + kWarmUpSteps, report.step_seconds.end()});
}

double optimizer_flops(const StepProgram& program) {
  double flops = 0;
  for (const Operation& op : program) flops += op.kind == OpKind::optimizer ? op.flops : 0;
  return flops;
}

// The programs of the ranks, replayed with the seconds that one rank with as many rows takes for each operation.
void predict(MeasuredPoint& point, const GptConfig& model, const TrainingPlan& plan, const TrainReport& alone,
             const WorldSettings& world) {
  TrainingPlan one = on_one_rank(plan);
  one.batch.rows = plan.batch.rows / plan.parallel.data;
  const std::map<std::string, double> seconds = seconds_by_name(alone.spans_by_rank.front());
  double known = 0;
  for (const auto& [name, value] : seconds) known += value;
  // Ranks that share a core take turns.
  const double cores = usable_cores();
  const double crowding = world.transport == "threads" ? std::max(1.0, point.ranks / cores) : 1.0;
  const double all = optimizer_flops(lower(one, model, model.sequence, 0));
  const auto compute = [&](const Operation& op) {
    const auto found = seconds.find(span_name(op));
    if (found == seconds.end()) return 0.0;
    return crowding * found->second * (op.kind == OpKind::optimizer && all > 0 ? op.flops / all : 1.0);
  };
  const ReplayTiming timing = replay(plan, model, model.sequence, cost_measured(world, plan, compute));
  // What a step does beside its operations: batches, bookkeeping.
  const double beside = std::max(0.0, step_summary(alone).median - known);
  point.predicted_seconds = timing.step_seconds + crowding * beside;
  point.predicted_share = timing.exposed_seconds.front() / point.predicted_seconds;
}

// Of a job's first process; the others take part. Nothing where the run was interrupted.
std::optional<MeasuredPoint> point_at(int ranks, const GptConfig& model, const TrainingPlan& plan,
                                      const ScaleArguments& arguments, const WorldSettings& world) {
  MeasuredPoint point{.ranks = ranks};
  const TrainReport report = run(model, plan, arguments, world);
  TrainingPlan one = on_one_rank(plan);
  one.batch.rows = plan.batch.rows / plan.parallel.data;
  const TrainReport alone = run(model, one, arguments, WorldSettings{.transport = world.transport});
  if (*arguments.stop || alone.step_seconds.size() <= kWarmUpSteps) return std::nullopt;
  const Summary summary = step_summary(report);
  point.step_seconds = summary.median;
  point.low = summary.p10;
  point.high = summary.p90;
  for (const std::vector<Span>& spans : report.spans_by_rank) {
    const TimeSplit split = split_time(spans, kWarmUpSteps, {});
    point.communication_share += static_cast<double>(split.communication_exposed_ns) / static_cast<double>(split.wall_ns) / ranks;
  }
  point.tokens = static_cast<double>(plan.batch.rows * model.sequence);
  predict(point, model, plan, alone, world);
  return point;
}

CellRows rows_of(const std::vector<MeasuredPoint>& points) {
  CellRows rows = {
      {"ranks", "step", "10 % to 90 %", "predicted", "error", "tokens/s", "efficiency", "communication", "predicted share"}};
  for (const MeasuredPoint& point : points) {
    const MeasuredPoint& first = points.front();
    const double rate = point.tokens / point.step_seconds;
    const double efficiency = rate / point.ranks / (first.tokens / first.step_seconds / first.ranks);
    rows.push_back({fmt::format("{}", point.ranks), human_seconds(point.step_seconds),
                    fmt::format("{} to {}", human_seconds(point.low), human_seconds(point.high)),
                    human_seconds(point.predicted_seconds),
                    fmt::format("{:+.1f} %", 100 * (point.predicted_seconds / point.step_seconds - 1)), human_count(rate),
                    human_share(efficiency), human_share(point.communication_share), human_share(point.predicted_share)});
  }
  return rows;
}

Chart chart_of(const std::vector<MeasuredPoint>& points) {
  ChartSeries measured{.name = "measured", .x = {}, .y = {}, .points = true};
  ChartSeries predicted{.name = "predicted", .x = {}, .y = {}};
  for (const MeasuredPoint& point : points) {
    measured.x.push_back(point.ranks);
    measured.y.push_back(point.step_seconds);
    measured.low.push_back(point.low);
    measured.high.push_back(point.high);
    predicted.x.push_back(point.ranks);
    predicted.y.push_back(point.predicted_seconds);
  }
  return {.id = "scale_measured",
          .title = "Measured and predicted step time",
          .caption = "Median of the steps with 10th and 90th percentile; predicted by replaying the ranks' programs.",
          .x_label = "ranks",
          .y_label = "seconds",
          .log_x = true,
          .series = {std::move(measured), std::move(predicted)}};
}

Json json_of(const std::vector<MeasuredPoint>& points) {
  Json all = Json::array();
  for (const MeasuredPoint& point : points) {
    all.push_back({{"ranks", point.ranks},
                   {"step_seconds", point.step_seconds},
                   {"p10", point.low},
                   {"p90", point.high},
                   {"predicted_seconds", point.predicted_seconds},
                   {"tokens_per_second", point.tokens / point.step_seconds},
                   {"communication_share", point.communication_share},
                   {"predicted_communication_share", point.predicted_share}});
  }
  return all;
}

TrainingPlan plan_of(const Workload& workload, int ranks) {
  if (workload.plan.parallel.data != ranks) {
    throw InputError("--measured compares ranks that work alike, on rows of their own: leave tensor, pipeline and context at 1");
  }
  return workload.plan;
}

}  // namespace

ScaleResult scale_measured(const ScaleArguments& arguments) {
  if (arguments.world.transport == "nccl") {
    throw InputError("--transport nccl: moves tensors between GPUs, and --measured computes on the CPU; use threads or mpi");
  }
  const WorldSettings world = to_world_settings(arguments.world);
  const Job job(world);
  const GptConfig model = arguments.model.empty() ? own_model() : small_twin(read_model_shape(arguments.model), 1, 1);
  ScaleArguments here = arguments;
  if (here.global_batch == 0 && here.per_gpu_batch == 0) here.global_batch = kOwnRows;
  if (here.devices.empty()) here.devices = {1, 2, 4};
  const TrainingPlan layout = layout_of(here, "fp32");
  std::vector<std::pair<int, TrainingPlan>> plans;
  for (const int ranks : here.devices) {
    plans.emplace_back(ranks, plan_of(workload_at(here, shape_of(model, "here"), layout, ranks), ranks));
    require_legal(plans.back().second, model);
    if (world.transport != "threads" && ranks > job.processes()) {
      throw InputError(
          fmt::format("--gpus {}: the job has {} processes; start it with mpirun -n {}", ranks, job.processes(), ranks));
    }
  }
  const std::optional<std::string> busy = too_busy_to_time();
  std::vector<MeasuredPoint> points;
  ProgressLine progress;
  for (const auto& [ranks, plan] : plans) {
    progress.show(std::ssize(points), std::ssize(plans), fmt::format("{} ranks", ranks));
    const std::optional<MeasuredPoint> point = point_at(ranks, model, plan, here, world);
    if (*here.stop) return {};
    if (point) points.push_back(*point);
  }
  progress.clear();
  ScaleResult result;
  if (!job.leads()) return result;
  const CellRows rows = rows_of(points);
  const std::string title =
      fmt::format("measured on this machine: {}, {} layers of {}, {} rows {}", world.describe(), model.layers, model.hidden,
                  here.per_gpu_batch > 0 ? here.per_gpu_batch : here.global_batch, here.per_gpu_batch > 0 ? "a rank" : "a step");
  result.text = fmt::format("{}\n{}", title, rendered(rows, output_style()));
  if (busy) result.text += fmt::format("{}; ranks were disturbed\n", *busy);
  result.sections = {{.title = "Scaling, " + title, .text = {}, .charts = {chart_of(points)}, .table = rows}};
  result.document = Json{{"world", world.describe()}, {"measured", json_of(points)}}.dump();
  return result;
}

}  // namespace tandem
