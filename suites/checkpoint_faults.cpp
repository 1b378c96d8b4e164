// SPDX-License-Identifier: Apache-2.0
// Disks that are full or refuse, stores that are down, break off or crawl: training goes on and nothing that was there is lost.
#include <atomic>
#include <cmath>
#include <memory>
#include <optional>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/checkpoint/catalogue.h"
#include "optimized/checkpoint/tiers.h"
#include "optimized/storage/folder_store.h"
#include "optimized/storage/scripted_store.h"
#include "suites/checkpoint_cases.h"
#include "suites/checkpoint_files.h"
#include "suites/scratch_folder.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kSteps = 5;
constexpr std::int64_t kFirst = 1, kSpoiled = 3, kLast = 5;

std::size_t lines_naming(const CheckpointRun& run, const std::string& step, const std::string& reason) {
  std::size_t lines = 0;
  for (const std::string& problem : run.problems.front()) {
    lines += problem.find(step) != std::string::npos && problem.find(reason) != std::string::npos ? 1 : 0;
  }
  return lines;
}

// What holds of a run whose middle checkpoint failed, `label` saying how.
void add_survival(const CheckpointRun& run, const CheckpointRun& undisturbed, const fs::path& folder, const std::string& reason,
                  const std::string& label, std::vector<Property>& properties, double tries = 1) {
  double ranks_unaware = 0;
  // A copy that fails while training goes on is told of at once, and again when it fails at the end.
  const auto told = [tries](double lines) { return lines >= 1 && lines <= tries ? 1.0 : lines; };
  for (const auto& problems : run.problems) ranks_unaware += problems == run.problems.front() ? 0 : 1;
  properties.push_back({"steps_that_differ, " + label, steps_that_differ(undisturbed.steps, run.steps), Relation::equal, 0.0,
                        "those of a run that saves nothing", -1, ""});
  properties.push_back({"problems, " + label, told(static_cast<double>(run.problems.front().size())), Relation::equal, 1.0,
                        "one line for the one checkpoint, and for each try", -1, ""});
  properties.push_back({"problems_that_name_step_and_reason, " + label,
                        told(static_cast<double>(lines_naming(run, fmt::format("step {}", kSpoiled), reason))), Relation::equal,
                        1.0, fmt::format(R"("step {}" and "{}")", kSpoiled, reason), -1,
                        run.problems.front().empty() ? "" : run.problems.front().front()});
  properties.push_back({"ranks_with_other_problems, " + label, ranks_unaware, Relation::equal, 0.0, "all ranks know", -1, ""});
  properties.push_back(equal_on_disk("fields_and_tensors_that_differ in the next one, " + label, run.states.at(kLast),
                                     step_folder(folder, kLast), "the next checkpoint is whole", kLast - 1));
}

// A file system that refuses one kind of request of the second checkpoint; writes after some bytes.
struct Refusal {
  std::string label;
  FileAction action;
  std::int64_t allowed = 0;  ///< bytes, or requests
  std::string reason;
};

// Throws where the refusal says so. Files of one step alone: the others' are none of its business.
class Refuser {
 public:
  explicit Refuser(const Refusal& refusal) : refusal_(refusal) {}
  void operator()(const FileCall& call) {
    const std::string step = step_folder({}, kSpoiled).string();
    if (call.action != refusal_.action || call.path.string().find(step) == std::string::npos) return;
    if ((passed_ += call.action == FileAction::write ? std::ssize(call.bytes) : 1) <= refusal_.allowed) return;
    throw IoError(fmt::format("{}: {}", call.path.string(), refusal_.reason));
  }

 private:
  const Refusal& refusal_;
  std::atomic<std::int64_t> passed_ = 0;
};

