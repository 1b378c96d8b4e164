// SPDX-License-Identifier: Apache-2.0
#include "optimized/checkpoint/checkpointer.h"

#include <atomic>
#include <chrono>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "optimized/checkpoint/background.h"
#include "optimized/checkpoint/catalogue.h"
#include "optimized/checkpoint/publish.h"
#include "optimized/checkpoint/rank_files.h"
#include "optimized/checkpoint/snapshot.h"
#include "optimized/checkpoint/tiers.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

// A rank that waits for its own disk looks after the others this often.
constexpr std::chrono::milliseconds kLook{20};

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

double slowest(const std::vector<PhaseOutcome>& outcomes) {
  double seconds = 0;
  for (const PhaseOutcome& outcome : outcomes) seconds = std::max(seconds, outcome.seconds);
  return seconds;
}

}  // namespace

class Checkpointer::State {
 public:
  State(CheckpointerOptions options, Engine& engine)
      : options_(std::move(options)),
        engine_(engine),
        world_(engine.groups().world()),
        pitfalls_(engine.context().pitfalls),
        files_(options_.files != nullptr ? *options_.files : system_files()) {
    if (!options_.folder.empty()) snapshot_.reserve(engine_);
  }

  void save(const CheckpointInfo& info) {
    const Clock::time_point begin = Clock::now();
    while (writing_.active()) {
      writing_.wait(kLook);
      advance_writing();
    }
    CheckpointTimes times;
    times.step = info.next_step;
    times.waiting_seconds = seconds_since(begin);
    info_ = with_engine_state(info, engine_);
    last_saved_ = info.next_step;
    last_is_safe_ = false;
    failed_upload_.reset();
    seen_step_ = info.next_step;
    snapshot_.take(engine_);
    times.bytes = snapshot_.size_bytes();
    times_.push_back(times);
    publishing_ = false;
    writing_.start([this] { return write(); });
    if (pitfalls_.on(Pitfall::latest_before_durable) && leads()) name_latest_early();
    if (!options_.asynchronous) finish();
    while (pitfalls_.on(Pitfall::save_waits_for_disk) && writing_.active()) {
      writing_.wait(kLook);
      advance_writing();
    }
    times_.back().blocking_seconds = seconds_since(begin);
  }

  void poll() {
    ++seen_step_;
    advance();
  }

  void finish() {
    is_finishing_ = true;
    drain();
    // The last copy has nothing to come after it that would make it good.
    if (failed_upload_ && failed_upload_->step == last_saved_) {
      pending_upload_ = *std::exchange(failed_upload_, std::nullopt);
      is_last_try_ = true;
      drain();
      is_last_try_ = false;
    }
    is_finishing_ = false;
  }

  void protect(std::set<std::int64_t> steps) { protected_ = std::move(steps); }

  [[nodiscard]] bool busy() const noexcept { return writing_.active() || uploading_.active() || pending_upload_.has_value(); }
  [[nodiscard]] const fs::path& newest() const noexcept { return newest_; }
  [[nodiscard]] bool last_is_safe() const noexcept { return last_is_safe_; }
  [[nodiscard]] const std::vector<std::string>& problems() const noexcept { return problems_; }
  [[nodiscard]] const std::vector<CheckpointTimes>& times() const noexcept { return times_; }

 private:
  [[nodiscard]] bool leads() const { return world_.rank() == 0; }
  [[nodiscard]] int rank() const { return world_.rank(); }

  void drain() {
    while (busy()) {
      if (writing_.active()) writing_.wait(kLook);
      if (uploading_.active() && !writing_.active()) uploading_.wait(kLook);
      advance();
    }
  }

  void advance() {
    advance_writing();
    advance_uploading();
  }

  // On the background thread. Reads the snapshot, info_ and options, which nobody changes before the phase is over.
  PhaseOutcome write() {
    const bool in_place = pitfalls_.on(Pitfall::checkpoint_written_in_place);
    fs::path unfinished = make_unfinished_folder(files_, options_.folder, info_.next_step);
    if (in_place) {
      files_.remove(unfinished);
      unfinished = options_.folder / step_folder_name(info_.next_step);
      files_.make_folder(unfinished);
    }
    PhaseOutcome outcome;
    const auto bytes = [this](std::size_t part) { return snapshot_.bytes(part); };
    outcome.files = write_rank_files(files_, unfinished, snapshot_.parts(), bytes, snapshot_.residuals(), rank(), !in_place);
    return outcome;
  }

