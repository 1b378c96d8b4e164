// SPDX-License-Identifier: Apache-2.0
#include "optimized/recovery/memory_tier.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/checkpoint/background.h"
#include "optimized/checkpoint/catalogue.h"
#include "optimized/checkpoint/publish.h"
#include "optimized/checkpoint/rank_files.h"
#include "optimized/comm/exchange.h"
#include "optimized/recovery/memory_assembly.h"
#include "optimized/recovery/neighbour_copy.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

bool is_leftover(const fs::path& path) {
  const std::string extension = path.extension().string();
  return (extension == ".unfinished" || extension == ".replaced") && parse_step_folder_name(path.stem().string());
}

}  // namespace

class MemoryTier::State {
 public:
  State(MemoryTierPlace place, Engine& engine, const PitfallSet& pitfalls)
      : place_(std::move(place)),
        engine_(engine),
        world_(engine.groups().world()),
        pitfalls_(pitfalls),
        parts_(checkpoint_parts(engine.options().model, engine.options().plan, engine.options().optimizer.kind, world_.rank(),
                                engine.context().pitfalls)) {
    find_common_steps();
  }

  void save(const CheckpointInfo& info) {
    const Clock::time_point begin = Clock::now();
    info_ = with_engine_state(info, engine_);
    // Of three steps only the two newest are looked after: the oldest gives its pages.
    const std::optional<std::int64_t> spare = steps_.size() >= 2 ? std::optional(steps_.front()) : std::nullopt;
    if (spare) steps_.erase(steps_.begin());
    const ResidualSnapshot residuals = residual_snapshot(engine_);
    bool is_good = on_all("prepared", [&](PhaseOutcome&) {
      if (leads_node()) prepare(spare);
    });
    is_good = is_good && on_all("written", [&](PhaseOutcome& outcome) {
                const auto bytes = [&](std::size_t part) { return bytes_of(parts_[part]); };
                outcome.files = write_rank_files(files_, unfinished(), parts_, bytes, residuals, world_.rank(), false);
              });
    written_.clear();
    for (const PhaseOutcome& outcome : outcomes_) written_.push_back(outcome.files);
    is_good = is_good && (nodes() == 1 || on_all("copied to a neighbour", [&](PhaseOutcome& outcome) {
                            const NeighbourCopy copy = copy_to_neighbours(world_, files_, unfinished(), written_,
                                                                          ranks_per_node(), info_.next_step, pitfalls_);
                            copied_bytes_ += copy.sent_bytes;
                            outcome.error = copy.error;
                          }));
    is_good = is_good && on_all("published", [&](PhaseOutcome&) {
                if (leads_node()) publish();
              });
    if (is_good) {
      std::erase(steps_, info_.next_step);
      steps_.push_back(info_.next_step);
    }
    if (leads_node()) is_good ? remove_all_but_steps() : abandon();
    save_seconds_ = std::chrono::duration<double>(Clock::now() - begin).count();
  }

  void forget_after(std::int64_t step) {
    std::erase_if(steps_, [&](std::int64_t kept) { return kept > step; });
    on_all("forgotten", [&](PhaseOutcome&) {
      if (!leads_node()) return;
      for (const CheckpointEntry& entry : steps_here()) {
        if (entry.step > step) system_files().remove(entry.folder);
      }
      remove_restored();
    });
  }

  [[nodiscard]] std::optional<std::int64_t> newest() const noexcept {
    return steps_.empty() ? std::nullopt : std::optional(steps_.back());
  }
  [[nodiscard]] const std::string& problem() const noexcept { return problem_; }
  [[nodiscard]] double save_seconds() const noexcept { return save_seconds_; }
  [[nodiscard]] std::int64_t copied_bytes() const noexcept { return copied_bytes_; }

 private:
  [[nodiscard]] int ranks_per_node() const { return place_.ranks_per_node > 0 ? place_.ranks_per_node : world_.size(); }
  [[nodiscard]] int nodes() const { return (world_.size() + ranks_per_node() - 1) / ranks_per_node(); }
  [[nodiscard]] int node() const { return world_.rank() / ranks_per_node(); }
  [[nodiscard]] bool leads_node() const { return world_.rank() % ranks_per_node() == 0; }
  [[nodiscard]] fs::path node_folder() const { return memory_node_folder(place_, node()); }
  [[nodiscard]] fs::path unfinished() const { return unfinished_folder(node_folder(), info_.next_step); }

  // Until the next call.
  [[nodiscard]] std::span<const std::byte> bytes_of(const CheckpointPart& part) {
    const ParameterStore& store = engine_.store();
    const TensorView values = (store.*part.view)(store.parts()[part.part]).flat(part.elements.begin, part.elements.size());
    shown_.emplace(store.memory(), values, Access::read);
    return {static_cast<const std::byte*>(shown_->view().data()), static_cast<std::size_t>(values.size_bytes())};
  }

  // The work of every rank, and what each came to. False where one failed: then all know it, and the first reason is the problem.
  bool on_all(std::string_view what, const std::function<void(PhaseOutcome&)>& work) {
    PhaseOutcome own;
    try {
      work(own);
    } catch (const IoError& error) {
      own.error = error.what();
    } catch (const InputError& error) {
      own.error = error.what();
    } catch (const fs::filesystem_error& error) {
      own.error = error.what();
    }
    outcomes_.clear();
    for (const std::string& bytes : all_gather_bytes(world_, to_bytes(own))) outcomes_.push_back(from_bytes<PhaseOutcome>(bytes));
    const std::string error = first_error(outcomes_);
    if (error.empty()) return true;
    problem_ = fmt::format("the copy of step {} in memory could not be {}: {}", info_.next_step, what, error);
    return false;
  }

