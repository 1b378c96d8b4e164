// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "optimized/comm/call.h"
#include "optimized/comm/communicator.h"
#include "optimized/comm/message.h"
#include "optimized/comm/work_state.h"
#include "optimized/comm/world_state.h"

namespace tandem {

/// A communicator whose operations are values: checks the arguments of this rank and hands them on as a Call or MessageCall.
class CallCommunicator : public Communicator {
 public:
  [[nodiscard]] Work all_reduce(TensorView data, const CommOptions& options) final;
  [[nodiscard]] Work reduce_scatter(TensorView input, TensorView output, std::span<const std::int64_t> counts,
                                    const CommOptions& options) final;
  [[nodiscard]] Work all_gather(TensorView input, TensorView output, std::span<const std::int64_t> counts,
                                const CommOptions& options) final;
  [[nodiscard]] Work all_to_all(TensorView input, std::span<const std::int64_t> send_counts, TensorView output,
                                std::span<const std::int64_t> receive_counts, const CommOptions& options) final;
  [[nodiscard]] Work broadcast(TensorView data, int root, const CommOptions& options) final;
  [[nodiscard]] Work send(TensorView data, int to, const Envelope& envelope, const CommOptions& options) final;
  [[nodiscard]] Work recv(TensorView data, int from, const Envelope& expected, const CommOptions& options) final;
  void abort(std::string_view reason) noexcept final;
  [[nodiscard]] std::uint64_t generation() const noexcept final { return world().generation(); }

 protected:
  [[nodiscard]] virtual std::shared_ptr<Work::State> issue(Call call) = 0;
  [[nodiscard]] virtual std::shared_ptr<Work::State> issue(MessageCall call) = 0;
  [[nodiscard]] virtual WorldState& world() const noexcept = 0;
  [[nodiscard]] virtual int world_rank() const noexcept = 0;

 private:
  [[nodiscard]] Work post(TensorView data, int peer, MessageCall::Direction direction, const Envelope& envelope,
                          const CommOptions& options);
};

}  // namespace tandem
