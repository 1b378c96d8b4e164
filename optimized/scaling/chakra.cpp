// SPDX-License-Identifier: Apache-2.0
#include "optimized/scaling/chakra.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <string_view>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"
#include "core/io/atomic_file.h"
#include "core/process_grid.h"
#include "optimized/scaling/chakra_wire.h"

namespace tandem {
namespace {

// Field numbers and values of et_def.proto.
constexpr int kMetadataVersion = 1;
enum NodeField : std::uint8_t { kId = 1, kName = 2, kType = 3, kDataDeps = 5, kDurationMicros = 7, kAttr = 10 };
enum AttributeField : std::uint8_t { kAttributeName = 1, kInt32Val = 7, kInt64Val = 9, kBoolVal = 27, kStringVal = 29 };
enum class NodeType : std::uint8_t { compute = 4, send = 5, receive = 6, collective = 7 };
constexpr std::string_view kSchemaVersion = "0.0.4";

// CollectiveCommType.
std::uint64_t comm_type(Collective collective) {
  switch (collective) {
    case Collective::all_reduce: return 0;
    case Collective::all_gather: return 2;
    case Collective::broadcast: return 5;
    case Collective::all_to_all: return 6;
    case Collective::reduce_scatter: return 7;
    default: break;
  }
  throw ContractError("chakra: a message is no collective");
}

// Numbers of the process groups that are used, the same on all ranks. ASTRA-sim takes 0 for all ranks, and expects few: groups of
// different axes with the same members are one.
class Groups {
 public:
  explicit Groups(int ranks) : ranks_(static_cast<std::size_t>(ranks)) {}

  int number(const std::vector<int>& members) {
    if (members.size() == ranks_) return 0;
    return numbers_.try_emplace(members, static_cast<int>(numbers_.size()) + 1).first->second;
  }
  [[nodiscard]] std::string to_json() const {
    std::map<int, const std::vector<int>*> by_number;
    for (const auto& [members, number] : numbers_) by_number[number] = &members;
    std::string text = "{";
    for (const auto& [number, members] : by_number) {
      text += fmt::format("{}\n  \"{}\": [{}]", number > 1 ? "," : "", number, fmt::join(*members, ", "));
    }
    return text + (by_number.empty() ? "}\n" : "\n}\n");
  }

 private:
  std::size_t ranks_;
  std::map<std::vector<int>, int> numbers_;
};

// The nodes of one rank, written as they are made.
class RankTrace {
 public:
  RankTrace(const ProgramOfRank& program_of, const ProcessGrid& grid, Groups& groups, const OperationCost& cost, int rank,
            AtomicFile& file)
      : program_of_(program_of),
        grid_(grid),
        groups_(groups),
        cost_(cost),
        rank_(rank),
        stage_(grid.coordinates(rank).pipeline),
        file_(file) {}

  std::int64_t write() {
    WireMessage metadata;
    metadata.text(kMetadataVersion, kSchemaVersion);
    file_.write(metadata.delimited());
    const StepProgram program = program_of_(rank_);
    for (std::size_t i = 0; i < program.size(); ++i) operation(program, i);
    return static_cast<std::int64_t>(last_id_);
  }

 private:
  using Ids = std::vector<std::uint64_t>;

  static void attribute(WireMessage& node, std::string_view name, AttributeField field, std::uint64_t value) {
    WireMessage attribute;
    attribute.text(kAttributeName, name);
    attribute.varint(field, value);
    node.message(kAttr, attribute);
  }
  static void attribute(WireMessage& node, std::string_view name, std::string_view value) {
    WireMessage attribute;
    attribute.text(kAttributeName, name);
    attribute.text(kStringVal, value);
    node.message(kAttr, attribute);
  }

  // Whoever comes to an operation waits there for what it names in the background: so does all that comes after it.
  void settle(const StepProgram& program, const Operation& op) {
    for (const OperationId before : op.after) {
      if (!program[static_cast<std::size_t>(before)].background) continue;
      const auto found = background_.find(before);
      if (found == background_.end()) continue;
      front_.insert(front_.end(), found->second.begin(), found->second.end());
      background_.erase(found);
    }
  }

  void operation(const StepProgram& program, std::size_t index) {
    const Operation& op = program[index];
    settle(program, op);
    const bool computes = op.kind == OpKind::compute || op.kind == OpKind::gradient_norm || op.kind == OpKind::optimizer;
    if (computes) {
      if (const double seconds = cost_(op, stage_); seconds > 0) front_ = {compute(op, seconds)};
      return;
    }
    if (op.kind != OpKind::communicate) return;
    if (op.collective == Collective::send) {
      message(op, NodeType::send, op.peer, op.bytes, front_);
    } else if (op.collective == Collective::recv) {
      front_ = {message(op, NodeType::receive, op.peer, op.bytes, front_)};
    } else {
      of_group(op, static_cast<OperationId>(index));
    }
  }

  void of_group(const Operation& op, OperationId index) {
    const std::vector<int> members = grid_.group(op.axis, rank_);
    Ids after = front_;
    Ids& of_axis = last_of_axis_[op.axis];
    after.insert(after.end(), of_axis.begin(), of_axis.end());
    const Ids made = op.collective == Collective::ring_shift ? shift(op, members, after) : Ids{collective(op, members, after)};
    of_axis = made;
    if (op.background) {
      background_[index] = made;
    } else {
      front_ = made;
    }
  }

  // The fields that all nodes have; attributes follow.
  WireMessage begin(const Operation& op, NodeType type, std::string_view suffix, Ids after, std::uint64_t micros) {
    std::sort(after.begin(), after.end());
    after.erase(std::unique(after.begin(), after.end()), after.end());
    WireMessage node;
    node.varint(kId, ++last_id_);
    node.text(kName, to_string(op) + std::string(suffix));
    node.varint(kType, static_cast<std::uint64_t>(type));
    node.packed(kDataDeps, after);
    node.varint(kDurationMicros, micros);
    attribute(node, "is_cpu_op", kBoolVal, 0);
    return node;
  }

