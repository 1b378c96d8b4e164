// SPDX-License-Identifier: Apache-2.0
#include "core/step_program.h"

#include <array>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

std::string place(const Operation& op) {
  std::string text;
  if (op.layer < 0) {
    text = name(op.part);
  } else if (op.part == Part::block) {
    text = fmt::format("h.{}", op.layer);
  } else {
    text = fmt::format("h.{} {}", op.layer, name(op.part));
  }
  if (op.micro_batch >= 0) text += fmt::format(" mb {}", op.micro_batch);
  if (op.piece > 0) text += fmt::format(" piece {}", op.piece);
  return text;
}

std::string bucket(const Operation& op) {
  std::string text = fmt::format("bucket {}", op.bucket);
  if (op.micro_batch >= 0) text += fmt::format(" mb {}", op.micro_batch);
  return text;
}

std::string memory(const Operation& op) {
  return fmt::format("{} {}", name(op.category), op.bucket >= 0 ? bucket(op) : place(op));
}

std::string communication(const Operation& op) {
  if (op.collective == Collective::send || op.collective == Collective::recv) {
    const bool send = op.collective == Collective::send;
    return fmt::format("{} {} into stage {} mb {} {} rank {}", name(op.collective), name(op.phase), op.stage, op.micro_batch,
                       send ? "to" : "from", op.peer);
  }
  if (op.purpose == Purpose::gradient) {
    if (op.bucket == kTensorPartialGradients) return fmt::format("{} tensor-partial gradients", name(op.collective));
    if (op.bucket == kTiedEmbeddingGradient) return fmt::format("{} tied embedding gradient", name(op.collective));
    if (op.collective == Collective::all_reduce) return fmt::format("all_reduce bucket {}", op.bucket);
    return fmt::format("{} gradients {}", name(op.collective), bucket(op));
  }
  if (op.purpose == Purpose::parameter) return fmt::format("{} parameters {}", name(op.collective), bucket(op));
  if (op.purpose == Purpose::activation) return fmt::format("{} {} {}", name(op.collective), name(op.phase), place(op));
  return fmt::format("{} {}", name(op.collective), name(op.purpose));
}

}  // namespace

std::string_view name(Part part) {
  constexpr std::array<std::string_view, 19> kNames = {
      "embedding_lookup", "embedding",   "norm_1",    "attention_in", "attention_core", "attention_out", "attention_merge",
      "norm_2",           "mlp",         "router",    "dispatch",     "experts",        "combine",       "mlp_merge",
      "head_norm",        "head_logits", "head_loss", "block",        "message"};
  static_assert(kNames.size() == static_cast<std::size_t>(Part::message) + 1);
  return kNames[static_cast<std::size_t>(part)];
}

std::string_view name(Phase phase) {
  constexpr std::array<std::string_view, 4> kNames = {"forward", "backward_input", "backward_weight", "recompute"};
  return kNames[static_cast<std::size_t>(phase)];
}

std::string_view name(Collective collective) {
  constexpr std::array<std::string_view, 8> kNames = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all",
                                                      "broadcast",  "ring_shift",     "send",       "recv"};
  return kNames[static_cast<std::size_t>(collective)];
}

std::string to_string(const Operation& op) {
  switch (op.kind) {
    case OpKind::compute: return fmt::format("{} {}", name(op.phase), place(op));
    case OpKind::communicate: return communication(op);
    case OpKind::allocate: return "allocate " + memory(op);
    case OpKind::free: return "free " + memory(op);
    case OpKind::gradient_norm: return "gradient_norm";
    case OpKind::optimizer: return "optimizer";
  }
  return "?";
}

std::int64_t bytes_on_wire(const Operation& op, int group_size) {
  if (op.kind != OpKind::communicate || op.collective == Collective::recv) return 0;
  if (op.collective == Collective::send) return op.bytes;
  TANDEM_CHECK(group_size >= 1, fmt::format("a group of {} ranks", group_size));
  const std::int64_t n = group_size;
  if (op.collective == Collective::ring_shift) return n > 1 ? op.bytes : 0;
  const std::int64_t passes = op.collective == Collective::all_reduce ? 2 : 1;
  return passes * op.bytes * (n - 1) / n;
}

}  // namespace tandem
