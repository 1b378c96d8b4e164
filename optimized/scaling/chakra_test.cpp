// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/chakra.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "core/io/test_folder.h"
#include "core/process_grid.h"
#include "optimized/engine/lower.h"

namespace tandem {
namespace {

std::uint64_t take_varint(std::string_view& bytes) {
  std::uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    if (bytes.empty()) throw InputError("a varint is cut off");
    const auto byte = static_cast<unsigned char>(bytes.front());
    bytes.remove_prefix(1);
    value |= static_cast<std::uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return value;
  }
}

std::string_view take(std::string_view& bytes, std::uint64_t size) {
  if (size > bytes.size()) throw InputError("a message is cut off");
  const std::string_view taken = bytes.substr(0, size);
  bytes.remove_prefix(size);
  return taken;
}

// Fields by number: numbers, and what has a length.
struct Message {
  std::map<int, std::uint64_t> numbers;
  std::multimap<int, std::string> parts;

  explicit Message(std::string_view bytes) {
    while (!bytes.empty()) {
      const std::uint64_t key = take_varint(bytes);
      if (key % 8 == 0) {
        numbers[static_cast<int>(key / 8)] = take_varint(bytes);
      } else if (key % 8 == 2) {
        const std::uint64_t size = take_varint(bytes);
        parts.emplace(static_cast<int>(key / 8), take(bytes, size));
      } else {
        throw InputError("a wire type that is not written");
      }
    }
  }
  [[nodiscard]] std::string text(int field) const { return parts.find(field)->second; }
};

enum Type : std::uint8_t { kCompute = 4, kSend = 5, kReceive = 6, kCollective = 7 };

struct Node {
  std::uint64_t id = 0;
  int type = 0;
  double micros = 0;
  std::vector<std::uint64_t> after;
  std::map<std::string, std::int64_t> attributes;
  std::string group;

  explicit Node(std::string_view bytes) {
    const Message message(bytes);
    id = message.numbers.at(1);
    type = static_cast<int>(message.numbers.at(3));
    micros = static_cast<double>(message.numbers.at(7));
    if (message.parts.contains(5)) {
      const std::string packed = message.text(5);
      for (std::string_view rest = packed; !rest.empty();) after.push_back(take_varint(rest));
    }
    const auto [first, last] = message.parts.equal_range(10);
    for (auto part = first; part != last; ++part) {
      const Message attribute(part->second);
      for (const auto& [field, value] : attribute.numbers) attributes[attribute.text(1)] = static_cast<std::int64_t>(value);
      if (attribute.parts.contains(29)) group = attribute.text(29);
    }
  }
};

std::vector<Node> read_trace(const std::filesystem::path& file) {
  const std::string text = TestFolder::read(file);
  std::string_view rest = text;
  EXPECT_EQ(Message(take(rest, take_varint(rest))).text(1), "0.0.4");
  std::vector<Node> nodes;
  while (!rest.empty()) {
    const std::uint64_t size = take_varint(rest);
    nodes.emplace_back(take(rest, size));
  }
  return nodes;
}

// What a rank waits for has its own time, in whole microseconds.
double cost_of(const Operation& op, int stage) {
  if (op.kind == OpKind::gradient_norm) return 0;
  if (op.kind == OpKind::communicate) return 1e-6 * static_cast<double>(3 + op.bytes % 11);
  return op.part == Part::norm_2 ? 0 : 1e-6 * (5 + stage + (op.phase == Phase::forward ? 0 : 4));
}

struct Written {
  TestFolder folder;
  TrainingPlan plan;
  GptConfig model;
  std::vector<StepProgram> programs;
  ChakraFiles files;
  std::vector<std::vector<Node>> traces;

