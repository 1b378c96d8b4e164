// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/pitfall.h"
#include "optimized/collectives/peers.h"
#include "optimized/comm/messages/link_model.h"

namespace tandem::collectives_test {

/// Messages between threads: a send is a copy in a queue, a receive takes the next one of the pair. Insists on equal sizes at
/// both ends.
class Post {
 public:
  struct Message {
    std::vector<std::byte> bytes;
    LinkModel::Departure departure;
    bool taken = false;
  };

  std::shared_ptr<Message> put(int from, int to, std::span<const std::byte> bytes, const LinkModel::Departure& departure) {
    const std::scoped_lock lock(mutex_);
    auto& queue = queues_[{from, to}];
    queue.push_back(std::make_shared<Message>(Message{{bytes.begin(), bytes.end()}, departure}));
    changed_.notify_all();
    return queue.back();
  }
  /// Waits for the next message of the pair.
  LinkModel::Departure take(int from, int to, std::span<std::byte> bytes) {
    std::unique_lock lock(mutex_);
    auto& queue = queues_[{from, to}];
    changed_.wait(lock, [&] { return !queue.empty() || broken_; });
    if (queue.empty()) throw std::runtime_error("another rank failed");
    const std::shared_ptr<Message> message = queue.front();
    queue.pop_front();
    if (message->bytes.size() != bytes.size()) {
      throw std::runtime_error("message of " + std::to_string(message->bytes.size()) + " bytes, expected " +
                               std::to_string(bytes.size()));
    }
    if (!bytes.empty()) std::memcpy(bytes.data(), message->bytes.data(), bytes.size());
    message->taken = true;
    changed_.notify_all();
    return message->departure;
  }
  void wait_until_taken(const Message& message) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return message.taken || broken_; });
    if (!message.taken) throw std::runtime_error("another rank failed");
  }
  void break_off() {
    const std::scoped_lock lock(mutex_);
    broken_ = true;
    changed_.notify_all();
  }
  [[nodiscard]] bool empty() const {
    for (const auto& [pair, queue] : queues_) {
      if (!queue.empty()) return false;
    }
    return true;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Message>>> queues_;
  bool broken_ = false;
};

/// A receive spoils its bytes when it starts and fills them when it is waited for. A send reads its bytes when its rank waits for
/// anything, is complete when the receiver has taken it, and insists then that nobody has changed them. Whoever uses or changes
/// bytes too early fails on every run.
///
/// With a link, every rank also has a clock that shows the time of the link's model (optimized/comm/messages/link_model.h).
class ThreadPeers final : public Peers {
 public:
  ThreadPeers(Post& post, int rank, std::vector<int> nodes, PitfallSet pitfalls = {})
      : post_(&post), rank_(rank), nodes_(std::move(nodes)), pitfalls_(pitfalls) {}

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return static_cast<int>(nodes_.size()); }
  [[nodiscard]] int node(int rank) const noexcept override { return nodes_[static_cast<std::size_t>(rank)]; }

  [[nodiscard]] Ticket send(int to, std::span<const std::byte> bytes) override {
    bytes_sent_ += static_cast<std::int64_t>(bytes.size());
    LinkModel::Departure departure;
    if (link_ != nullptr) departure = link_->depart(rank_, to, std::ssize(bytes), now_ns_);
    sends_[next_] = {to, bytes, departure, {}};
    return next_++;
  }
  [[nodiscard]] Ticket receive(int from, std::span<std::byte> bytes) override {
    if (!bytes.empty()) std::memset(bytes.data(), 0xA5, bytes.size());
    receives_[next_] = {from, bytes};
    return next_++;
  }
  void wait(Ticket ticket) override {
    for (auto& [number, outgoing] : sends_) {
      if (!outgoing.message) outgoing.message = post_->put(rank_, outgoing.to, outgoing.bytes, outgoing.departure);
    }
    const auto send = sends_.find(ticket);
    if (send == sends_.end()) return take_up_to(ticket);
    take_up_to(next_);
    post_->wait_until_taken(*send->second.message);
    now_ns_ = std::max(now_ns_, send->second.departure.left_ns);
    if (!std::ranges::equal(send->second.message->bytes, send->second.bytes)) {
      throw std::runtime_error("bytes changed while being sent");
    }
    sends_.erase(send);
  }
  [[nodiscard]] std::span<std::byte> scratch(std::int64_t bytes) override {
    scratch_.assign(static_cast<std::size_t>(bytes), std::byte{0x5A});
    return scratch_;
  }
  [[nodiscard]] bool planted(Pitfall pitfall) const noexcept override { return pitfalls_.on(pitfall); }

  /// Shared by all ranks, of which each touches its own ports.
  void set_link(LinkModel& link) { link_ = &link; }
  [[nodiscard]] double clock_seconds() const { return static_cast<double>(now_ns_) / 1e9; }

  [[nodiscard]] std::int64_t bytes_sent() const { return bytes_sent_; }
  [[nodiscard]] bool idle() const { return sends_.empty() && receives_.empty(); }

 private:
  struct Outgoing {
    int to;
    std::span<const std::byte> bytes;
    LinkModel::Departure departure;
    std::shared_ptr<Post::Message> message;  ///< once it is under way
  };
  struct Incoming {
    int from;
    std::span<std::byte> bytes;
  };

  // Receives what was posted before, or is, this ticket, in that order: a message that another rank waits for to arrive is not
  // held up by what this one waits for.
  void take_up_to(Ticket ticket) {
    while (!receives_.empty() && receives_.begin()->first <= ticket) {
      const Incoming incoming = receives_.begin()->second;
      const LinkModel::Departure departure = post_->take(incoming.from, rank_, incoming.bytes);
      if (link_ != nullptr) {
        now_ns_ = std::max(now_ns_, link_->arrive(incoming.from, rank_, std::ssize(incoming.bytes), departure));
      }
      receives_.erase(receives_.begin());
    }
  }

  Post* post_;
  int rank_;
  std::vector<int> nodes_;
  PitfallSet pitfalls_;
  Ticket next_ = 0;
  std::map<Ticket, Outgoing> sends_;
  std::map<Ticket, Incoming> receives_;
  std::vector<std::byte> scratch_;
  std::int64_t bytes_sent_ = 0;
  LinkModel* link_ = nullptr;
  std::int64_t now_ns_ = 0;
};

/// Runs `body` on a thread per rank, rethrows what the first rank threw, and fails where a message was left over.
inline void run_peers(const std::vector<int>& nodes, const std::function<void(ThreadPeers&)>& body, PitfallSet pitfalls = {}) {
  Post post;
  std::mutex mutex;
  std::exception_ptr failure;
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < static_cast<int>(nodes.size()); ++rank) {
      threads.emplace_back([&, rank] {
        try {
          ThreadPeers peers(post, rank, nodes, pitfalls);
          body(peers);
          if (!peers.idle()) throw std::runtime_error("a message was not waited for");
        } catch (...) {
          const std::scoped_lock lock(mutex);
          if (!failure) failure = std::current_exception();
          post.break_off();
        }
      });
    }
  }
  if (failure) std::rethrow_exception(failure);
  if (!post.empty()) throw std::runtime_error("a message was sent that nobody received");
}

/// Nodes of so many ranks each: {2, 1} -> {0, 0, 1}.
inline std::vector<int> nodes_of(const std::vector<int>& sizes) {
  std::vector<int> nodes;
  for (std::size_t node = 0; node < sizes.size(); ++node)
    nodes.insert(nodes.end(), static_cast<std::size_t>(sizes[node]), static_cast<int>(node));
  return nodes;
}

}  // namespace tandem::collectives_test
