// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "core/error.h"
#include "core/step_program_check.h"

namespace tandem::step_program_check {
namespace {

class WorkChecker {
 public:
  WorkChecker(const StepProgram& program, int rank, const ProgramExpectation& expectation, Problems& problems)
      : program_(program),
        rank_(rank),
        mine_(expectation.ranks[static_cast<std::size_t>(rank)]),
        stages_(expectation),
        problems_(problems) {}

  void run() {
    dependencies();
    index();
    const int chunks = static_cast<int>(mine_.chunk_layers.size());
    spans_.assign(mine_.chunk_layers.size() * static_cast<std::size_t>(mine_.micro_batches), {});
    for (int chunk = 0; chunk < chunks; ++chunk) {
      for (int micro_batch = 0; micro_batch < mine_.micro_batches; ++micro_batch) one_chunk(chunk, micro_batch);
    }
    for (int chunk = 0; chunk < chunks; ++chunk) {
      for (int micro_batch = 0; micro_batch < mine_.micro_batches; ++micro_batch) boundaries(chunk, micro_batch);
    }
    activations();
    unexpected();
  }

 private:
  struct Found {
    int first = -1;
    int count = 0;
    bool wanted = false;
  };
  // Operations at which a chunk's forward and backward of one micro-batch begin and end.
  struct Span {
    int forward_first = -1, forward_last = -1, backward_first = -1, backward_last = -1;
  };
  using WorkKey = std::array<int, 6>;
  using MessageKey = std::array<int, 4>;

  static WorkKey work_key(const Operation& op) {
    return {static_cast<int>(op.phase), static_cast<int>(op.part), op.layer, op.chunk, op.micro_batch, op.piece};
  }
  static MessageKey message_key(const Operation& op) {
    return {static_cast<int>(op.collective), static_cast<int>(op.phase), op.stage, op.micro_batch};
  }
  static bool is_work(const Operation& op) { return op.kind == OpKind::compute; }
  static bool is_message(const Operation& op) {
    return op.kind == OpKind::communicate && op.axis == GroupAxis::pipeline &&
           (op.collective == Collective::send || op.collective == Collective::recv);
  }

  void problem(const std::string& text) { problems_.push_back(fmt::format("rank {}: {}", rank_, text)); }
  [[nodiscard]] const Operation& at(int index) const { return program_[static_cast<std::size_t>(index)]; }
  [[nodiscard]] Span& span(int chunk, int micro_batch) {
    return spans_[static_cast<std::size_t>(chunk * mine_.micro_batches + micro_batch)];
  }

  void dependencies() {
    for (int i = 0; i < std::ssize(program_); ++i) {
      for (const OperationId before : at(i).after) {
        if (before >= 0 && before < i) continue;
        problem(fmt::format("operation {} ({}) waits for {}, which is not before it", i, to_string(at(i)), before));
      }
    }
  }

  void index() {
    for (int i = 0; i < std::ssize(program_); ++i) {
      Found* found = nullptr;
      if (is_work(at(i))) found = &work_[work_key(at(i))];
      if (is_message(at(i))) found = &messages_[message_key(at(i))];
      if (found == nullptr) continue;
      if (found->count++ == 0) found->first = i;
    }
  }

  // Position of the operation that must appear once; reports and gives -1 where it does not.
  int only(Found& found, const Operation& wanted) {
    found.wanted = true;
    if (found.count == 1) return found.first;
    problem(fmt::format("{} appears {} times, not once", to_string(wanted), found.count));
    return -1;
  }

  Operation work(Phase phase, const Step& step, int chunk, int micro_batch) const {
    Operation op;
    op.phase = phase;
    op.part = step.part;
    op.layer = step.layer;
    op.piece = step.piece;
    op.chunk = chunk;
    op.micro_batch = micro_batch;
    return op;
  }

  int only(Phase phase, const Step& step, int chunk, int micro_batch) {
    const Operation wanted = work(phase, step, chunk, micro_batch);
    return only(work_[work_key(wanted)], wanted);
  }

  void in_order(int before, int after) {
    if (before < 0 || after < 0 || before < after) return;
    problem(fmt::format("{} runs before {}", to_string(at(after)), to_string(at(before))));
  }

  // `after` takes up what `before` made.
  void follows(int before, int after) {
    in_order(before, after);
    if (before >= 0 && after >= 0) next_[before] = after;
  }