void add_refusal(const Refusal& refusal, const PairInputs& inputs, const CheckpointRun& undisturbed, const RunContext& context,
                 std::vector<Property>& properties) {
  const ScratchFolder scratch("checkpoint-disk");
  Refuser refuser(refusal);
  HookedFiles files([&](const FileCall& call) { refuser(call); });
  CheckpointScript script = saving_script(inputs, scratch.path(), kSteps, {kFirst, kSpoiled, kLast});
  script.checkpoints.files = &files;
  script.checkpoints.keep = 1;
  script.settled_before = {kLast};
  std::optional<reference::State> found;
  script.before_save = [&](int rank, std::int64_t steps_done) {
    if (rank != 0 || steps_done != kLast) return;
    try {
      found = reference::assemble(find_checkpoint(scratch.path(), {}, context.pitfalls));
    } catch (const InputError&) {
      found.reset();
    }
  };
  const CheckpointRun run = run_checkpoints(script, context);
  add_survival(run, undisturbed, scratch.path(), refusal.reason, refusal.label, properties);
  const bool known = found && run.states.contains(found->next_step);
  const double differing =
      known ? static_cast<double>(reference::differences(run.states.at(found->next_step), *found).size()) : std::nan("");
  properties.push_back({"fields_and_tensors_that_differ in the one before, " + refusal.label, differing, Relation::equal, 0.0,
                        "it stays until the next is there, though one alone is kept", kLast - 1, ""});
}

Case disk_case(const std::string& name, const std::string& summary, const ParallelVariant& variant,
               const std::vector<Refusal>& refusals) {
  Case result = checkpoint_case("faults/" + name, summary, variant);
  result.execute = [=](const RunContext& context) {
    const PairInputs inputs = inputs_of(variant, context);
    const CheckpointRun undisturbed = run_checkpoints(saving_script(inputs, {}, kSteps, {}), context);
    CaseEvidence evidence;
    for (const Refusal& refusal : refusals) add_refusal(refusal, inputs, undisturbed, context, evidence.properties);
    return evidence;
  };
  return result;
}

// A store that fails for one checkpoint, and then recovers.
struct StoreFault {
  std::string label;
  StoreScript script;
  std::string reason;
};

void add_store_fault(const StoreFault& fault, const PairInputs& inputs, const CheckpointRun& undisturbed,
                     const RunContext& context, std::vector<Property>& properties) {
  const ScratchFolder scratch("checkpoint-store");
  const fs::path local = scratch.path() / "local";
  const auto store = std::make_shared<ScriptedStore>(std::make_shared<FolderStore>(scratch.path() / "remote"));
  CheckpointScript script = saving_script(inputs, local, kSteps, {kFirst, kSpoiled, kLast});
  script.checkpoints.store = store;
  // Each checkpoint is through before the next begins, so that the fault meets the one that it is meant for.
  script.settled_before = {kSpoiled, kLast};
  script.before_save = [&](int rank, std::int64_t steps_done) {
    if (rank != 0) return;
    if (steps_done == kSpoiled) store->set_script(fault.script);
    if (steps_done == kLast) store->set_script({});
  };
  const CheckpointRun run = run_checkpoints(script, context);
  add_survival(run, undisturbed, local, fault.reason, fault.label, properties, 2);
  properties.push_back(equal_on_disk("fields_and_tensors_that_differ in the local copy, " + fault.label, run.states.at(kSpoiled),
                                     step_folder(local, kSpoiled), "the store's failure is not the disk's", kSpoiled - 1));
  const std::vector<std::int64_t> remote = list_remote_checkpoints(store->behind());
  properties.push_back({"other_remote_checkpoints, " + fault.label, remote == std::vector{kLast, kFirst} ? 0.0 : 1.0,
                        Relation::equal, 0.0, "what broke off is no checkpoint, what came after it is", -1, ""});
  const fs::path fetched = find_newest_checkpoint(scratch.path() / "elsewhere", store.get());
  properties.push_back(equal_on_disk("fields_and_tensors_that_differ when fetched, " + fault.label, run.states.at(kLast), fetched,
                                     "another machine gets the newest from the store", kLast - 1));
}

