// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "optimized/comm/adversary/courier.h"
#include "optimized/comm/adversary/custody.h"
#include "optimized/comm/communicator.h"
#include "optimized/comm/work_state.h"

namespace tandem::adversary {

/// What the operations of one communicator share, and keep when it is gone.
struct Line {
  std::shared_ptr<Courier> courier;
  std::atomic<Timeline*> timeline{nullptr};
  bool dropped = false;  ///< an operation was, and every later one fails: used by the rank's thread alone
};

/// An operation under way: first with the courier, then with the inner communicator, then late.
class LateWork final : public Work::State, public Parcel {
 public:
  /// Calls the inner communicator on copies of input and output.
  using Issue = std::function<Work(TensorView input, TensorView output)>;
  struct Order {
    std::string what;  ///< "all_reduce 'bucket 2' of 100 fp32"
    TensorView input, output;
    int step = -1;
    Issue issue;
  };

  LateWork(std::shared_ptr<Line> line, Order order, Courier::Delays delays);

  void deliver() noexcept override;
  /// Instead of sending it with the courier. Throws what the inner call throws.
  void deliver_here();

  void wait() override;
  [[nodiscard]] bool done() const noexcept override;
  void drop() noexcept override;

 private:
  void take_back() const;

  const std::shared_ptr<Line> line_;
  Order order_;
  const Courier::Delays delays_;
  Custody custody_;
  Work inner_;                      // from here on written before it is delivered
  std::exception_ptr issue_error_;  // of the inner call
  Clock::time_point ready_at_{};
  // Of the rank's thread alone. done() takes the result back as well: who is told that it is there may read it.
  mutable bool taken_back_ = false;
  mutable std::optional<std::string> disturbance_;
};

}  // namespace tandem::adversary