  explicit Written(TrainingPlan of, const GptConfig& config = {}) : plan(std::move(of)), model(config) {
    // Slices of the tokens that are not of one size.
    const std::int64_t sequence = plan.parallel.context > 1 ? model.sequence - 3 : model.sequence;
    for (int rank = 0; rank < plan.parallel.world_size(); ++rank) programs.push_back(lower(plan, model, sequence, rank));
    files = write_chakra([&](int rank) { return programs[static_cast<std::size_t>(rank)]; }, plan, cost_of, folder / "step");
    for (const std::filesystem::path& file : files.traces) traces.push_back(read_trace(file));
  }
};

TrainingPlan plan_of(const ParallelDegrees& degrees, int micro_batches) {
  TrainingPlan plan;
  plan.parallel = degrees;
  plan.batch = {8, micro_batches};
  return plan;
}

std::vector<TrainingPlan> plans() {
  TrainingPlan pipeline = plan_of({.data = 2, .tensor = 2, .pipeline = 2}, 4);
  pipeline.overlap.gradients = true;
  pipeline.buckets.bucket_bytes = 100000;
  TrainingPlan ring = plan_of({.data = 2, .context = 4}, 2);
  TrainingPlan sharded = plan_of({.data = 4, .pipeline = 2}, 2);
  sharded.zero_stage = 3;
  sharded.pipeline.schedule = "zb-h1";
  TrainingPlan chunks = plan_of({.tensor = 2, .pipeline = 2}, 4);
  chunks.pipeline.chunks = 2;
  chunks.sequence_parallel = true;
  chunks.overlap.tensor_chunks = 2;
  return {pipeline, ring, sharded, chunks};
}

GptConfig model_of_four_layers() {
  GptConfig model;
  model.layers = 4;
  return model;
}

// Made once: each file is flushed to the disk.
const Written& traces_of(std::size_t plan) {
  static std::map<std::size_t, std::unique_ptr<Written>> made;
  auto& of_plan = made[plan];
  if (!of_plan) of_plan = std::make_unique<Written>(plans()[plan], model_of_four_layers());
  return *of_plan;
}
constexpr std::size_t kPlans = 4;

TEST(Chakra, HasANodeForAllThatTakesTime) {
  for (std::size_t i = 0; i < kPlans; ++i) {
    const Written& written = traces_of(i);
    std::int64_t nodes = 0;
    for (std::size_t rank = 0; rank < written.programs.size(); ++rank) {
      std::map<int, int> expected;
      std::int64_t bytes = 0;
      double micros = 0;
      for (const Operation& op : written.programs[rank]) {
        if (op.kind == OpKind::communicate) {
          const bool shifts = op.collective == Collective::ring_shift;
          if (shifts || op.collective == Collective::send) ++expected[kSend];
          if (shifts || op.collective == Collective::recv) ++expected[kReceive];
          if (!shifts && op.collective != Collective::send && op.collective != Collective::recv) ++expected[kCollective];
          if (op.collective == Collective::all_reduce) bytes += op.bytes;
        } else if (op.kind == OpKind::optimizer || (op.kind == OpKind::compute && op.part != Part::norm_2)) {
          ++expected[kCompute];
          micros += 1e6 * cost_of(op, ProcessGrid(written.plan).coordinates(static_cast<int>(rank)).pipeline);
        }
      }
      std::map<int, int> found;
      for (const Node& node : written.traces[rank]) {
        ++found[node.type];
        if (node.type == kCollective && node.attributes.at("comm_type") == 0) bytes -= node.attributes.at("comm_size");
        if (node.type == kCompute) micros -= node.micros;
      }
      EXPECT_EQ(found, expected);
      EXPECT_EQ(bytes, 0);
      EXPECT_NEAR(micros, 0, 0.01);
      nodes += std::ssize(written.traces[rank]);
    }
    EXPECT_EQ(written.files.nodes, nodes);
  }
}

TEST(Chakra, GathersAreWrittenByWhatARankPutsIn) {
  const Written& written = traces_of(2);
  std::int64_t gathered = 0;
  for (const Operation& op : written.programs[0]) {
    if (op.kind == OpKind::communicate && op.collective == Collective::all_gather) gathered += (op.bytes + 3) / 4;
  }

  for (const Node& node : written.traces[0]) {
    if (node.type == kCollective && node.attributes.at("comm_type") == 2) gathered -= node.attributes.at("comm_size");
  }
  EXPECT_EQ(gathered, 0);
}

TEST(Chakra, NodesDependOnEarlierNodesOnly) {
  for (std::size_t i = 0; i < kPlans; ++i) {
    for (const std::vector<Node>& trace : traces_of(i).traces) {
      std::set<std::uint64_t> before;
      for (const Node& node : trace) {
        for (const std::uint64_t other : node.after) EXPECT_TRUE(before.contains(other)) << node.id << " names " << other;
        EXPECT_TRUE(before.insert(node.id).second) << node.id << " is there twice";
      }
    }
  }
}

TEST(Chakra, NothingWaitsForWhatTheRankSendsOn) {
  for (const std::vector<Node>& trace : traces_of(0).traces) {
    std::set<std::uint64_t> sends, named;
    for (const Node& node : trace) {
      if (node.type == kSend) sends.insert(node.id);
      named.insert(node.after.begin(), node.after.end());
    }
    EXPECT_EQ(sends.size(), 4U);
    EXPECT_TRUE(std::none_of(sends.begin(), sends.end(), [&](std::uint64_t id) { return named.contains(id); }));
  }
}

TEST(Chakra, EverySendHasItsReceive) {
  for (std::size_t i = 0; i < kPlans; ++i) {
    const Written& written = traces_of(i);
    std::map<std::vector<std::int64_t>, int> messages;
    int sent = 0;
    for (std::size_t rank = 0; rank < written.traces.size(); ++rank) {
      for (const Node& node : written.traces[rank]) {
        if (node.type != kSend && node.type != kReceive) continue;
        const auto& a = node.attributes;
        EXPECT_EQ(a.at(node.type == kSend ? "comm_src" : "comm_dst"), static_cast<std::int64_t>(rank));
        messages[{a.at("comm_src"), a.at("comm_dst"), a.at("comm_tag"), a.at("comm_size")}] += node.type == kSend ? 1 : -1;
        sent += node.type == kSend ? 1 : 0;
      }
    }
    EXPECT_GT(sent, 0);
    for (const auto& [message, left] : messages)
      EXPECT_EQ(left, 0) << message[0] << " to " << message[1] << " tag " << message[2];
  }
}

TEST(Chakra, TheGroupsOfCollectivesAreInTheFileOfGroups) {
  const Written& written = traces_of(0);
  const std::string groups = TestFolder::read(written.files.groups);
  std::set<std::string> used;
  for (const Node& node : written.traces[5]) {
    if (node.type == kCollective) used.insert(node.group);
  }

  EXPECT_TRUE(used.contains("")) << "sums over all ranks have no group";
  used.erase("");
  std::set<std::string> expected;
  for (const GroupAxis axis : {GroupAxis::tensor, GroupAxis::gradient, GroupAxis::model, GroupAxis::embedding}) {
    const std::string members = fmt::format("\": [{}]", fmt::join(ProcessGrid(written.plan).group(axis, 5), ", "));
    const std::size_t found = groups.find(members);
    ASSERT_NE(found, std::string::npos) << name(axis) << members;
    const std::size_t quote = groups.rfind('"', found - 1);
    expected.insert(groups.substr(quote + 1, found - quote - 1));
  }
  EXPECT_EQ(used, expected);
}

// Plays the traces by what is written in them alone: a node starts when all that it names has ended.
class Player {
 public:
  explicit Player(const std::vector<std::vector<Node>>& traces) : traces_(traces), ready_(traces.size()), end_(traces.size()) {}

