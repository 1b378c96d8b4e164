// SPDX-License-Identifier: Apache-2.0
// The program, or the machine, ends between any two requests to the file system.
#include <fstream>
#include <map>
#include <set>

#include <fmt/format.h>

#include "core/io/hash.h"
#include "optimized/checkpoint/catalogue.h"
#include "suites/checkpoint_cases.h"
#include "suites/crash_states.h"
#include "suites/scratch_folder.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kNone = -1;
constexpr std::int64_t kMixture = -2;

std::uint64_t hash_of(const CrashedTree& tree) {
  std::uint64_t hash = 0;
  for (const auto& [name, bytes] : tree) {
    hash = hash64(std::as_bytes(std::span(name)), hash);
    hash = hash64(std::as_bytes(std::span(bytes)), hash);
  }
  return hash;
}

// What a run that starts now would find.
struct Finding {
  std::int64_t step = kNone;   ///< of find_checkpoint(); kMixture: its content is of no step that was saved
  bool latest_whole = true;    ///< `latest`, where it is, names a whole checkpoint
  double damaged_folders = 0;  ///< under a step's name
};

Finding find(const fs::path& folder, const std::map<std::int64_t, reference::State>& states, const PitfallSet& pitfalls) {
  Finding finding;
  try {
    const fs::path found = find_checkpoint(folder, {}, pitfalls);
    const reference::State state = reference::assemble(found);
    const auto saved = states.find(state.next_step);
    const bool whole = saved != states.end() && reference::differences(saved->second, state).empty() &&
                       found == step_folder(folder, state.next_step);
    finding.step = whole ? state.next_step : kMixture;
  } catch (const InputError&) {
    finding.step = kNone;
  }
  for (const CheckpointEntry& entry : list_checkpoints(folder)) {
    if (find_damage(entry.folder, VerifyDepth::contents)) ++finding.damaged_folders;
  }
  std::ifstream latest(folder / "latest");
  std::string name;
  if (latest >> name) finding.latest_whole = !find_damage(folder / name, VerifyDepth::contents);
  return finding;
}

// Properties of all states that a crash can leave: each judged once, however it comes about.
class CrashJudge {
 public:
  CrashJudge(const std::map<std::int64_t, reference::State>& states, const PitfallSet& pitfalls)
      : states_(states), pitfalls_(pitfalls) {}

  void judge(const FileLog& log) {
    CrashModel model;
    const std::vector<FileLog::Event>& events = log.events();
    for (std::size_t done = 0; done <= events.size(); ++done) {
      const std::int64_t promised = done < events.size() ? events[done].promised : log.promised();
      if (!amid_writes(events, done)) {
        for (const CrashVariant& variant : crash_variants()) judge(model.after_crash(variant), promised, done, variant);
      }
      if (done == events.size()) return;
      if (events[done].action == FileAction::remove) judge_removal(model.after_crash({}), events[done].path, promised, done);
      model.apply(events[done]);
    }
  }

  [[nodiscard]] std::vector<Property> properties() const {
    const auto none = [](const char* name, const Count& count, const char* derivation) {
      return Property{name, count.number, Relation::equal, 0.0, derivation, -1, count.first};
    };
    return {none("mixtures", mixtures_, "what is found is of one step, every bit of it"),
            none("lost_checkpoints", lost_, "once a checkpoint is reported, it or a newer one is found"),
            none("latest_names_a_part", latest_, "latest moves when its checkpoint is durable"),
            none("parts_under_a_final_name", parts_, "a folder gets its name when all in it is durable"),
            {"states_judged", static_cast<double>(findings_.size()), Relation::at_least, 20.0,
             "different ones, of every prefix of the log, with what was not synced there, lost or cut short", -1, ""},
            {"steps_found", static_cast<double>(steps_.size()), Relation::equal, static_cast<double>(states_.size()),
             "each checkpoint is the newest for a while", -1, ""}};
  }

 private:
  struct Count {
    double number = 0;
    std::string first;
  };

  // A folder is not removed at once: every second of its files is left, these or the others.
  void judge_removal(const CrashedTree& tree, const std::string& path, std::int64_t promised, std::size_t done) {
    for (const std::size_t left : {0U, 1U}) {
      CrashedTree half;
      std::size_t number = 0;
      for (const auto& [name, bytes] : tree) {
        const bool removed = name.starts_with(path + "/") && !name.ends_with('/') && number++ % 2 != left;
        if (!removed) half.emplace(name, bytes);
      }
      judge(half, promised, done, {}, Parts::may_have_names);
    }
  }

