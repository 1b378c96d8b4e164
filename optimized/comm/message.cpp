// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/message.h"

#include <fmt/format.h>

namespace tandem {
namespace {

std::string describe(const Envelope& envelope) {
  return fmt::format("step {}, micro-batch {}, chunk {}, {}", envelope.step, envelope.micro_batch, envelope.chunk,
                     envelope.direction == 0 ? "forward" : "backward");
}

}  // namespace

std::string describe(const MessageCall& message, const std::vector<int>& members) {
  const int own = members[static_cast<std::size_t>(message.rank)];
  const int peer = members[static_cast<std::size_t>(message.peer)];
  return fmt::format("{}{} of {} {} from rank {} to rank {} ({})", message.sends() ? "send" : "recv",
                     message.options.name.empty() ? "" : fmt::format(" '{}'", message.options.name), message.elements,
                     name(message.dtype), message.sends() ? own : peer, message.sends() ? peer : own, describe(message.envelope));
}

std::string describe_mismatch(const MessageCall& one, const MessageCall& other, const std::vector<int>& members) {
  const MessageCall& send = one.sends() ? one : other;
  const MessageCall& recv = one.sends() ? other : one;
  return fmt::format("message is not the expected one: {} meets {}", describe(send, members), describe(recv, members));
}

}  // namespace tandem