  double makespan() {
    double last = 0;
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t rank = 0; rank < traces_.size(); ++rank) {
        issue(rank);
        for (const Node& node : traces_[rank]) {
          if (end_[rank].contains(node.id) || !ready_[rank].contains(node.id)) continue;
          const std::optional<double> end = end_of(rank, node);
          if (!end) continue;
          end_[rank][node.id] = *end;
          last = std::max(last, *end);
          moved = true;
        }
      }
    }
    for (std::size_t rank = 0; rank < traces_.size(); ++rank) EXPECT_EQ(end_[rank].size(), traces_[rank].size()) << "it hangs";
    return last;
  }

 private:
  using Key = std::vector<std::int64_t>;

  // Nodes that may start now.
  void issue(std::size_t rank) {
    std::map<std::string, std::int64_t> of_group;
    for (const Node& node : traces_[rank]) {
      const std::int64_t place = node.type == kCollective ? of_group[node.group]++ : 0;
      if (ready_[rank].contains(node.id)) continue;
      double start = 0;
      const bool may = std::all_of(node.after.begin(), node.after.end(), [&](std::uint64_t other) {
        const auto found = end_[rank].find(other);
        if (found != end_[rank].end()) start = std::max(start, found->second);
        return found != end_[rank].end();
      });
      if (!may) continue;
      ready_[rank][node.id] = start;
      if (node.type == kSend) sent_[key(node)] = start;
      if (node.type != kCollective) continue;
      auto& [ranks, latest] = issued_[{node.group, place}];
      ++ranks;
      latest = std::max(latest, start);
      place_[rank][node.id] = place;
    }
  }

  std::optional<double> end_of(std::size_t rank, const Node& node) {
    const double start = ready_[rank][node.id];
    if (node.type == kCompute) return start + node.micros;
    if (node.type == kSend) return start;
    if (node.type == kReceive) {
      const auto sent = sent_.find(key(node));
      if (sent == sent_.end()) return {};
      return std::max(start, sent->second + node.micros);
    }
    const auto& [ranks, latest] = issued_[{node.group, place_[rank][node.id]}];
    if (ranks < members(node.group)) return {};
    return latest + node.micros;
  }

  [[nodiscard]] int members(const std::string& group) const {
    return static_cast<int>(std::count_if(traces_.begin(), traces_.end(), [&](const std::vector<Node>& trace) {
      return std::any_of(trace.begin(), trace.end(),
                         [&](const Node& node) { return node.type == kCollective && node.group == group; });
    }));
  }
  static Key key(const Node& node) {
    return {node.attributes.at("comm_src"), node.attributes.at("comm_dst"), node.attributes.at("comm_tag")};
  }

  const std::vector<std::vector<Node>>& traces_;
  std::vector<std::map<std::uint64_t, double>> ready_, end_;
  std::map<std::size_t, std::map<std::uint64_t, std::int64_t>> place_;
  std::map<Key, double> sent_;
  std::map<std::pair<std::string, std::int64_t>, std::pair<int, double>> issued_;
};

