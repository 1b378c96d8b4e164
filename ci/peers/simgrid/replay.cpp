// SPDX-License-Identifier: Apache-2.0
// Plays a step in SimGrid: an actor for each rank works through the program of its pipeline stage, messages are flows over ports
// and share them as SimGrid has it, collectives are flows of their own. Nothing of tandem's own times of communication is used.
//
//   simgrid_replay FILE [--cfg=...]    prints: ranks, predicted seconds, simulated seconds, messages
//
// Each level of links is a star of its own, to which each rank has a port of its own, full duplex.
#include <algorithm>
#include <cstdio>
#include <deque>
#include <exception>
#include <memory>
#include <unordered_map>

#include <simgrid/s4u.hpp>

#include "schedule.h"

namespace sg4 = simgrid::s4u;

namespace {

// Payloads below this go up and down a tree: a ring of a thousand ranks would take its latency a thousand times.
constexpr double kTreeBytes = 65536;
// Steps of a ring that a receiver has room for. With one, each waits for the latency of the one before; with many, a ring that is
// a little late puts so many flows on a port at once that it takes the share of those that are not.
constexpr int kSlots = 2;

std::size_t at(int index) { return static_cast<std::size_t>(index); }

// Messages between ranks: each is under way from when it is sent, whoever waits for it or not.
class Network {
 public:
  explicit Network(const StepSchedule& schedule) : schedule_(schedule) {
    auto* root = sg4::create_full_zone("root");
    for (std::size_t level = 0; level < schedule.levels.size(); ++level) add_star(root, level);
    root->seal();
  }

  // `lane` tells apart what goes on between two ranks at the same time.
  void send(int from, int to, std::int64_t lane, double bytes) {
    const auto level = at(schedule_.level_between(from, to));
    Inbox& inbox = inbox_of(from, to, lane);
    const double size = std::max(1.0, bytes);
    inbox.sent.push_back(
        sg4::Comm::sendto_async(hosts_[level][at(from)], hosts_[level][at(to)], static_cast<std::uint64_t>(size)));
    ++messages_;
    inbox.waiting->release();
  }
  // What belongs to a collective does not leave before its receiver has come to the same step: nothing piles up at a late rank's
  // port.
  void expect(int from, int to, std::int64_t lane) { inbox_of(from, to, lane).expected->release(); }
  void send_expected(int from, int to, std::int64_t lane, double bytes) {
    inbox_of(from, to, lane).expected->acquire();
    send(from, to, lane, bytes);
  }
  void receive(int from, int to, std::int64_t lane) {
    Inbox& inbox = inbox_of(from, to, lane);
    inbox.waiting->acquire();
    const sg4::CommPtr comm = inbox.sent.front();
    inbox.sent.pop_front();
    comm->wait();
  }
  [[nodiscard]] sg4::Host* home_of(int rank) const { return hosts_[0][at(rank)]; }
  [[nodiscard]] std::int64_t messages() const { return messages_; }

 private:
  struct Inbox {
    std::deque<sg4::CommPtr> sent;
    sg4::SemaphorePtr waiting = sg4::Semaphore::create(0), expected = sg4::Semaphore::create(0);
  };

  void add_star(sg4::NetZone* root, std::size_t number) {
    const StepLevel& level = schedule_.levels[number];
    const std::string prefix = "l" + std::to_string(number) + "-";
    auto* star = sg4::create_star_zone(prefix + "star");
    star->set_parent(root);
    auto& hosts = hosts_.emplace_back();
    for (int rank = 0; rank < schedule_.ranks; ++rank) {
      const std::string name = prefix + std::to_string(rank);
      hosts.push_back(star->create_host(name, 1e9));
      // A route has two ports, each with half of the latency.
      auto* port = star->create_split_duplex_link(name + "-port", level.bytes_per_second)->set_latency(level.latency_seconds / 2);
      port->seal();
      star->add_route(hosts.back()->get_netpoint(), nullptr, nullptr, nullptr,
                      {sg4::LinkInRoute(port, sg4::LinkInRoute::Direction::UP)}, true);
    }
    star->seal();
  }

  Inbox& inbox_of(int from, int to, std::int64_t lane) {
    const std::int64_t key = (lane * schedule_.ranks + from) * schedule_.ranks + to;
    auto& inbox = inboxes_[key];
    if (!inbox) inbox = std::make_unique<Inbox>();
    return *inbox;
  }

  const StepSchedule& schedule_;
  std::vector<std::vector<sg4::Host*>> hosts_;  // [levels][ranks]
  std::unordered_map<std::int64_t, std::unique_ptr<Inbox>> inboxes_;
  std::int64_t messages_ = 0;
};

// One group's collectives, as one of its ranks takes part in them.
class Collectives {
 public:
  static constexpr std::int64_t kLanesOfAxis = 64;

