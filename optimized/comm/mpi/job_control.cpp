// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/mpi/job_control.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"

namespace tandem {
namespace {

using namespace std::chrono_literals;

enum Topic : std::uint8_t { kBegin = 1, kFailure, kOutcome, kQuestion, kAnswer, kLeaving, kBroken, kLetter };

// A process that computes with every core taken still answers within milliseconds: its listening thread has nothing else to do.
constexpr std::chrono::milliseconds kAnswerPatience{1000};
// Processes come to a world when they have judged the last one, each at its own pace.
constexpr std::chrono::milliseconds kLongestBeginning{120000};
// Between questions to those who are late.
constexpr std::chrono::milliseconds kQuestionInterval{5000};
constexpr std::chrono::milliseconds kMeanwhile{5};

std::string to_text(const Failure& failure) {
  return fmt::format("{} {} {}", static_cast<int>(failure.kind), failure.rank, failure.message);
}

Failure to_failure(const std::string& text) {
  std::istringstream words(text);
  int kind = 0;
  Failure failure;
  words >> kind >> failure.rank;
  words.get();
  failure.kind = static_cast<Failure::Kind>(kind);
  std::getline(words, failure.message, '\0');
  return failure;
}

}  // namespace

void throw_failure(const Failure& failure) {
  switch (failure.kind) {
    case Failure::Kind::timeout: throw TimeoutError(failure.message);
    case Failure::Kind::contract: throw ContractError(failure.message);
    case Failure::Kind::peer: break;
  }
  throw PeerError(failure.rank, failure.message);
}

JobControl::JobControl(Lifeline& lifeline) : lifeline_(lifeline) {}

void JobControl::on_broken(std::function<void(const Failure&)> broken) {
  const std::scoped_lock lock(mutex_);
  on_broken_ = std::move(broken);
}

std::uint64_t JobControl::begin(int ranks, std::uint64_t generation, std::chrono::milliseconds deadline) {
  Lock lock(mutex_);
  ++number_;
  world_ranks_ = ranks;
  worlds_.erase(worlds_.begin(), worlds_.lower_bound(number_));
  World& world = worlds_[number_];
  world.begun[lifeline_.rank()] = {ranks, generation};
  lifeline_.send_all({kBegin, number_, fmt::format("{} {}", ranks, generation)});
  const auto all_here = [&] { return broken_ || !left_.empty() || std::ssize(world.begun) == lifeline_.ranks(); };
  const Clock::time_point end = Clock::now() + std::max(deadline, kLongestBeginning);
  while (!changed_.wait_for(lock, kQuestionInterval, all_here)) {
    require_answers(
        lock, [&](int rank) { return !world.begun.contains(rank); }, "");
    if (!broken_ && Clock::now() > end) give_up_beginning(lock, world);
  }
  if (!left_.empty()) {
    const auto [process, status] = *left_.begin();
    break_job({Failure::Kind::peer, process,
               fmt::format("{} left the job with exit status {}", lifeline_.at(process).describe(process), status)});
  }
  if (broken_) throw_failure(*broken_);
  require_equal(world);
  return world.begun.at(0).second;
}

void JobControl::require_equal(const World& world) const {
  const int ranks = world.begun.at(lifeline_.rank()).first;
  for (const auto& [process, came_with] : world.begun) {
    if (came_with.first == ranks) continue;
    throw ContractError(
        fmt::format("world {} of the job has {} ranks in process {} and {} in process {}: do all of them run the "
                    "same command?",
                    number_, ranks, lifeline_.rank(), came_with.first, process));
  }
}

void JobControl::give_up_beginning(Lock& lock, const World& world) {
  std::vector<int> late;
  for (int process = 0; process < lifeline_.ranks(); ++process) {
    if (!world.begun.contains(process)) late.push_back(process);
  }
  lock.unlock();
  const auto answers = ask_all(kAnswerPatience);
  lock.lock();
  std::vector<std::string> texts;
  for (const int process : late) {
    texts.push_back(fmt::format("{} {}", lifeline_.at(process).describe(process),
                                answers[static_cast<std::size_t>(process)] ? "is at something else" : "does not answer"));
  }
  break_job({Failure::Kind::timeout, late.empty() ? -1 : late.front(),
             fmt::format("world {} of the job did not begin: {}", number_, fmt::join(texts, "; "))});
  throw_failure(*broken_);
}

void JobControl::watch(Hooks hooks) {
  std::optional<Failure> failure;
  std::vector<int> ended;
  {
    const std::scoped_lock both(hooks_mutex_);
    hooks_ = std::move(hooks);
  }
  {
    // What came before anybody listened.
    const std::scoped_lock lock(mutex_);
    const auto found = worlds_.find(number_);
    if (found == worlds_.end()) return;  // no letters either
    failure = broken_ ? broken_ : found->second.failure;
    for (const auto& [rank, outcome] : found->second.outcomes) {
      if (!outcome && rank != lifeline_.rank()) ended.push_back(rank);
    }
  }
  const std::scoped_lock lock(hooks_mutex_);
  if (failure && hooks_.failed) hooks_.failed(*failure);
  for (const int rank : ended) {
    if (hooks_.ended) hooks_.ended(rank);
  }
  hand_over_letters();
}

void JobControl::tell(int to, const std::string& letter) noexcept {
  std::uint64_t number = 0;
  {
    const std::scoped_lock lock(mutex_);
    number = number_;
  }
  lifeline_.send(to, {kLetter, number, letter});
}

// With the hooks' lock held, so that letters keep their order.
void JobControl::hand_over_letters() {
  if (!hooks_.told) return;
  std::vector<std::pair<int, std::string>> letters;
  {
    const std::scoped_lock lock(mutex_);
    if (const auto found = worlds_.find(number_); found != worlds_.end()) letters.swap(found->second.letters);
  }
  for (const auto& [from, letter] : letters) hooks_.told(from, letter);
}

void JobControl::fail(const Failure& failure) noexcept {
  std::uint64_t number = 0;
  {
    const std::scoped_lock lock(mutex_);
    number = number_;
    World& world = worlds_[number_];
    if (!world.failure) world.failure = failure;
  }
  lifeline_.send_all({kFailure, number, to_text(failure)});
}

std::optional<Failure> JobControl::end(const std::optional<Failure>& own, const std::function<void()>& meanwhile,
                                       std::chrono::milliseconds patience) {
  Lock lock(mutex_);
  World& world = worlds_[number_];
  if (lifeline_.rank() < world_ranks_) {
    world.outcomes[lifeline_.rank()] = own;
    lifeline_.send_all({kOutcome, number_, own ? to_text(*own) : std::string()});
  }
  const auto all_here = [&] { return broken_ || std::ssize(world.outcomes) == world_ranks_; };
  // A world that failed of a deadline has somebody who is late already.
  const bool timed_out = own && own->kind == Failure::Kind::timeout;
  Clock::time_point next_question = Clock::now() + (timed_out ? 0ms : kQuestionInterval);
  std::optional<Clock::time_point> failed_at;
  while (!changed_.wait_for(lock, kMeanwhile, all_here)) {
    if (meanwhile) meanwhile();
    if (own || world.failure) {
      if (!failed_at) failed_at = Clock::now();
      if (patience > 0ms && Clock::now() >= *failed_at + patience) require_end(world, patience);
    }
    if (Clock::now() < next_question) continue;
    require_answers(
        lock, [&](int rank) { return rank < world_ranks_ && !world.outcomes.contains(rank); },
        timed_out ? own->message + "; " : "");
    next_question = Clock::now() + kQuestionInterval;
  }
  std::optional<Failure> result = broken_;
  for (const bool own_only : {true, false}) {
    for (const auto& [rank, outcome] : world.outcomes) {
      if (!result && outcome && (!own_only || outcome->rank == rank)) result = outcome;
    }
  }
  lock.unlock();
  watch({});
  return result;
}

// Breaks the job where one that is late does not answer.
void JobControl::require_answers(Lock& lock, const std::function<bool(int)>& late, const std::string& before) {
  lock.unlock();
  const auto answers = ask_all(kAnswerPatience);
  lock.lock();
  for (int rank = 0; rank < lifeline_.ranks(); ++rank) {
    if (answers[static_cast<std::size_t>(rank)] || !late(rank)) continue;
    break_job({Failure::Kind::timeout, rank,
               fmt::format("{}{} does not answer: its process is stopped, or its host is out of reach", before,
                           lifeline_.at(rank).describe(rank))});
  }
}

// Breaks the job of a world that failed, and where a rank has not come to its end. With the lock held.
void JobControl::require_end(const World& world, std::chrono::milliseconds patience) {
  int late = 0;
  while (late < world_ranks_ && world.outcomes.contains(late)) ++late;
  const auto own = world.outcomes.find(lifeline_.rank());
  const bool failed_here = own != world.outcomes.end() && own->second;
  const std::string why = failed_here ? own->second->message : world.failure ? world.failure->message : "the world failed";
  break_job({Failure::Kind::timeout, late,
             fmt::format("{}; {} answers, but its work has not ended {:.3g} s later: it hangs", why,
                         lifeline_.at(late).describe(late), std::chrono::duration<double>(patience).count())});
}

std::vector<std::optional<std::string>> JobControl::ask_all(std::chrono::milliseconds patience) {
  const std::scoped_lock one_at_a_time(asking_);
  Lock lock(mutex_);
  const std::uint64_t question = ++question_;
  answers_.assign(static_cast<std::size_t>(lifeline_.ranks()), std::nullopt);
  lock.unlock();
  lifeline_.send_all({kQuestion, question, {}});
  std::string mine = own_report();
  lock.lock();
  answers_[static_cast<std::size_t>(lifeline_.rank())] = std::move(mine);
  static_cast<void>(changed_.wait_for(lock, patience, [&] {
    return std::all_of(answers_.begin(), answers_.end(), [](const auto& answer) { return answer.has_value(); });
  }));
  return answers_;
}

std::string JobControl::own_report() const {
  const std::scoped_lock lock(hooks_mutex_);
  return hooks_.report ? hooks_.report() : std::string();
}

bool JobControl::leave(int exit_status, std::chrono::milliseconds patience) noexcept {
  Lock lock(mutex_);
  left_[lifeline_.rank()] = exit_status;
  lifeline_.send_all({kLeaving, static_cast<std::uint64_t>(exit_status), {}});
  const bool came = changed_.wait_for(lock, patience, [&] { return broken_ || std::ssize(left_) == lifeline_.ranks(); });
  const bool whole = came && !broken_;
  lock.unlock();
  lifeline_.say_goodbye();
  return whole;
}

std::optional<Failure> JobControl::broken() const {
  const std::scoped_lock lock(mutex_);
  return broken_;
}

void JobControl::require_whole() const {
  if (const std::optional<Failure> failure = broken()) throw_failure(*failure);
}

// With the lock held. The first cause counts.
void JobControl::break_job(Failure failure) {
  if (broken_) return;
  broken_ = std::move(failure);
  // So that all name the same cause: whoever gives up closes its connections, too.
  lifeline_.send_all({kBroken, 0, to_text(*broken_)});
  if (on_broken_) on_broken_(*broken_);
  changed_.notify_all();
}

void JobControl::lost(int rank) { heard_broken({Failure::Kind::peer, rank, lifeline_.at(rank).describe(rank) + " died"}); }

void JobControl::heard_broken(const Failure& failure) {
  {
    const std::scoped_lock lock(mutex_);
    break_job(failure);
  }
  const std::scoped_lock lock(hooks_mutex_);
  if (hooks_.failed) hooks_.failed(failure);
}

void JobControl::heard(int from, const Notice& notice) {
  switch (notice.topic) {
    case kBegin: {
      std::istringstream words(notice.text);
      std::pair<int, std::uint64_t> came_with;
      words >> came_with.first >> came_with.second;
      const std::scoped_lock lock(mutex_);
      worlds_[notice.number].begun[from] = came_with;
      break;
    }
    case kFailure: heard_failure(notice.number, to_failure(notice.text)); break;
    case kOutcome: heard_outcome(from, notice.number, notice.text); break;
    case kBroken: heard_broken(to_failure(notice.text)); break;
    case kQuestion: lifeline_.send(from, {kAnswer, notice.number, own_report()}); break;
    case kAnswer: {
      const std::scoped_lock lock(mutex_);
      if (notice.number == question_) answers_[static_cast<std::size_t>(from)] = notice.text;
      break;
    }
    case kLetter: {
      {
        const std::scoped_lock lock(mutex_);
        if (notice.number < number_) return;
        worlds_[notice.number].letters.emplace_back(from, notice.text);
        if (notice.number != number_) return;
      }
      const std::scoped_lock lock(hooks_mutex_);
      hand_over_letters();
      break;
    }
    case kLeaving: {
      const std::scoped_lock lock(mutex_);
      left_[from] = static_cast<int>(notice.number);
      break;
    }
    default: break;
  }
  changed_.notify_all();
}

void JobControl::heard_failure(std::uint64_t number, const Failure& failure) {
  {
    const std::scoped_lock lock(mutex_);
    if (number < number_) return;
    World& world = worlds_[number];
    if (world.failure) return;
    world.failure = failure;
    if (number != number_) return;
  }
  const std::scoped_lock lock(hooks_mutex_);
  if (hooks_.failed) hooks_.failed(failure);
}

void JobControl::heard_outcome(int from, std::uint64_t number, const std::string& text) {
  std::optional<Failure> outcome;
  if (!text.empty()) outcome = to_failure(text);
  {
    const std::scoped_lock lock(mutex_);
    if (number < number_) return;
    worlds_[number].outcomes[from] = outcome;
    if (number != number_ || outcome) return;
  }
  const std::scoped_lock lock(hooks_mutex_);
  if (hooks_.ended) hooks_.ended(from);
}

}  // namespace tandem