  [[nodiscard]] std::vector<CheckpointEntry> steps_here() const {
    std::error_code ignored;
    return fs::is_directory(node_folder(), ignored) ? list_checkpoints(node_folder()) : std::vector<CheckpointEntry>();
  }

  // Steps of an earlier attempt that all nodes have, oldest first. A node that is new has none: then all stay until the first
  // save is complete.
  void find_common_steps() {
    std::vector<std::int64_t> own;
    if (leads_node()) {
      for (const CheckpointEntry& entry : steps_here()) {
        if (fs::exists(entry.folder / kManifestName)) own.push_back(entry.step);
      }
    }
    const std::vector<std::string> all = all_gather_bytes(world_, to_bytes(own));
    for (std::size_t rank = 0; rank < all.size(); rank += static_cast<std::size_t>(ranks_per_node())) {
      std::vector<std::int64_t> steps = from_bytes<std::vector<std::int64_t>>(all[rank]);
      std::ranges::sort(steps);
      if (rank == 0) {
        steps_ = steps;
      } else {
        std::erase_if(steps_, [&](std::int64_t step) { return !std::ranges::binary_search(steps, step); });
      }
    }
    if (steps_.size() > 2) steps_.erase(steps_.begin(), steps_.end() - 2);
  }

  // What this attempt has begun with.
  void remove_restored() const {
    const fs::path restored = memory_restored_folder(place_, node());
    system_files().remove(restored);
    system_files().remove(restored.string() + ".unfinished");
  }

  // An unfinished folder for the step, with the pages of an older one where there is one. Without its manifest that one is no
  // step any more, before a byte of it changes.
  void prepare(std::optional<std::int64_t> spare) {
    make_folders(files_, node_folder());
    remove_restored();
    std::vector<fs::path> usable;
    if (spare) {
      usable.push_back(node_folder() / step_folder_name(*spare));
      system_files().remove(usable.back() / kManifestName);
    }
    for (const fs::directory_entry& entry : fs::directory_iterator(node_folder())) {
      if (is_leftover(entry.path()) && entry.path() != unfinished()) usable.push_back(entry.path());
    }
    if (fs::exists(unfinished())) {
      system_files().remove(unfinished() / kManifestName);
    } else if (!usable.empty()) {
      system_files().remove(usable.front() / kManifestName);
      system_files().rename(usable.front(), unfinished());
      usable.erase(usable.begin());
    } else {
      system_files().make_folder(unfinished());
    }
    for (const fs::path& folder : usable) system_files().remove(folder);
  }

  [[nodiscard]] int keeper(int rank) const { return keeper_of(rank, world_.size(), ranks_per_node()); }
  void publish() {
    std::set<std::string> expected;
    for (int rank = 0; rank < world_.size(); ++rank) {
      const bool is_here = rank / ranks_per_node() == node() || (nodes() > 1 && keeper(rank) / ranks_per_node() == node());
      for (const CheckpointFile& file : written_[static_cast<std::size_t>(rank)]) {
        if (is_here) expected.insert(file.name);
      }
    }
    for (const fs::directory_entry& entry : fs::directory_iterator(unfinished())) {
      if (!expected.contains(entry.path().filename().string())) system_files().remove(entry.path());
    }
    const std::string text = to_json(make_manifest(info_, written_, engine_.context().pitfalls));
    write_new_file(files_, unfinished() / kManifestName, std::as_bytes(std::span(text)));
    const fs::path replaced = replace_folder(files_, unfinished(), node_folder() / step_folder_name(info_.next_step));
    if (!replaced.empty()) system_files().remove(replaced);
  }

  // What could not be completed here or elsewhere gives its memory back.
  void abandon() noexcept {
    std::error_code ignored;
    fs::remove_all(unfinished(), ignored);
    if (!std::ranges::count(steps_, info_.next_step)) {
      fs::remove_all(node_folder() / step_folder_name(info_.next_step), ignored);
    }
  }

  // Steps of earlier attempts that were kept until now.
  void remove_all_but_steps() {
    try {
      for (const CheckpointEntry& entry : steps_here()) {
        if (!std::ranges::count(steps_, entry.step)) system_files().remove(entry.folder);
      }
    } catch (const Error& error) {
      problem_ = error.what();
    } catch (const fs::filesystem_error& error) {
      problem_ = error.what();
    }
  }

  MemoryTierPlace place_;
  Engine& engine_;
  Communicator& world_;
  PitfallSet pitfalls_;
  PageKeepingFiles files_;
  std::vector<CheckpointPart> parts_;
  CheckpointInfo info_;                               // of the save that is under way
  std::optional<HostView> shown_;                     // of a part that is being written
  std::vector<std::int64_t> steps_;                   // complete on all nodes, at most two, in the order of their saves
  std::vector<PhaseOutcome> outcomes_;                // of what all ranks did last
  std::vector<std::vector<CheckpointFile>> written_;  // by rank
  std::string problem_;
  double save_seconds_ = 0;
  std::int64_t copied_bytes_ = 0;
};

MemoryTier::MemoryTier(MemoryTierPlace place, Engine& engine, const PitfallSet& pitfalls)
    : state_(std::make_unique<State>(std::move(place), engine, pitfalls)) {}
MemoryTier::~MemoryTier() = default;
void MemoryTier::save(const CheckpointInfo& info) { state_->save(info); }
void MemoryTier::forget_after(std::int64_t step) { state_->forget_after(step); }
std::optional<std::int64_t> MemoryTier::newest() const noexcept { return state_->newest(); }
const std::string& MemoryTier::problem() const noexcept { return state_->problem(); }
double MemoryTier::save_seconds() const noexcept { return state_->save_seconds(); }
std::int64_t MemoryTier::copied_bytes() const noexcept { return state_->copied_bytes(); }

}  // namespace tandem