Case store_case(const ParallelVariant& variant, const std::vector<StoreFault>& faults) {
  Case result =
      checkpoint_case("faults/store", "the store is down, or breaks off: the disk's copy stays, the next goes up", variant);
  result.execute = [=](const RunContext& context) {
    const PairInputs inputs = inputs_of(variant, context);
    const CheckpointRun undisturbed = run_checkpoints(saving_script(inputs, {}, kSteps, {}), context);
    CaseEvidence evidence;
    for (const StoreFault& fault : faults) add_store_fault(fault, inputs, undisturbed, context, evidence.properties);
    return evidence;
  };
  return result;
}

// Uploads stand still until training is two steps further; nobody waits for them.
Case slow_store_case(const ParallelVariant& variant) {
  Case result = checkpoint_case("faults/slow_store", "a store that takes two steps for an upload: no step waits for it", variant);
  result.execute = [variant](const RunContext& context) {
    const ScratchFolder scratch("checkpoint-store");
    const PairInputs inputs = inputs_of(variant, context);
    Gate gate;
    StoreScript slow;
    slow.latency_seconds = 1;
    slow.sleep = [&](double) { gate.pass(); };
    const auto store = std::make_shared<ScriptedStore>(std::make_shared<FolderStore>(scratch.path() / "remote"), slow);
    CheckpointScript script = saving_script(inputs, scratch.path() / "local", kSteps, {kFirst});
    script.checkpoints.store = store;
    gate.shut();
    script.after_step = [&](int, std::int64_t steps_done, const Checkpointer&) {
      if (steps_done == kSteps) gate.open();
    };
    const CheckpointRun run = run_checkpoints(script, context);
    const CheckpointRun undisturbed = run_checkpoints(saving_script(inputs, {}, kSteps, {}), context);
    CaseEvidence evidence;
    evidence.properties = {{"training_waited_for_the_store", gate.given_up() ? 1.0 : 0.0, Relation::equal, 0.0,
                            "save() and four steps return while no request to the store is answered", -1, ""},
                           {"steps_that_differ", steps_that_differ(undisturbed.steps, run.steps), Relation::equal, 0.0,
                            "those of a run that saves nothing", -1, ""},
                           equal_on_disk("fields_and_tensors_that_differ when fetched", run.states.at(kFirst),
                                         fetch_checkpoint(store->behind(), kFirst, scratch.path() / "elsewhere"),
                                         "what was uploaded is the state at the call", 0)};
    return evidence;
  };
  return result;
}

}  // namespace

void add_checkpoint_fault_cases(CaseList& cases) {
  const ParallelVariant variant = accumulating({.degrees = {.data = 2}, .zero_stage = 1});
  const std::string full = "No space left on device";
  cases.push_back(disk_case("full_disk", "the disk is full at the start, in the middle of a file, at its sync, at the manifest",
                            variant,
                            {{"first byte", FileAction::write, 0, full},
                             {"in the middle", FileAction::write, 100000, full},
                             {"at a sync", FileAction::sync, 0, full},
                             {"at the manifest's sync", FileAction::sync, 2, full}}));
  const std::string read_only = "Read-only file system";
  cases.push_back(disk_case("refusals", "a folder, file, name or sync of a folder is refused", variant,
                            {{"folder", FileAction::make_folder, 0, read_only},
                             {"file", FileAction::create, 0, read_only},
                             {"rename", FileAction::rename, 0, "Permission denied"},
                             {"sync of the folder", FileAction::sync_folder, 0, "Input/output error"}}));
  StoreScript down, broken, late;
  down.down = {0, StoreScript::kForEver};
  // And once more, when the last copy is tried again.
  broken.broken_upload = {1, 50000, 2};
  late.broken_upload = {2, 10, 2};
  cases.push_back(store_case(
      variant, {{"down", down, "down"}, {"second file breaks off", broken, "broke"}, {"manifest breaks off", late, "broke"}}));
  cases.push_back(slow_store_case(variant));
}

}  // namespace tandem
