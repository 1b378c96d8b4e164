// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/export_programs.h"

#include <map>
#include <set>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/io/atomic_file.h"
#include "core/process_grid.h"

namespace tandem {
namespace {

// The lines of one stage's program, and the axes that it communicates on.
class ProgramText {
 public:
  ProgramText(const StepProgram& program, const ProcessGrid& grid, const OperationCost& cost, int stage)
      : program_(program), grid_(grid), cost_(cost), stage_(stage), lines_(fmt::format("program {}\n", stage)) {
    for (std::size_t i = 0; i < program_.size(); ++i) operation(i);
    flush();
    lines_ += "end\n";
  }
  [[nodiscard]] const std::string& lines() const noexcept { return lines_; }
  [[nodiscard]] const std::set<GroupAxis>& axes() const noexcept { return axes_; }

 private:
  // Operations that compute one after the other are one.
  void flush() {
    if (computing_seconds_ > 0) lines_ += fmt::format("compute {}\n", computing_seconds_);
    computing_seconds_ = 0;
  }

  void wait_for_background(const Operation& op) {
    for (const OperationId before : op.after) {
      const auto found = background_.find(before);
      if (found == background_.end()) continue;
      flush();
      lines_ += fmt::format("wait {}\n", found->second);
      background_.erase(found);
    }
  }

  void operation(std::size_t index) {
    const Operation& op = program_[index];
    wait_for_background(op);
    if (op.kind == OpKind::allocate || op.kind == OpKind::free) return;
    if (op.kind != OpKind::communicate) {
      computing_seconds_ += cost_(op, stage_);
      return;
    }
    flush();
    if (op.collective == Collective::send || op.collective == Collective::recv) {
      lines_ += fmt::format("{} {} {}\n", name(op.collective), grid_.coordinates(op.peer).pipeline, op.bytes);
      return;
    }
    axes_.insert(op.axis);
    if (op.background) background_.emplace(static_cast<OperationId>(index), num_background_++);
    lines_ +=
        fmt::format("{} {} {} {}\n", op.background ? "background" : "collective", name(op.collective), name(op.axis), op.bytes);
  }

  const StepProgram& program_;
  const ProcessGrid& grid_;
  const OperationCost& cost_;
  int stage_;
  std::string lines_;
  double computing_seconds_ = 0;
  std::map<OperationId, int> background_;  // not waited for yet
  int num_background_ = 0;
  std::set<GroupAxis> axes_;
};

std::string groups_of(GroupAxis axis, const ProcessGrid& grid) {
  std::string lines;
  for (int rank = 0; rank < grid.size(); ++rank) {
    const std::vector<int> members = grid.group(axis, rank);
    if (members.front() == rank) lines += fmt::format("group {} {}\n", name(axis), fmt::join(members, " "));
  }
  return lines;
}

}  // namespace

std::string programs_as_text(const TrainingPlan& plan, const GptConfig& model, std::int64_t sequence,
                             const ClusterSpec& cluster) {
  const ProcessGrid grid(plan);
  const std::vector<StepProgram> programs = representative_programs(plan, model, sequence);
  const OperationCost cost = cost_on(cluster, plan, model, sequence);
  const ReplayTiming timing = replay(programs, plan, cost, shares_links_on(cluster, plan));

  std::string text = fmt::format("tandem-programs 1\npredicted_seconds {}\nranks {}\n", timing.step_seconds, grid.size());
  for (const NetworkLevel& level : cluster.levels) {
    const double bytes_per_second = level.bytes_per_second * level.efficiency / level.oversubscription;
    text += fmt::format("level {} {} {} {}\n", level.devices, bytes_per_second, level.latency_seconds, level.name);
  }
  std::set<GroupAxis> axes = {GroupAxis::pipeline};
  std::string lines;
  for (int stage = 0; stage < plan.parallel.pipeline; ++stage) {
    const ProgramText program(programs[static_cast<std::size_t>(stage)], grid, cost, stage);
    lines += program.lines();
    axes.insert(program.axes().begin(), program.axes().end());
  }
  for (const GroupAxis axis : axes) text += groups_of(axis, grid);
  return text + lines;
}

void export_programs(const TrainingPlan& plan, const GptConfig& model, std::int64_t sequence, const ClusterSpec& cluster,
                     const std::filesystem::path& file) {
  write_file_atomically(file, programs_as_text(plan, model, sequence, cluster));
}

}  // namespace tandem
