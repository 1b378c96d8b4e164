// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/messages/threads_wire.h"

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/timeline.h"
#include "optimized/comm/messages/link_model.h"

namespace tandem {
namespace {

constexpr std::int64_t kLook_ns = 20'000'000;  // how often a sleeper looks whether the world has failed
constexpr std::int64_t kSpin_ns = 60'000;      // before its time a sleeper is awake: it takes about as long to wake up

// Both ends of a message.
struct Exchange {
  enum class Phase : std::uint8_t {
    half,     ///< one end is posted
    matched,  ///< both are; nobody copies yet
    copying,
    copied,
    broken,  ///< the ends do not agree
  };
  int from = 0, to = 0;
  bool is_half_sent = false;  // which end was first
  std::uint64_t send_mark = 0, receive_mark = 0;
  std::span<const std::byte> source;
  std::span<std::byte> target;
  LinkModel::Departure departure;
  std::int64_t arrival_ns = 0;
  std::atomic<Phase> phase{Phase::half};
};
using Phase = Exchange::Phase;
using Shared = std::shared_ptr<Exchange>;

// Sleeps until the time has come. Timers fire late by the thread's slack, 50 microseconds unless it asks for less.
void sleep_until(std::int64_t time_ns) {
  if (const std::int64_t wake_ns = time_ns - kSpin_ns; wake_ns > Timeline::now_ns()) {
    const int slack_before = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
    (void)prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
    const timespec wake = {wake_ns / 1'000'000'000, wake_ns % 1'000'000'000};
    (void)clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &wake, nullptr);
    (void)prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(std::max(slack_before, 0)), 0, 0, 0);
  }
  while (Timeline::now_ns() < time_ns) std::this_thread::yield();
}

std::int64_t to_ns(Clock::time_point time) { return time.time_since_epoch() / std::chrono::nanoseconds(1); }

// Where the ends of messages meet.
class Hub final : public WorldState::Sleepers {
 public:
  Hub(std::shared_ptr<WorldState> world, const std::optional<LinkProfile>& link)
      : world_(std::move(world)), seats_(static_cast<std::size_t>(world_->ranks())) {
    if (link && link->is_shaped()) model_.emplace(*link, world_->ranks());
  }

  [[nodiscard]] int ranks() const noexcept { return world_->ranks(); }
  [[nodiscard]] Shared post_send(int from, int to, std::uint32_t channel, std::uint64_t mark, std::span<const std::byte> bytes);
  [[nodiscard]] Shared post_receive(int from, int to, std::uint32_t channel, std::uint64_t mark, std::span<std::byte> bytes);
  void try_copy(Exchange& exchange) noexcept;
  [[nodiscard]] bool wait(Exchange& exchange, int rank, std::uint32_t channel, bool sends, Clock::time_point deadline);
  [[nodiscard]] bool test(Exchange& exchange, bool sends);
  void begin_collective(int rank, std::uint32_t channel, std::int64_t issued_ns) {
    if (!model_) return;
    const std::scoped_lock lock(mutex_);
    clock(rank, channel).begin(issued_ns);
  }
  void cancel(const Shared& exchange, std::uint32_t channel) noexcept;
  void wake() noexcept override {
    for (Seat& seat : seats_) seat.parking.wake();
  }

 private:
  struct Seat {
    Parking parking;
    std::map<std::uint32_t, ModelClock> clocks;  // by channel
  };
  using Queue = std::deque<Shared>;  // of exchanges of which the same end is posted

  [[nodiscard]] Seat& seat(int rank) { return seats_[static_cast<std::size_t>(rank)]; }
  [[nodiscard]] Queue& queue(int from, int to, std::uint32_t channel) {
    return queues_[(static_cast<std::uint64_t>(from) << 48) | (static_cast<std::uint64_t>(to) << 32) | channel];
  }
  [[nodiscard]] ModelClock& clock(int rank, std::uint32_t channel) {
    return seat(rank).clocks.try_emplace(channel, is_collective_channel(channel)).first->second;
  }
  [[nodiscard]] Shared take(int from, int to, std::uint32_t channel, bool sends);
  void match(Exchange& exchange) noexcept;
  void wait_until_copied(const Exchange& exchange, int rank);
  [[nodiscard]] std::int64_t complete_ns(const Exchange& exchange, bool sends) const noexcept {
    return sends ? exchange.departure.left_ns : exchange.arrival_ns;
  }
  static void require_agreement(const Exchange& exchange);