  std::uint64_t finish(const WireMessage& node) {
    file_.write(node.delimited());
    return last_id_;
  }

  // Whole microseconds that add up to the seconds of all: what is cut off one node comes to a later one.
  std::uint64_t compute(const Operation& op, double seconds) {
    const auto micros = [](double time) { return static_cast<std::uint64_t>(std::llround(time * 1e6)); };
    const std::uint64_t before = micros(computed_seconds_);
    computed_seconds_ += seconds;
    WireMessage node = begin(op, NodeType::compute, {}, front_, micros(computed_seconds_) - before);
    attribute(node, "num_ops", kInt64Val, static_cast<std::uint64_t>(std::llround(op.flops)));
    return finish(node);
  }

  std::uint64_t collective(const Operation& op, const std::vector<int>& members, const Ids& after) {
    WireMessage node = begin(op, NodeType::collective, {}, after, micros_of(op));
    attribute(node, "comm_type", kInt64Val, comm_type(op.collective));
    // What a rank puts in: of a gather its own part.
    const auto ranks = static_cast<std::int64_t>(members.size());
    const std::int64_t bytes = op.collective == Collective::all_gather ? (op.bytes + ranks - 1) / ranks : op.bytes;
    attribute(node, "comm_size", kInt64Val, static_cast<std::uint64_t>(bytes));
    if (const int group = groups_.number(members); group > 0) attribute(node, "pg_name", fmt::format("{}", group));
    if (op.collective == Collective::broadcast) attribute(node, "root", kInt32Val, static_cast<std::uint64_t>(op.peer));
    return finish(node);
  }

  // Messages from one rank to another are received in the order in which they are sent: their tag is their count.
  std::uint64_t message(const Operation& op, NodeType type, int peer, std::int64_t bytes, const Ids& after) {
    const bool sends = type == NodeType::send;
    const bool shifts = op.collective == Collective::ring_shift;
    WireMessage node = begin(op, type, !shifts ? "" : sends ? " send" : " recv", after, micros_of(op));
    attribute(node, "comm_size", kInt64Val, static_cast<std::uint64_t>(bytes));
    attribute(node, "comm_src", kInt32Val, static_cast<std::uint64_t>(sends ? rank_ : peer));
    attribute(node, "comm_dst", kInt32Val, static_cast<std::uint64_t>(sends ? peer : rank_));
    attribute(node, "comm_tag", kInt32Val, static_cast<std::uint64_t>(messages_[{type, peer}]++));
    return finish(node);
  }

  Ids shift(const Operation& op, const std::vector<int>& members, const Ids& after) {
    const auto here = static_cast<std::size_t>(std::find(members.begin(), members.end(), rank_) - members.begin());
    const int next = members[(here + 1) % members.size()];
    const int previous = members[(here + members.size() - 1) % members.size()];
    const std::uint64_t sent = message(op, NodeType::send, next, op.bytes, after);
    return {sent, message(op, NodeType::receive, previous, shifted_by(previous, op.axis), after)};
  }

  // Bytes of the next shift that `previous` sends here: its own, which need not be this rank's.
  std::int64_t shifted_by(int previous, GroupAxis axis) {
    const auto [known, fresh] = shifts_.try_emplace(axis);
    if (fresh) {
      for (const Operation& op : program_of_(previous)) {
        const bool is_one = op.kind == OpKind::communicate && op.collective == Collective::ring_shift && op.axis == axis;
        if (is_one) known->second.push_back(op.bytes);
      }
      std::reverse(known->second.begin(), known->second.end());
    }
    if (known->second.empty()) throw InputError(fmt::format("chakra: rank {} shifts less often than rank {}", previous, rank_));
    const std::int64_t bytes = known->second.back();
    known->second.pop_back();
    return bytes;
  }

  [[nodiscard]] std::uint64_t micros_of(const Operation& op) const {
    return static_cast<std::uint64_t>(std::llround(std::max(0.0, cost_(op, stage_)) * 1e6));
  }

  const ProgramOfRank& program_of_;
  const ProcessGrid& grid_;
  Groups& groups_;
  const OperationCost& cost_;
  int rank_, stage_;
  AtomicFile& file_;
  std::uint64_t last_id_ = 0;  // from 1: a field that is 0 is not to be told from one that is missing
  double computed_seconds_ = 0;
  Ids front_;                              // what the rank's next operation follows
  std::map<OperationId, Ids> background_;  // under way, and not named yet
  std::map<GroupAxis, Ids> last_of_axis_;
  std::map<std::pair<NodeType, int>, int> messages_;       // sent to, received from
  std::map<GroupAxis, std::vector<std::int64_t>> shifts_;  // to come, last first
};

}  // namespace

ChakraFiles write_chakra(const ProgramOfRank& program_of, const TrainingPlan& plan, const OperationCost& cost,
                         const std::filesystem::path& prefix) {
  const ProcessGrid grid(plan);
  Groups groups(grid.size());
  ChakraFiles files;
  for (int rank = 0; rank < grid.size(); ++rank) {
    files.traces.emplace_back(fmt::format("{}.{}.et", prefix.string(), rank));
    AtomicFile file(files.traces.back());
    files.nodes += RankTrace(program_of, grid, groups, cost, rank, file).write();
    file.commit();
  }
  files.groups = prefix.string() + ".groups.json";
  write_file_atomically(files.groups, groups.to_json());
  return files;
}

}  // namespace tandem