  void name_latest_early() {
    const std::string latest = step_folder_name(info_.next_step) + "\n";
    try {
      replace_file(files_, options_.folder / "latest", std::as_bytes(std::span(latest)));
    } catch (const IoError&) {
      // The write that is under way will say it.
    }
  }

  void advance_writing() {
    if (!writing_.active()) return;
    const auto outcomes = writing_.finished(world_);
    if (!outcomes) return;
    const std::string error = first_error(*outcomes);
    if (publishing_) {
      end_writing(outcomes->front(), error);
      return;
    }
    CheckpointTimes& times = times_.back();
    times.writing_seconds = slowest(*outcomes);
    for (const PhaseOutcome& outcome : *outcomes) {
      for (const CheckpointFile& file : outcome.files) times.total_bytes += file.bytes;
    }
    own_files_ = (*outcomes)[static_cast<std::size_t>(rank())].files;
    publishing_ = true;
    std::set<std::int64_t> protect = protected_;
    if (uploading_step_) protect.insert(*uploading_step_);
    writing_.start([this, outcomes = *outcomes, error, protect] {
      PhaseOutcome outcome;
      outcome.error = error;
      if (!leads()) return outcome;
      if (error.empty()) {
        outcome.folder = publish(outcomes, protect, outcome.note).string();
      } else {
        abandon();
      }
      return outcome;
    });
  }

  fs::path publish(const std::vector<PhaseOutcome>& outcomes, const std::set<std::int64_t>& protect, std::string& note) {
    CheckpointInfo info = info_;
    // Planted: by the time that the files are complete, training has gone on.
    if (pitfalls_.on(Pitfall::checkpoint_of_live_step)) info.next_step = seen_step_;
    std::vector<std::vector<CheckpointFile>> written;
    for (const PhaseOutcome& outcome : outcomes) written.push_back(outcome.files);
    try {
      return publish_checkpoint(files_, make_manifest(info, written, pitfalls_),
                                {options_.folder, options_.keep, protect, pitfalls_, info_.next_step},
                                [&](const std::string& line) { note = line; });
    } catch (const IoError&) {
      abandon();
      throw;
    }
  }

  // What was written of a checkpoint that will not be.
  void abandon() noexcept {
    try {
      files_.remove(unfinished_folder(options_.folder, info_.next_step));
    } catch (const IoError&) {
      // It stays until the next one is published.
    }
  }

  void end_writing(const PhaseOutcome& published, const std::string& error) {
    CheckpointTimes& times = times_.back();
    times.published = error.empty();
    times.ended = !times.published || options_.store == nullptr;
    if (!error.empty()) {
      problems_.push_back(fmt::format("the checkpoint of step {} could not be written: {}", info_.next_step, error));
      return;
    }
    newest_ = published.folder;
    if (!published.note.empty()) problems_.push_back(published.note);
    last_is_safe_ = options_.store == nullptr && info_.next_step == last_saved_;
    if (options_.store == nullptr) return;
    if (pending_upload_) {
      times_[pending_upload_->times].ended = true;
      problems_.push_back(fmt::format("step {} was not uploaded to {}: the next one came before its turn; save less often",
                                      pending_upload_->step, options_.store->describe()));
    }
    pending_upload_ = {info_.next_step, newest_, own_files_, times_.size() - 1};
    advance_uploading();
  }

  struct Upload {
    std::int64_t step = 0;
    fs::path folder;
    std::vector<CheckpointFile> own_files;
    std::size_t times = 0;  // index
  };