  const std::shared_ptr<WorldState> world_;
  std::mutex mutex_;  // everything but the parkings
  std::optional<LinkModel> model_;
  std::vector<Seat> seats_;
  std::unordered_map<std::uint64_t, Queue> queues_;
};

// The exchange that this end belongs to: the oldest that waits for such an end, or a new one.
Shared Hub::take(int from, int to, std::uint32_t channel, bool sends) {
  Queue& waiting = queue(from, to, channel);
  if (!waiting.empty() && waiting.front()->is_half_sent != sends) {
    Shared exchange = std::move(waiting.front());
    waiting.pop_front();
    return exchange;
  }
  auto exchange = std::make_shared<Exchange>();
  exchange->from = from;
  exchange->to = to;
  exchange->is_half_sent = sends;
  waiting.push_back(exchange);
  return exchange;
}

Shared Hub::post_send(int from, int to, std::uint32_t channel, std::uint64_t mark, std::span<const std::byte> bytes) {
  Shared exchange;
  bool is_second = false;
  {
    const std::scoped_lock lock(mutex_);
    exchange = take(from, to, channel, true);
    exchange->send_mark = mark;
    exchange->source = bytes;
    if (model_) {
      const std::int64_t posted_ns = clock(from, channel).post_ns(Timeline::now_ns());
      exchange->departure = model_->depart(from, to, std::ssize(bytes), posted_ns);
    }
    is_second = !exchange->is_half_sent;
    if (is_second) match(*exchange);
  }
  if (is_second) seat(to).parking.wake();
  return exchange;
}

Shared Hub::post_receive(int from, int to, std::uint32_t channel, std::uint64_t mark, std::span<std::byte> bytes) {
  Shared exchange;
  bool is_second = false;
  {
    const std::scoped_lock lock(mutex_);
    exchange = take(from, to, channel, false);
    exchange->receive_mark = mark;
    exchange->target = bytes;
    is_second = exchange->is_half_sent;
    if (is_second) match(*exchange);
  }
  if (is_second) seat(from).parking.wake();
  return exchange;
}

void Hub::match(Exchange& exchange) noexcept {
  const bool agree = exchange.send_mark == exchange.receive_mark && exchange.source.size() == exchange.target.size();
  if (model_ && agree) {
    exchange.arrival_ns = model_->arrive(exchange.from, exchange.to, std::ssize(exchange.source), exchange.departure);
  }
  exchange.phase.store(agree ? Phase::matched : Phase::broken);
}

void Hub::try_copy(Exchange& exchange) noexcept {
  Phase expected = Phase::matched;
  if (!exchange.phase.compare_exchange_strong(expected, Phase::copying)) return;
  if (!exchange.source.empty()) std::memcpy(exchange.target.data(), exchange.source.data(), exchange.source.size());
  exchange.phase.store(Phase::copied);
  seat(exchange.from).parking.wake();
  seat(exchange.to).parking.wake();
}

void Hub::require_agreement(const Exchange& exchange) {
  if (exchange.phase.load() != Phase::broken) return;
  throw ContractError(fmt::format("rank {} sends {} bytes to rank {}, which expects {}{}", exchange.from, exchange.source.size(),
                                  exchange.to, exchange.target.size(),
                                  exchange.send_mark == exchange.receive_mark ? "" : " of another operation"));
}

bool Hub::test(Exchange& exchange, bool sends) {
  require_agreement(exchange);
  try_copy(exchange);
  return exchange.phase.load() == Phase::copied && (!model_ || Timeline::now_ns() >= complete_ns(exchange, sends));
}

void Hub::wait_until_copied(const Exchange& exchange, int rank) {
  (void)seat(rank).parking.wait([&] { return exchange.phase.load() == Phase::copied; }, kNoDeadline, world_->patience(true));
}

