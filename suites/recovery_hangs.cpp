// SPDX-License-Identifier: Apache-2.0
// A hang is a failure: whatever operation a rank does not join, all others leave it and say who, what and which.
#include <chrono>
#include <exception>
#include <functional>
#include <latch>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "optimized/comm/world.h"
#include "suites/recovery_cases.h"

namespace tandem {
namespace {

constexpr int kRanks = 3;
constexpr int kMissing = 1;
constexpr std::chrono::milliseconds kDeadline{250};

struct CommOperation {
  std::string name;  // as error texts say it
  std::function<void(Communicator&)> call;
  bool is_message = false;  // between the missing rank and rank 0
};

// Buffers of one call.
struct Buffers {
  std::vector<float> input = std::vector<float>(6, 1.0F), output = std::vector<float>(6);
  std::vector<std::int64_t> counts = {2, 2, 2};
  [[nodiscard]] TensorView in(std::int64_t size) { return {input.data(), DType::f32, {size}}; }
  [[nodiscard]] TensorView out(std::int64_t size) { return {output.data(), DType::f32, {size}}; }
};

std::vector<CommOperation> comm_operations() {
  const auto with_buffers = [](const std::function<Work(Communicator&, Buffers&)>& call) {
    return [call](Communicator& comm) {
      Buffers buffers;
      call(comm, buffers).wait_host();
    };
  };
  return {{"all_reduce", with_buffers([](Communicator& c, Buffers& b) { return c.all_reduce(b.in(6), {.name = "x"}); })},
          {"reduce_scatter", with_buffers([](Communicator& c, Buffers& b) {
             return c.reduce_scatter(b.in(6), b.out(2), b.counts, {.name = "x"});
           })},
          {"all_gather",
           with_buffers([](Communicator& c, Buffers& b) { return c.all_gather(b.in(2), b.out(6), b.counts, {.name = "x"}); })},
          {"all_to_all", with_buffers([](Communicator& c, Buffers& b) {
             return c.all_to_all(b.in(6), b.counts, b.out(6), b.counts, {.name = "x"});
           })},
          {"broadcast", with_buffers([](Communicator& c, Buffers& b) { return c.broadcast(b.in(6), kMissing, {.name = "x"}); })},
          {"barrier", [](Communicator& c) { c.barrier(); }},
          {"split", [](Communicator& c) { (void)c.split(0, c.rank()); }},
          {"send", with_buffers([](Communicator& c, Buffers& b) { return c.send(b.in(6), kMissing, {}, {.name = "x"}); }), true},
          {"recv", with_buffers([](Communicator& c, Buffers& b) { return c.recv(b.in(6), kMissing, {}, {.name = "x"}); }), true}};
}

struct HangTally {
  double kept = 0, others = 0, late = 0, unnamed = 0;
  std::string text;  // the first that lacks something
};

void note_text(const CommOperation& operation, const std::string& text, double seconds, HangTally& tally) {
  ++tally.others;
  tally.late += seconds > 20 * std::chrono::duration<double>(kDeadline).count() ? 1 : 0;
  const auto says = [&](const std::string& part) { return text.find(part) != std::string::npos; };
  // The missing rank has joined one collective before.
  const bool named = says(fmt::format("rank {}", kMissing)) && says(operation.name) && says("no. 1 of");
  if (named) return;
  ++tally.unnamed;
  if (tally.text.empty()) tally.text = text;
}

// However it ends, nobody waits for it any longer.
struct CountDown {
  std::latch* latch;
  ~CountDown() {
    if (latch != nullptr) latch->count_down();
  }
};

// One rank does not come. The others must be out before it moves again.
void let_hang(const CommOperation& operation, const WorldOptions& world, std::mutex& mutex, HangTally& tally) {
  std::latch others_know(operation.is_message ? 1 : kRanks - 1);
  run_world(world, [&](Communicator& comm) {
    const bool joins = comm.rank() == 0 || (comm.rank() != kMissing && !operation.is_message);
    const CountDown at_end{joins ? &others_know : nullptr};
    comm.barrier();
    if (!joins) return others_know.wait();
    const auto begin = std::chrono::steady_clock::now();
    std::string text = "left without an error";
    try {
      operation.call(comm);
    } catch (const TimeoutError& error) {
      text = error.what();
    } catch (const PeerError& error) {
      text = error.what();
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const std::scoped_lock lock(mutex);
    note_text(operation, text, seconds, tally);
  });
}

Case collectives_case() {
  Case result = recovery_case("hang/operations",
                              "a rank that does not join an operation: all others leave it and name rank, operation and number",
                              {.degrees = {.data = kRanks}});
  result.execute = [](const RunContext& context) {
    CaseEvidence evidence;
    WorldSettings messages;
    messages.link = read_link_profile("unshaped");
    for (const bool over_messages : {false, true}) {
      const WorldOptions world = {.ranks = kRanks,
                                  .deadline = kDeadline,
                                  .settings = over_messages ? messages : WorldSettings(),
                                  .bind_cores = false,
                                  .pitfalls = context.pitfalls};
      const std::string way = over_messages ? "messages" : "shared memory";
      HangTally tally;
      double expected = 0;
      std::mutex mutex;
      std::vector<std::jthread> worlds;  // at once: they do nothing but wait
      const std::vector<CommOperation> operations = comm_operations();
      for (const CommOperation& operation : operations) {
        expected += operation.is_message ? 1 : kRanks - 1;
        worlds.emplace_back([&] {
          try {
            let_hang(operation, world, mutex, tally);
          } catch (const std::exception& error) {  // then a rank is missing from those that left
            const std::scoped_lock lock(mutex);
            tally.text = error.what();
          }
        });
      }
      worlds.clear();
      evidence.properties.push_back({fmt::format("ranks_that_left ({})", way), tally.others, Relation::equal, expected,
                                     "of nine kinds of operation", -1, ""});
      evidence.properties.push_back({fmt::format("left_late ({})", way), tally.late, Relation::equal, 0.0,
                                     "a deadline of 250 ms; twenty of them on a busy machine", -1, ""});
      evidence.properties.push_back({fmt::format("not_named ({})", way), tally.unnamed, Relation::equal, 0.0,
                                     fmt::format("rank, operation, and the last that the rank had joined; {}", tally.text), -1,
                                     ""});
    }
    return evidence;
  };
  return result;
}

}  // namespace

void add_recovery_hang_cases(CaseList& cases) { cases.push_back(collectives_case()); }

}  // namespace tandem