  Collectives(Network& network, const StepSchedule& schedule, const std::string& axis, std::int64_t first_lane, int rank)
      : network_(network), schedule_(schedule), members_(schedule.group_of(axis, rank)), rank_(rank), first_lane_(first_lane) {
    std::sort(members_.begin(), members_.end());  // those of a node next to each other
    in_node_ = members_in_node();
  }

  void run(const StepLine& line) {
    if (members_.size() <= 1) return;
    const bool spans_levels = in_node_ > 1 && at(in_node_) < members_.size();
    if (line.collective == "all_to_all") {
      exchange(line.bytes / count());
    } else if (line.collective == "ring_shift") {
      rings(1, line.bytes, 1);
    } else if (line.collective == "all_reduce" && spans_levels && line.bytes < kTreeBytes) {
      tree(line.bytes);
    } else {
      const int rounds = line.collective == "all_reduce" ? 2 : 1;
      rings(rounds * (static_cast<int>(members_.size()) - 1), line.bytes / count(), in_node_);
    }
  }

 private:
  [[nodiscard]] double count() const { return static_cast<double>(members_.size()); }

  // Of the fullest node.
  [[nodiscard]] int members_in_node() const {
    int most = 1, run = 1;
    for (std::size_t i = 1; i < members_.size(); ++i) {
      run = schedule_.level_between(members_[i - 1], members_[i]) == 0 ? run + 1 : 1;
      most = std::max(most, run);
    }
    return at(most) == members_.size() ? 1 : most;
  }

  // Rings that leave each node by another device, so that all its ports are used: each node's members turned by one more.
  [[nodiscard]] std::vector<int> ring(int turn) const {
    std::vector<int> order = members_;
    for (auto first = order.begin(); first != order.end();) {
      const int head = *first;
      const auto last = std::find_if(first, order.end(), [&](int other) { return schedule_.level_between(head, other) != 0; });
      std::rotate(first, first + turn % (last - first), last);
      first = last;
    }
    return order;
  }

  void steps_of(int turn, int steps, double bytes) {
    const std::vector<int> order = ring(turn);
    const auto here = static_cast<std::size_t>(std::find(order.begin(), order.end(), rank_) - order.begin());
    const int next = order[(here + 1) % order.size()], previous = order[(here + order.size() - 1) % order.size()];
    const std::int64_t lane = first_lane_ + turn;
    for (int step = 0; step < std::min(steps, kSlots); ++step) network_.expect(previous, rank_, lane);
    for (int step = 0; step < steps; ++step) {
      network_.send_expected(rank_, next, lane, bytes);
      network_.receive(previous, rank_, lane);
      if (step + kSlots < steps) network_.expect(previous, rank_, lane);
    }
  }

  void rings(int steps, double bytes, int number) {
    std::vector<sg4::ActorPtr> others;
    for (int turn = 1; turn < number; ++turn) {
      others.push_back(sg4::Actor::create("ring", network_.home_of(rank_), [=, this] { steps_of(turn, steps, bytes / number); }));
    }
    steps_of(0, steps, bytes / number);
    for (const sg4::ActorPtr& other : others) other->join();
  }

  // Every pair its own message, at once.
  void exchange(double bytes) {
    for (const int other : members_) {
      if (other != rank_) network_.expect(other, rank_, first_lane_);
    }
    for (const int other : members_) {
      if (other != rank_) network_.send_expected(rank_, other, first_lane_, bytes);
    }
    for (const int other : members_) {
      if (other != rank_) network_.receive(other, rank_, first_lane_);
    }
  }

  // Along the members of a node to its first, between the first ones up a binomial tree, and back.
  void tree(double bytes) {
    std::vector<int> node, heads;
    for (const int member : members_) {
      if (schedule_.level_between(member, rank_) == 0) node.push_back(member);
      const bool is_head = heads.empty() || schedule_.level_between(heads.back(), member) != 0;
      if (is_head) heads.push_back(member);
    }
    const auto place = static_cast<std::size_t>(std::find(node.begin(), node.end(), rank_) - node.begin());
    if (place + 1 < node.size()) network_.receive(node[place + 1], rank_, first_lane_);
    if (place > 0) {
      network_.send(rank_, node[place - 1], first_lane_, bytes);
      network_.receive(node[place - 1], rank_, first_lane_);
    } else {
      between_nodes(heads, bytes);
    }
    if (place + 1 < node.size()) network_.send(rank_, node[place + 1], first_lane_, bytes);
  }

  void between_nodes(const std::vector<int>& heads, double bytes) {
    const auto here = static_cast<std::size_t>(std::find(heads.begin(), heads.end(), rank_) - heads.begin());
    std::size_t distance = 1;
    for (; distance < heads.size() && here % (2 * distance) == 0; distance *= 2) {
      if (here + distance < heads.size()) network_.receive(heads[here + distance], rank_, first_lane_);
    }
    if (here > 0) {
      network_.send(rank_, heads[here - distance], first_lane_, bytes);
      network_.receive(heads[here - distance], rank_, first_lane_);
    }
    for (distance /= 2; distance > 0; distance /= 2) {
      if (here + distance < heads.size()) network_.send(rank_, heads[here + distance], first_lane_, bytes);
    }
  }