bool Hub::wait(Exchange& exchange, int rank, std::uint32_t channel, bool sends, Clock::time_point deadline) {
  const std::int64_t began_ns = Timeline::now_ns();
  // Where a link makes messages slow there is nothing to be gained by looking often.
  const Patience patience = model_ ? Patience{} : world_->patience(true);
  const auto ready = [&] { return exchange.phase.load() != Phase::half || world_->failed(); };
  (void)seat(rank).parking.wait(ready, deadline, patience);
  if (exchange.phase.load() == Phase::half) return false;
  require_agreement(exchange);
  try_copy(exchange);
  wait_until_copied(exchange, rank);
  if (!model_) return true;

  const std::int64_t due_ns = complete_ns(exchange, sends);
  for (std::int64_t now_ns = Timeline::now_ns(); now_ns < due_ns; now_ns = Timeline::now_ns()) {
    if (world_->failed() || now_ns >= to_ns(deadline)) return false;
    sleep_until(std::min({due_ns, now_ns + kLook_ns, to_ns(deadline)}));
  }
  const std::scoped_lock lock(mutex_);
  clock(rank, channel).waited(due_ns, began_ns, Timeline::now_ns());
  return true;
}

void Hub::cancel(const Shared& exchange, std::uint32_t channel) noexcept {
  {
    const std::scoped_lock lock(mutex_);
    if (exchange->phase.load() == Phase::half) {
      std::erase(queue(exchange->from, exchange->to, channel), exchange);
      return;
    }
  }
  if (exchange->phase.load() == Phase::broken) return;
  try_copy(*exchange);
  wait_until_copied(*exchange, exchange->from);
}

class ThreadsTransfer final : public Transfer {
 public:
  ThreadsTransfer(std::shared_ptr<Hub> hub, Shared exchange, std::uint32_t channel, bool sends)
      : hub_(std::move(hub)), exchange_(std::move(exchange)), channel_(channel), sends_(sends) {}
  ~ThreadsTransfer() override { cancel(); }

  [[nodiscard]] bool test() override { return hub_->test(*exchange_, sends_); }
  [[nodiscard]] bool wait(Clock::time_point deadline) override {
    return hub_->wait(*exchange_, sends_ ? exchange_->from : exchange_->to, channel_, sends_, deadline);
  }
  void cancel() noexcept override {
    if (exchange_->phase.load() != Phase::copied) hub_->cancel(exchange_, channel_);
  }

 private:
  const std::shared_ptr<Hub> hub_;
  const Shared exchange_;
  const std::uint32_t channel_;
  const bool sends_;
};

class ThreadsWire final : public Wire {
 public:
  ThreadsWire(std::shared_ptr<Hub> hub, int rank) : hub_(std::move(hub)), rank_(rank) {}

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int ranks() const noexcept override { return hub_->ranks(); }
  [[nodiscard]] std::unique_ptr<Transfer> send(int to, std::uint32_t channel, std::uint64_t mark,
                                               std::span<const std::byte> bytes) override {
    return std::make_unique<ThreadsTransfer>(hub_, hub_->post_send(rank_, to, channel, mark, bytes), channel, true);
  }
  [[nodiscard]] std::unique_ptr<Transfer> receive(int from, std::uint32_t channel, std::uint64_t mark,
                                                  std::span<std::byte> bytes) override {
    return std::make_unique<ThreadsTransfer>(hub_, hub_->post_receive(from, rank_, channel, mark, bytes), channel, false);
  }
  void begin_collective(std::uint32_t channel, std::int64_t issued_ns) override {
    hub_->begin_collective(rank_, channel, issued_ns);
  }

 private:
  const std::shared_ptr<Hub> hub_;
  const int rank_;
};

}  // namespace

std::vector<std::unique_ptr<Wire>> make_threads_wires(const std::shared_ptr<WorldState>& world,
                                                      const std::optional<LinkProfile>& link) {
  const auto hub = std::make_shared<Hub>(world, link);
  world->add_sleepers(hub);
  std::vector<std::unique_ptr<Wire>> wires;
  for (int rank = 0; rank < world->ranks(); ++rank) wires.push_back(std::make_unique<ThreadsWire>(hub, rank));
  return wires;
}

}  // namespace tandem
