// SPDX-License-Identifier: Apache-2.0
#include "optimized/recovery/fault_injector.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <map>
#include <system_error>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/io/append_line.h"
#include "optimized/recovery/fault_effects.h"
#include "optimized/recovery/faulty_communicator.h"

namespace tandem {
namespace {

bool ends_the_rank(FaultKind kind) { return kind == FaultKind::kill || kind == FaultKind::lose || kind == FaultKind::hang; }

bool strikes_every_rank(FaultKind kind) { return kind == FaultKind::spike || kind == FaultKind::disk_full; }

bool lasts_for_steps(FaultKind kind) {
  return kind == FaultKind::slow || kind == FaultKind::spike || kind == FaultKind::disk_full || kind == FaultKind::jitter;
}

// By a hook of the engine, or whenever it is read.
bool strikes_inside_the_step(const Fault& fault) {
  const bool is_value = fault.kind == FaultKind::nan || fault.kind == FaultKind::flip;
  return fault.kind == FaultKind::poison ||
         (is_value && (fault.target == FaultTarget::activations || fault.target == FaultTarget::gradients));
}

std::string struck_line(const Fault& fault) { return fmt::format("{} {}", fault.id, to_string(fault)); }

// Lines "ID FAULT"; what a process that was killed has left of a line is passed over, and so is another fault at the same place
// of another script.
std::set<std::uint64_t> read_struck(const std::filesystem::path& file, const std::vector<Fault>& faults) {
  std::set<std::uint64_t> struck;
  if (file.empty()) return struck;
  std::ifstream in(file);
  std::set<std::string> lines;
  for (std::string line; std::getline(in, line) && !in.eof();) lines.insert(line);
  for (const Fault& fault : faults) {
    if (lines.contains(struck_line(fault))) struck.insert(fault.id);
  }
  return struck;
}

}  // namespace

class FaultInjector::State {
 public:
  // Of one rank, whose thread alone uses it but for what is atomic.
  struct Rank {
    std::int64_t furthest_step = -1;  // that it has begun
    double slow_seconds = 0;          // that the step under way has still to lose
    std::int64_t spike_step = -1;     // that has another learning rate
    double spike_factor = 1;
    MessageFaults messages;
  };

  explicit State(FaultInjectorOptions given)
      : options(std::move(given)), struck_(read_struck(options.struck_file, options.faults)) {
    struck_before_ = struck_;
  }

  [[nodiscard]] Rank& rank(int index) {
    const std::lock_guard lock(mutex_);
    const auto [found, is_new] = ranks_.try_emplace(index);
    if (is_new) found->second.messages.seed = static_cast<std::uint64_t>(index);
    return found->second;
  }

  // Nobody strikes twice with the same fault: true for the first that asks.
  [[nodiscard]] bool claim(const Fault& fault) {
    const std::lock_guard lock(mutex_);
    if (!struck_.insert(fault.id).second) return false;
    // Durable before it strikes: the process may be gone in the next moment, and must not be struck again.
    if (!options.struck_file.empty()) append_line(options.struck_file, struck_line(fault));
    return true;
  }
  [[nodiscard]] bool has_struck(const Fault& fault) const {
    const std::lock_guard lock(mutex_);
    return struck_.contains(fault.id);
  }
  // A fault of several steps is over with the attempt that it struck in.
  [[nodiscard]] bool is_over(const Fault& fault) const { return struck_before_.contains(fault.id); }

  [[nodiscard]] std::set<std::uint64_t> struck_in_any_attempt() const {
    std::set<std::uint64_t> struck = read_struck(options.struck_file, options.faults);
    const std::lock_guard lock(mutex_);
    struck.insert(struck_.begin(), struck_.end());
    return struck;
  }

  void strike(const Fault& fault, Engine* engine);
  void begin_lasting(const Fault& fault, std::int64_t step, Rank& here);
  void free_disk(std::int64_t step);
  void corrupt(const Fault& fault);
  void release();
  [[nodiscard]] FileOperations* add_disk(FileOperations& inner) {
    const std::lock_guard lock(mutex_);
    return disks_.emplace_back(make_disk(inner, disk_is_full_)).get();
  }

  FaultInjectorOptions options;

 private:
  [[noreturn]] void hang(const Fault& fault);
  void damage_state(const Fault& fault, Engine* engine) const;