TEST(Chakra, PlayedByItsDependenciesAStepTakesAsLongAsTheProgramsDo) {
  for (std::size_t i = 0; i < kPlans; ++i) {
    if (plans()[i].parallel.context > 1)
      continue;  // a shift of a ring is two messages here, an operation of the whole group there
    const Written& written = traces_of(i);
    const ProcessGrid grid(written.plan);
    const auto stage_of = [&](const Operation& op) {
      for (std::size_t rank = 0; rank < written.programs.size(); ++rank) {
        const StepProgram& program = written.programs[rank];
        if (&op >= program.data() && &op < program.data() + program.size())
          return grid.coordinates(static_cast<int>(rank)).pipeline;
      }
      return -1;
    };

    const double expected = time_programs(written.programs, expectation(written.plan, written.model, written.model.sequence),
                                          [&](const Operation& op) { return cost_of(op, stage_of(op)); })
                                .makespan_seconds;

    EXPECT_NEAR(Player(written.traces).makespan(), 1e6 * expected, 0.5);
  }
}

TEST(Chakra, AFolderThatIsNotThereIsRefused) {
  const TrainingPlan plan;
  const auto program_of = [&](int rank) { return lower(plan, {}, GptConfig{}.sequence, rank); };

  EXPECT_THROW((void)write_chakra(program_of, plan, cost_of, "no-such-folder/step"), IoError);
}

}  // namespace
}  // namespace tandem