  // Positions of the steps, checked to ascend; what is missing is left out.
  std::vector<int> sequence(Phase phase, const std::vector<Step>& steps, int chunk, int micro_batch) {
    std::vector<int> positions;
    std::vector<int> pieces;  // of a product that is taken up as a whole
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const int position = only(phase, steps[i], chunk, micro_batch);
      if (position < 0) continue;
      const bool goes_on = steps[i].summed_later && steps[i].piece > 0;
      if (!positions.empty()) in_order(positions.back(), position);
      if (!goes_on) {
        for (const int piece : pieces) next_[piece] = position;
        pieces.clear();
      }
      pieces.push_back(position);
      positions.push_back(position);
    }
    return positions;
  }

  // Pieces of the head that the program has: a micro-batch may have fewer tokens, or none.
  int head_pieces(int chunk, int micro_batch) const {
    int pieces = 0;
    while (pieces < mine_.head_pieces &&
           (work_.contains(work_key(work(Phase::forward, {Part::head_logits, -1, pieces}, chunk, micro_batch))) ||
            work_.contains(work_key(work(Phase::forward, {Part::head_loss, -1, pieces}, chunk, micro_batch))))) {
      ++pieces;
    }
    return pieces;
  }

  std::vector<Step> forward_steps(int chunk, int micro_batch) const {
    std::vector<Step> steps;
    if (chunk == mine_.embedding_chunk) steps = {{Part::embedding_lookup}, {Part::embedding}};
    // The output of a stage before that is on this rank too is handed over by a copy.
    if (work_.contains(work_key(work(Phase::forward, {Part::message}, chunk, micro_batch)))) steps = {{Part::message}};
    const Interval layers = mine_.chunk_layers[static_cast<std::size_t>(chunk)];
    for (auto layer = static_cast<int>(layers.begin); layer < layers.end; ++layer) {
      for (const Step& step : block_steps(mine_, layer, Phase::forward, micro_batch)) steps.push_back(step);
    }
    if (chunk == mine_.head_chunk) {
      steps.push_back({Part::head_norm});
      for (int piece = 0; piece < head_pieces(chunk, micro_batch); ++piece) {
        steps.push_back({Part::head_logits, -1, piece});
        steps.push_back({Part::head_loss, -1, piece});
      }
    }
    return steps;
  }

  void one_chunk(int chunk, int micro_batch) {
    Span& mine = span(chunk, micro_batch);
    const std::vector<int> forward = sequence(Phase::forward, forward_steps(chunk, micro_batch), chunk, micro_batch);
    std::vector<int> backward;
    const auto continue_backward = [&](const std::vector<Step>& steps) {
      const std::vector<int> more = sequence(Phase::backward_input, steps, chunk, micro_batch);
      if (!backward.empty() && !more.empty()) follows(backward.back(), more.front());
      backward.insert(backward.end(), more.begin(), more.end());
    };
    const auto weight = [&](const Step& step) {
      const int position = only(Phase::backward_weight, step, chunk, micro_batch);
      if (!backward.empty()) in_order(backward.back(), position);
    };
    if (chunk == mine_.head_chunk) {
      continue_backward({{Part::head_norm}});
      weight({Part::head_norm});
    }
    const Interval layers = mine_.chunk_layers[static_cast<std::size_t>(chunk)];
    for (auto layer = static_cast<int>(layers.end) - 1; layer >= layers.begin; --layer) {
      continue_backward(block_steps(mine_, layer, Phase::backward_input, micro_batch));
      weight({Part::block, layer});
    }
    if (chunk == mine_.embedding_chunk) {
      weight({Part::embedding});
      lookup_gradient(chunk, micro_batch);
    }
    if (!forward.empty()) {
      mine.forward_first = forward.front();
      mine.forward_last = forward.back();
    }
    if (!backward.empty()) {
      mine.backward_first = backward.front();
      mine.backward_last = backward.back();
    }
    in_order(mine.forward_last, mine.backward_first);
  }

  // Where the gradient of all tokens must be gathered first, the table's own part of the backward follows that of `embedding`.
  void lookup_gradient(int chunk, int micro_batch) {
    const Operation lookup = work(Phase::backward_weight, {Part::embedding_lookup}, chunk, micro_batch);
    const Operation before = work(Phase::backward_weight, {Part::embedding}, chunk, micro_batch);
    const auto found = work_.find(work_key(lookup));
    if (found == work_.end()) return;
    follows(work_[work_key(before)].first, only(found->second, lookup));
  }

  // The message between this rank and the holder of stage `other`; -1 where there is none and none is needed.
  int message(Collective collective, Phase phase, int stage, int other, int micro_batch) {
    const int peer = stages_.holder(rank_, other);
    Operation wanted;
    wanted.kind = OpKind::communicate;
    wanted.collective = collective;
    wanted.phase = phase;
    wanted.stage = stage;
    wanted.micro_batch = micro_batch;
    wanted.peer = peer;
    const auto found = messages_.find(message_key(wanted));
    if (peer == rank_ && found == messages_.end()) return -1;
    const int position = only(messages_[message_key(wanted)], wanted);
    if (position >= 0 && at(position).peer != peer) {
      problem(
          fmt::format("{} names rank {}, but stage {} is on rank {}", to_string(at(position)), at(position).peer, other, peer));
    }
    return position;
  }