  void advance_uploading() {
    if (uploading_.active()) {
      const auto outcomes = uploading_.finished(world_);
      if (!outcomes) return;
      end_upload_phase(*outcomes);
    }
    // Publishing removes old folders, and was told which one is being uploaded when it began.
    const bool removing = publishing_ && writing_.active();
    if (uploading_.active() || !pending_upload_ || removing) return;
    upload_ = *std::exchange(pending_upload_, std::nullopt);
    uploading_step_ = upload_.step;
    publishing_remote_ = false;
    uploading_.start([this] {
      for (const CheckpointFile& file : upload_.own_files) upload_checkpoint_file(*options_.store, upload_.folder, file.name);
      return PhaseOutcome{};
    });
  }

  void end_upload_phase(const std::vector<PhaseOutcome>& outcomes) {
    const std::string error = first_error(outcomes);
    times_[upload_.times].uploading_seconds += slowest(outcomes);
    if (!error.empty()) upload_failed(error);
    if (publishing_remote_ || !error.empty()) {
      last_is_safe_ = error.empty() && upload_.step == last_saved_;
      times_[upload_.times].ended = true;
      uploading_step_.reset();
      return;
    }
    publishing_remote_ = true;
    uploading_.start([this, protect = protected_] {
      if (!leads()) return PhaseOutcome{};
      publish_remote(*options_.store, upload_.folder);
      prune_remote(*options_.store, options_.keep, protect);
      return PhaseOutcome{};
    });
  }

  // Told at once, unless it is tried again at once.
  void upload_failed(const std::string& error) {
    if (!is_last_try_) failed_upload_ = upload_;
    if (is_finishing_ && !is_last_try_ && upload_.step == last_saved_) return;
    const char* const advice = is_last_try_ ? "; copy this folder to the store by hand, manifest.json last" : "";
    problems_.push_back(fmt::format("step {} was not uploaded: {}; it is complete in {}{}", upload_.step, error,
                                    upload_.folder.string(), advice));
  }

  CheckpointerOptions options_;
  Engine& engine_;
  Communicator& world_;
  PitfallSet pitfalls_;
  FileOperations& files_;
  Snapshot snapshot_;
  CheckpointInfo info_;  // of the checkpoint that is being written
  std::atomic<std::int64_t> seen_step_ = 0;
  bool publishing_ = false;
  std::vector<CheckpointFile> own_files_;
  fs::path newest_;
  std::int64_t last_saved_ = 0;  // step
  bool last_is_safe_ = true;
  std::optional<Upload> pending_upload_;
  Upload upload_;
  std::optional<Upload> failed_upload_;  // the last that failed, to be tried once more at the end
  bool is_finishing_ = false, is_last_try_ = false;
  std::optional<std::int64_t> uploading_step_;
  std::set<std::int64_t> protected_;
  bool publishing_remote_ = false;
  std::vector<std::string> problems_;
  std::vector<CheckpointTimes> times_;
  // Last: their destructors wait for jobs that use the others.
  BackgroundPhase writing_;
  BackgroundPhase uploading_;
};

Checkpointer::Checkpointer(CheckpointerOptions options, Engine& engine)
    : state_(std::make_unique<State>(std::move(options), engine)) {}
Checkpointer::~Checkpointer() = default;

void Checkpointer::save(const CheckpointInfo& info) { state_->save(info); }
void Checkpointer::poll() { state_->poll(); }
void Checkpointer::finish() { state_->finish(); }
void Checkpointer::protect(std::set<std::int64_t> steps) { state_->protect(std::move(steps)); }
const fs::path& Checkpointer::newest() const noexcept { return state_->newest(); }
bool Checkpointer::last_is_safe() const noexcept { return state_->last_is_safe(); }
const std::vector<std::string>& Checkpointer::problems() const noexcept { return state_->problems(); }
const std::vector<CheckpointTimes>& Checkpointer::times() const noexcept { return state_->times(); }
bool Checkpointer::busy() const noexcept { return state_->busy(); }

fs::path save_checkpoint(const fs::path& folder, Engine& engine, const CheckpointInfo& info) {
  Checkpointer checkpointer({.folder = folder, .asynchronous = false}, engine);
  checkpointer.save(info);
  if (!checkpointer.last_is_safe()) throw IoError(checkpointer.problems().front());
  return checkpointer.newest();
}

}  // namespace tandem
