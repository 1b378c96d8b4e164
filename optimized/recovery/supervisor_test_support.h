// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.h"
#include "optimized/recovery/supervisor.h"

namespace tandem {

enum class Does : std::uint8_t { finish, exit, hang, fall_silent, be_slow };

/// What an attempt does: two seconds of start, then a step each second from `from` on; what it does, it does after `steps`.
struct Script {
  Does does = Does::finish;
  std::int64_t from = 0;
  std::int64_t steps = 20;
  WorkerEnd end = {.status = 4, .what = "the machine broke"};
  bool ignores_terminate = false;
  bool refuses_to_start = false;
  WorkerEnd when_terminated = {.status = 130, .what = "saved"};
  double ends_after_seconds = 1e9;  ///< what hangs or is silent, after that happened
};

/// Launcher, workers, beats and clock in one: nothing happens but when the supervisor sleeps.
class World final : public Launcher, public HeartbeatSource {
 public:
  static constexpr double kStartSeconds = 2, kSaveSeconds = 1;

  explicit World(std::vector<Script> scripts, int ranks = 2) : scripts_(std::move(scripts)) {
    options.plan.parallel.data = ranks;
    options.plan.batch.rows = 12;
    options.detector.beat_seconds = 1;
  }

  SupervisorReport supervise(IncidentLog log = IncidentLog("")) {
    return tandem::supervise(
        options, *this, *this, log, stop, [this](const Incident& incident) { said.push_back(incident); },
        [this] { return now_ns; },
        [this](double seconds) {
          now_ns += static_cast<std::int64_t>(seconds * 1e9);
          if (now_seconds() >= stop_at_seconds) stop = true;
          // Whatever the supervisor waits for, it does not wait for ever.
          if (now_seconds() > 100'000) throw std::runtime_error("waits for ever");
        });
  }

  std::unique_ptr<Worker> start(const Attempt& attempt) override {
    EXPECT_FALSE(is_running) << "two workers at a time";
    attempts.push_back(attempt);
    started_at.push_back(now_seconds());
    if (script().refuses_to_start) throw IoError("no more processes");
    is_running = true;
    terminated_at_ = -1;
    begin_ns_ = now_ns;
    next_beat_ns_ = 0;
    return std::make_unique<FakeWorker>(*this);
  }
  std::vector<int> lost_ranks() override {
    return attempts.size() <= lost.size() ? lost[attempts.size() - 1] : std::vector<int>();
  }
  std::optional<std::int64_t> newest_step() override {
    EXPECT_FALSE(is_running);
    const std::size_t next = std::min(attempts.size(), scripts_.size() - 1);
    return expects_wrong_step ? 15 : scripts_[next].from;
  }

  std::optional<std::int64_t> steps_done() override { return attempts.size() == 1 ? written_steps : std::nullopt; }

  std::vector<Heartbeat> receive() override {
    std::vector<Heartbeat> beats;
    if (attempts.empty() || (now_ns < next_beat_ns_ && !has_last_beat_)) return beats;
    next_beat_ns_ = now_ns + static_cast<std::int64_t>(options.detector.beat_seconds * 1e9);
    ++sequence_;
    // Of an attempt that is long gone, with steps that this one has not done.
    if (has_late_beats && attempts.size() > 1)
      beats.push_back({.attempt = 0, .rank = 0, .sequence = sequence_, .step = 1000, .phase = RunPhase::train});
    if (!is_running && !std::exchange(has_last_beat_, false)) return beats;
    for (int rank = 0; rank < attempts.back().plan.parallel.world_size(); ++rank) {
      if (const std::optional<Heartbeat> beat = beat_of(rank)) beats.push_back(*beat);
    }
    return beats;
  }

  [[nodiscard]] double now_seconds() const { return static_cast<double>(now_ns) / 1e9; }
  [[nodiscard]] std::vector<std::string> kinds() const {
    std::vector<std::string> all;
    for (const Incident& incident : said) all.push_back(incident.kind);
    return all;
  }

  SupervisorOptions options;
  std::atomic<bool> stop{false};
  double stop_at_seconds = 1e9;
  std::vector<std::vector<int>> lost;         ///< after each attempt
  std::optional<std::int64_t> written_steps;  ///< of the first attempt
  bool has_late_beats = false, expects_wrong_step = false;

  std::int64_t now_ns = 0;
  std::vector<Attempt> attempts;
  std::vector<double> started_at;
  std::vector<Incident> said;
  int kills = 0, terminations = 0;
  bool is_running = false;

 private:
  class FakeWorker final : public Worker {
   public:
    explicit FakeWorker(World& world) : world_(world) {}
    std::optional<WorkerEnd> poll() override { return world_.poll(); }
    void terminate() override {
      ++world_.terminations;
      if (world_.terminated_at_ < 0) world_.terminated_at_ = world_.now_seconds();
    }
    void kill() override {
      EXPECT_TRUE(world_.is_running);
      ++world_.kills;
      world_.is_running = false;
    }

   private:
    World& world_;
  };

  [[nodiscard]] const Script& script() const { return scripts_[std::min(attempts.size(), scripts_.size()) - 1]; }
  [[nodiscard]] double run_seconds() const { return static_cast<double>(now_ns - begin_ns_) / 1e9 - kStartSeconds; }
  [[nodiscard]] std::int64_t steps_done() const {
    const auto steps = script().from + static_cast<std::int64_t>(std::floor(std::max(0.0, run_seconds()) + 1e-6));
    return script().does == Does::be_slow ? steps : std::min(steps, script().steps);
  }
  [[nodiscard]] bool is_there() const { return steps_done() >= script().steps; }

  std::optional<WorkerEnd> poll() {
    if (!is_running) throw std::logic_error("polled after its end");
    if (terminated_at_ >= 0 && !script().ignores_terminate && now_seconds() >= terminated_at_ + kSaveSeconds) {
      is_running = false;
      return script().when_terminated;
    }
    const bool ends = script().does == Does::finish || script().does == Does::exit ||
                      run_seconds() >= static_cast<double>(script().steps - script().from) + script().ends_after_seconds;
    if (!ends || !is_there()) return std::nullopt;
    is_running = false;
    has_last_beat_ = script().end.signal == 0;
    return script().does == Does::finish ? WorkerEnd{} : script().end;
  }

  // Rank 1 is the one that something is wrong with.
  [[nodiscard]] std::optional<Heartbeat> beat_of(int rank) const {
    const Does does = script().does;
    if (does == Does::fall_silent && is_there() && rank == 1) return std::nullopt;
    Heartbeat beat = {.attempt = attempts.back().number, .rank = rank, .sequence = sequence_};
    if (run_seconds() < 0) return beat;
    beat.step = steps_done();
    beat.phase = RunPhase::train;
    beat.progress = static_cast<std::uint64_t>(beat.step);
    beat.waiting = rank != 1 && is_there() && does != Does::be_slow;
    const bool is_slow = does == Does::be_slow && rank == 1;
    beat.busy_ns = (beat.step + (is_slow ? beat.step : 0)) * 400'000'000;
    return beat;
  }

  std::vector<Script> scripts_;
  std::int64_t begin_ns_ = 0, next_beat_ns_ = 0;
  double terminated_at_ = -1;
  bool has_last_beat_ = false;
  std::uint64_t sequence_ = 0;
};

}  // namespace tandem