  mutable std::mutex mutex_;
  std::condition_variable released_;
  std::int64_t hanging_ = 0, releases_ = 0;
  bool next_hang_ends_ = false;
  std::set<std::uint64_t> struck_, struck_before_;
  std::map<int, Rank> ranks_;
  std::atomic<bool> disk_is_full_{false};
  std::vector<std::unique_ptr<FileOperations>> disks_;
};

void FaultInjector::State::hang(const Fault& fault) {
  if (!options.in_process) {
    for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  }
  std::unique_lock lock(mutex_);
  if (!std::exchange(next_hang_ends_, false)) {
    const std::int64_t before = releases_;
    ++hanging_;
    released_.wait(lock, [&] { return releases_ != before; });
    --hanging_;
  }
  throw FaultStruck("fault " + to_string(fault) + " has struck, and was released");
}

void FaultInjector::State::release() {
  const std::lock_guard lock(mutex_);
  ++releases_;
  next_hang_ends_ = hanging_ == 0;  // who releases cannot know whether the rank has come to it yet
  released_.notify_all();
}

// Weights in the copy that is updated and in the one that is computed with, so that the damage stays and is seen at once.
void FaultInjector::State::damage_state(const Fault& fault, Engine* engine) const {
  TANDEM_CHECK(engine != nullptr, "weights and moments are struck within a step");
  const ParameterStore& store = engine->store();
  const OwnedPart& part = part_to_strike(store);
  const bool is_weight = fault.target == FaultTarget::weights;
  const TensorView values = is_weight ? store.master(part) : store.first_moment(part);
  if (!values) throw InputError("fault " + to_string(fault) + ": the optimizer keeps no moments; use adamw, or another target");
  const HostView struck(store.memory(), values, Access::update);
  fault.kind == FaultKind::nan ? put_nan(struck.view()) : turn_exponent_bit(struck.view(), FlipStrength::subtle);
  if (is_weight && store.has_master_copy()) {
    ParameterStore::assign(store.memory(), store.stored(part), ParameterStore::values_of(struck.view()));
  }
}

void FaultInjector::State::strike(const Fault& fault, Engine* engine) {
  if (ends_the_rank(fault.kind) && options.before_end) options.before_end(fault);
  switch (fault.kind) {
    case FaultKind::kill:
    case FaultKind::lose:
      if (options.in_process) throw FaultStruck("fault " + to_string(fault) + " has struck");
      ::kill(::getpid(), SIGKILL);
      break;
    case FaultKind::hang: hang(fault);
    case FaultKind::nan:
    case FaultKind::flip: damage_state(fault, engine); break;
    case FaultKind::heartbeat:
      if (options.lose_beats) options.lose_beats(fault.count);
      break;
    case FaultKind::supervisor:
      if (options.supervisor_process > 0) ::kill(options.supervisor_process, SIGKILL);
      break;
    case FaultKind::preempt: options.preempt ? options.preempt() : static_cast<void>(::kill(::getpid(), SIGTERM)); break;
    default: break;
  }
}

// In its first passage through each of the fault's steps: a step that is computed again after a rollback is as it should be. A
// learning rate whose update was refused has not struck yet, so that it is there in the next attempt at the same step.
void FaultInjector::State::begin_lasting(const Fault& fault, std::int64_t step, Rank& here) {
  const std::int64_t first = fault.step - 1;
  const bool is_due = step >= first && step < first + fault.count && !is_over(fault);
  const bool is_new = step > here.furthest_step;
  if (!is_due || (!is_new && fault.kind != FaultKind::spike) || step < here.furthest_step) return;
  static_cast<void>(claim(fault));
  if (fault.kind == FaultKind::slow) here.slow_seconds += fault.milliseconds / 1000;
  if (fault.kind == FaultKind::spike) {
    here.spike_factor = here.spike_step == step ? here.spike_factor * fault.factor : fault.factor;
    here.spike_step = step;
  }
  if (fault.kind == FaultKind::jitter) here.messages.jitter_milliseconds = fault.milliseconds;
  if (fault.kind == FaultKind::disk_full) disk_is_full_ = true;
}

void FaultInjector::State::free_disk(std::int64_t step) {
  const auto fills_it = [&](const Fault& fault) {
    return fault.kind == FaultKind::disk_full && step >= fault.step - 1 && step < fault.step - 1 + fault.count;
  };
  if (std::none_of(options.faults.begin(), options.faults.end(), fills_it)) disk_is_full_ = false;
}

// Where no checkpoint is there yet, the first one is waited for.
void FaultInjector::State::corrupt(const Fault& fault) {
  if (has_struck(fault)) return;
  const std::filesystem::path file = shard_to_corrupt(options.checkpoints);
  if (!file.empty() && claim(fault)) turn_middle_bit(file);
}

FaultInjector::FaultInjector(FaultInjectorOptions options) : state_(std::make_unique<State>(std::move(options))) {}
FaultInjector::~FaultInjector() = default;

bool FaultInjector::empty() const noexcept { return state_->options.faults.empty(); }

void FaultInjector::begin_step(std::int64_t step, int rank, Engine& engine) {
  State::Rank& here = state_->rank(rank);
  here.slow_seconds = 0;
  here.spike_step = -1;
  here.messages.jitter_milliseconds = 0;
  state_->free_disk(step);
  std::vector<const Fault*> last;  // who is gone does nothing more of this step
  for (const Fault& fault : state_->options.faults) {
    if (fault.moment != FaultMoment::step || (fault.rank != rank && !strikes_every_rank(fault.kind))) continue;
    const bool is_now = step == fault.step - 1;
    if (lasts_for_steps(fault.kind)) {
      state_->begin_lasting(fault, step, here);
    } else if (fault.kind == FaultKind::corrupt) {
      if (step >= fault.step - 1) state_->corrupt(fault);
    } else if (is_now && ends_the_rank(fault.kind)) {
      last.push_back(&fault);
    } else if (is_now && fault.kind == FaultKind::message) {
      if (state_->claim(fault)) here.messages.flip_next = true;
    } else if (is_now && !strikes_inside_the_step(fault)) {
      if (state_->claim(fault)) state_->strike(fault, &engine);
    }
  }
  here.furthest_step = std::max(here.furthest_step, step);
  for (const Fault* fault : last) {
    if (state_->claim(*fault)) state_->strike(*fault, &engine);
  }
}

void FaultInjector::during(FaultMoment moment, std::int64_t step, int rank) {
  for (const Fault& fault : state_->options.faults) {
    if (moment == FaultMoment::step || fault.moment != moment || fault.rank != rank || step < fault.step - 1) continue;
    if (state_->claim(fault)) state_->strike(fault, nullptr);
  }
}

void FaultInjector::add_hooks(EngineOptions& options, int rank) {
  State* const state = state_.get();
  State::Rank* const here = &state->rank(rank);
  for (const Fault& fault : state->options.faults) {
    const bool is_value = (fault.kind == FaultKind::nan || fault.kind == FaultKind::flip) && fault.rank == rank;
    const auto strike = [state, &fault](std::int64_t step, TensorView values) {
      if (step != fault.step - 1 || values.num_elements() == 0 || !state->claim(fault)) return;
      fault.kind == FaultKind::nan ? put_nan(values) : turn_exponent_bit(values, FlipStrength::fatal);
    };
    if (is_value && fault.target == FaultTarget::activations) {
      options.on_activation = [strike, next = std::move(options.on_activation)](std::int64_t step, int layer, TensorView output) {
        strike(step, output);
        if (next) next(step, layer, output);
      };
    } else if (is_value && fault.target == FaultTarget::gradients) {
      options.touch_gradients = [strike, next = std::move(options.touch_gradients)](std::int64_t step, TensorView gradients) {
        strike(step, gradients);
        if (next) next(step, gradients);
      };
    }
  }
  const auto has = [&](FaultKind kind, bool any_rank) {
    return std::any_of(state->options.faults.begin(), state->options.faults.end(),
                       [&](const Fault& fault) { return fault.kind == kind && (any_rank || fault.rank == rank); });
  };
  if (has(FaultKind::slow, false)) {
    // All of it at the first thing that the rank computes in the step.
    options.injected_seconds = [here, next = std::move(options.injected_seconds)](const Operation& operation) {
      return std::exchange(here->slow_seconds, 0.0) + (next ? next(operation) : 0.0);
    };
  }
  if (has(FaultKind::spike, true)) {
    options.learning_rate_factor = [here, next = std::move(options.learning_rate_factor)](std::int64_t step) {
      return (here->spike_step == step ? here->spike_factor : 1.0) * (next ? next(step) : 1.0);
    };
  }
}

std::unique_ptr<BatchSource> FaultInjector::poisoned(const BatchSource& data) const {
  std::set<std::int64_t> batches;
  for (const Fault& fault : state_->options.faults) {
    if (fault.kind == FaultKind::poison) batches.insert(fault.batch);
  }
  return batches.empty() ? nullptr : make_poisoned(data, std::move(batches));
}

FileOperations* FaultInjector::files(FileOperations& inner) {
  const auto fills_it = [](const Fault& fault) { return fault.kind == FaultKind::disk_full; };
  if (std::none_of(state_->options.faults.begin(), state_->options.faults.end(), fills_it)) return nullptr;
  return state_->add_disk(inner);
}

std::unique_ptr<Communicator> FaultInjector::disturbed(Communicator& inner) {
  const auto disturbs = [&](const Fault& fault) {
    return (fault.kind == FaultKind::message || fault.kind == FaultKind::jitter) && fault.rank == inner.rank();
  };
  if (std::none_of(state_->options.faults.begin(), state_->options.faults.end(), disturbs)) return nullptr;
  return make_faulty(inner, state_->rank(inner.rank()).messages);
}

void FaultInjector::release() { state_->release(); }

std::vector<int> FaultInjector::lost_ranks() const {
  const std::set<std::uint64_t> struck = state_->struck_in_any_attempt();
  std::vector<int> ranks;
  for (const Fault& fault : state_->options.faults) {
    if (fault.kind == FaultKind::lose && struck.contains(fault.id)) ranks.push_back(fault.rank);
  }
  return ranks;
}

}  // namespace tandem