  // Between two writes, of whichever files: of these one in sixteen stands for all. What cuts a file short is a variant.
  static bool amid_writes(const std::vector<FileLog::Event>& events, std::size_t done) {
    const auto writes = [&](std::size_t i) { return i < events.size() && events[i].action == FileAction::write; };
    return done % 16 != 0 && done > 0 && writes(done - 1) && writes(done);
  }

  enum class Parts : std::uint8_t { must_not_have_names, may_have_names };

  void judge(const CrashedTree& tree, std::int64_t promised, std::size_t done, const CrashVariant& variant,
             Parts parts = Parts::must_not_have_names) {
    const auto [entry, is_new] = findings_.try_emplace(hash_of(tree));
    if (is_new) {
      const ScratchFolder scratch("crash-state");
      write_tree(tree, scratch.path());
      entry->second = find(scratch.path(), states_, pitfalls_);
    }
    const Finding& finding = entry->second;
    const auto add = [&](Count& count, bool bad) {
      if (!bad) return;
      ++count.number;
      if (count.first.empty()) count.first = fmt::format("after {} requests, {}", done, describe(variant));
    };
    add(mixtures_, finding.step == kMixture);
    add(lost_, finding.step < promised);
    add(latest_, !finding.latest_whole);
    add(parts_, finding.damaged_folders > 0 && parts == Parts::must_not_have_names);
    if (finding.step >= 0) steps_.insert(finding.step);
  }

  const std::map<std::int64_t, reference::State>& states_;
  PitfallSet pitfalls_;
  std::map<std::uint64_t, Finding> findings_;
  std::set<std::int64_t> steps_;
  Count mixtures_, lost_, latest_, parts_;
};

// Small, so that hundreds of states are judged in a second.
ParallelVariant small_variant(const ParallelVariant& like) {
  ParallelVariant variant = accumulating(like);
  variant.hidden = 12;
  variant.heads = 2;
  variant.mlp_hidden = 20;
  return variant;
}

Case crash_case(const std::string& name, const std::string& summary, const ParallelVariant& variant,
                const std::set<std::int64_t>& saved_after, std::int64_t keep, int runs = 1) {
  Case result = checkpoint_case("crash/" + name, summary, variant);
  result.execute = [=](const RunContext& context) {
    const ScratchFolder scratch("checkpoint-crash");
    FileLog log(scratch.path());
    HookedFiles files({}, log.recorder());
    CheckpointScript script = saving_script(inputs_of(variant, context), scratch.path(), *saved_after.rbegin() + 1, saved_after);
    script.checkpoints.files = &files;
    script.checkpoints.keep = keep;
    const auto promise = [&](int rank, const Checkpointer& checkpointer) {
      if (rank != 0 || checkpointer.newest().empty()) return;
      log.promise(parse_step_folder_name(checkpointer.newest().filename().string()).value_or(kNone));
    };
    script.after_step = [&](int rank, std::int64_t, const Checkpointer& checkpointer) { promise(rank, checkpointer); };
    script.after_finish = promise;
    CheckpointRun run;
    for (int i = 0; i < runs; ++i) run = run_checkpoints(script, context);
    CrashJudge judge(run.states, context.pitfalls);
    judge.judge(log);
    CaseEvidence evidence;
    evidence.properties = judge.properties();
    evidence.properties.push_back({"published_at_the_end", static_cast<double>(log.promised()), Relation::equal,
                                   static_cast<double>(*saved_after.rbegin()), "nothing failed", -1, ""});
    return evidence;
  };
  return result;
}

}  // namespace

void add_checkpoint_crash_cases(CaseList& cases) {
  cases.push_back(crash_case("keep1", "two saves of which one stays: an older or the newer checkpoint, whole, after any request",
                             small_variant({.degrees = {.data = 2}}), {1, 2}, 1));
  cases.push_back(
      crash_case("keep2/pipeline2", "three saves of which two stay", small_variant({.degrees = {.pipeline = 2}}), {1, 2, 3}, 2));
  cases.push_back(crash_case("again",
                             "a step that is there already is saved once more: the old folder goes when the new one comes",
                             small_variant({.degrees = {.data = 2}}), {1}, 0, 2));
}

}  // namespace tandem