  Network& network_;
  const StepSchedule& schedule_;
  std::vector<int> members_;
  int rank_, in_node_ = 1;
  std::int64_t first_lane_;
};

// A rank's program. What goes on in the background is carried out by an actor of its axis, one operation after the other.
class Rank {
 public:
  Rank(Network& network, const StepSchedule& schedule, int rank, double& last_end)
      : network_(network), schedule_(schedule), rank_(rank), last_end_(last_end) {
    std::int64_t lane = 1;
    for (const auto& [axis, groups] : schedule.groups) {
      axes_.emplace(axis, Axis{Collectives(network, schedule, axis, lane, rank), {}, sg4::Semaphore::create(0), {}});
      lane += Collectives::kLanesOfAxis;
    }
  }

  void operator()() {
    for (const StepLine& line : schedule_.programs.at(at(schedule_.stage_of(rank_)))) run(line);
    for (auto& [axis, state] : axes_) {
      if (!state.worker) continue;
      push(state, nullptr, nullptr);
      state.worker->join();
    }
    last_end_ = std::max(last_end_, sg4::Engine::get_clock());
  }

 private:
  struct Job {
    const StepLine* line = nullptr;  // null: there will be no more
    sg4::SemaphorePtr done;
  };
  struct Axis {
    Collectives collectives;
    std::deque<Job> jobs;
    sg4::SemaphorePtr num_jobs;
    sg4::ActorPtr worker;
  };

  void run(const StepLine& line) {
    switch (line.kind) {
      case StepLine::Kind::compute: sg4::this_actor::sleep_for(line.seconds); break;
      case StepLine::Kind::send: network_.send(rank_, peer(line), 0, line.bytes); break;
      case StepLine::Kind::receive: network_.receive(peer(line), rank_, 0); break;
      case StepLine::Kind::collective: {
        Axis& axis = axes_.at(line.axis);
        // A group carries its operations out in order, those in the background too.
        if (axis.worker) {
          issue(axis, line)->acquire();
        } else {
          axis.collectives.run(line);
        }
        break;
      }
      case StepLine::Kind::background: under_way_.push_back(issue(axes_.at(line.axis), line)); break;
      case StepLine::Kind::wait: under_way_.at(at(line.number))->acquire(); break;
    }
  }

  [[nodiscard]] int peer(const StepLine& line) const { return schedule_.group_of("pipeline", rank_).at(at(line.number)); }

  sg4::SemaphorePtr issue(Axis& axis, const StepLine& line) {
    if (!axis.worker) axis.worker = sg4::Actor::create("background", network_.home_of(rank_), [&axis] { work(axis); });
    const sg4::SemaphorePtr done = sg4::Semaphore::create(0);
    push(axis, &line, done);
    return done;
  }
  static void push(Axis& axis, const StepLine* line, const sg4::SemaphorePtr& done) {
    axis.jobs.push_back({line, done});
    axis.num_jobs->release();
  }
  static void work(Axis& axis) {
    while (true) {
      axis.num_jobs->acquire();
      const Job job = axis.jobs.front();
      axis.jobs.pop_front();
      if (job.line == nullptr) return;
      axis.collectives.run(*job.line);
      job.done->release();
    }
  }

  Network& network_;
  const StepSchedule& schedule_;
  int rank_;
  double& last_end_;
  std::map<std::string, Axis> axes_;
  std::vector<sg4::SemaphorePtr> under_way_;  // in the order in which they were issued
};

}  // namespace

int main(int argc, char** argv) {
  sg4::Engine engine(&argc, argv);
  if (argc != 2) {
    std::fprintf(stderr, "usage: simgrid_replay FILE [--cfg=...]\n");
    return 2;
  }
  try {
    const StepSchedule schedule = read_schedule(argv[1]);
    Network network(schedule);
    std::vector<std::unique_ptr<Rank>> ranks;
    double end = 0;
    for (int rank = 0; rank < schedule.ranks; ++rank) ranks.push_back(std::make_unique<Rank>(network, schedule, rank, end));
    for (int rank = 0; rank < schedule.ranks; ++rank) {
      sg4::Actor::create("rank", network.home_of(rank), [&ranks, rank] { (*ranks[at(rank)])(); });
    }
    engine.run();
    std::printf("%d %.17g %.17g %lld\n", schedule.ranks, schedule.predicted_seconds, end,
                static_cast<long long>(network.messages()));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "simgrid_replay: %s\n", error.what());
    return 1;
  }
  return 0;
}