  void boundaries(int chunk, int micro_batch) {
    const Span mine = span(chunk, micro_batch);
    const int stage = stages_.stage_of(rank_, chunk);
    if (stage > 0) {
      in_order(message(Collective::recv, Phase::forward, stage, stage - 1, micro_batch), mine.forward_first);
      in_order(mine.backward_last, message(Collective::send, Phase::backward_input, stage - 1, stage - 1, micro_batch));
    }
    if (stage + 1 < stages_.stages(rank_)) {
      in_order(mine.forward_last, message(Collective::send, Phase::forward, stage + 1, stage + 1, micro_batch));
      in_order(message(Collective::recv, Phase::backward_input, stage, stage + 1, micro_batch), mine.backward_first);
    }
    for (int next = 0; next < std::ssize(mine_.chunk_layers); ++next) {  // both stages here: order, messages or not
      if (stages_.stage_of(rank_, next) != stage + 1) continue;
      in_order(mine.forward_last, span(next, micro_batch).forward_first);
      in_order(span(next, micro_batch).backward_last, mine.backward_first);
    }
  }

  // Collectives of activations stand between the part whose result travels and the one that takes it up. That of head_loss sums
  // what all pieces made for the backward pass; a micro-batch without rows has it without pieces.
  void activations() {
    for (int i = 0; i < std::ssize(program_); ++i) {
      const Operation& op = at(i);
      if (op.kind != OpKind::communicate || op.purpose != Purpose::activation || is_message(op)) continue;
      const auto found = work_.find(work_key(op));
      if (op.part == Part::head_loss && op.chunk == mine_.head_chunk && op.micro_batch >= 0 &&
          op.micro_batch < mine_.micro_batches) {
        between(span(op.chunk, op.micro_batch).forward_last, i, span(op.chunk, op.micro_batch).backward_first);
      } else if (found == work_.end() || found->second.count == 0) {
        problem(fmt::format("{} sends the result of no part of this rank", to_string(op)));
      } else {
        between(found->second.first, i, taken_up_by(found->second.first, i));
      }
    }
  }

  // The part that needs the result of `part`; -1: none is known. What is computed again may end early, and in any part.
  [[nodiscard]] int taken_up_by(int part, int communication) const {
    const auto next = next_.find(part);
    if (next != next_.end()) return next->second;
    const Operation& op = at(communication);
    if (op.phase != Phase::recompute || !op.background) return -1;
    for (int later = communication + 1; later < std::ssize(program_); ++later) {
      const Operation& other = at(later);
      const bool same_pass = other.phase == op.phase && other.chunk == op.chunk && other.micro_batch == op.micro_batch;
      if (is_work(other) && same_pass && (other.part != op.part || other.layer != op.layer)) return later;
    }
    return -1;
  }

  // A rank goes on while its communication in the background does: there the place in the program says nothing.
  void between(int part, int communication, int next) {
    in_order(part, communication);
    in_order(communication, next);
    if (!at(communication).background) return;
    const auto waits = [&](int later, int earlier) {
      if (later < earlier || waits_for(program_, later, earlier)) return;
      problem(fmt::format("{} does not wait for {}", to_string(at(later)), to_string(at(earlier))));
    };
    if (part >= 0) waits(communication, part);
    if (next >= 0) waits(next, communication);
  }

  void unexpected() {
    for (const auto& [key, found] : work_) {
      if (found.wanted || found.count == 0 || at(found.first).phase == Phase::recompute) continue;
      problem(fmt::format("{} is no work of this rank", to_string(at(found.first))));
    }
    for (const auto& [key, found] : messages_) {
      if (!found.wanted && found.count > 0) problem(fmt::format("{} is no message of this rank", to_string(at(found.first))));
    }
  }

  const StepProgram& program_;
  int rank_;
  const RankExpectation& mine_;
  StageMap stages_;
  Problems& problems_;
  std::map<WorkKey, Found> work_;
  std::map<MessageKey, Found> messages_;
  std::map<int, int> next_;  // position of a part -> of the part that takes up its result
  std::vector<Span> spans_;  // [chunks * micro_batches]
};

}  // namespace

void check_work(const StepProgram& program, int rank, const ProgramExpectation& expectation, Problems& problems) {
  WorkChecker(program, rank, expectation, problems).run();
}

}  // namespace tandem::step_program_check
