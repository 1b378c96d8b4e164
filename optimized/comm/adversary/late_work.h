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
  bool dropped = false;          ///< an operation was, and every later one fails: used by the rank's thread alone
  Memory* memory = nullptr;      ///< Communicator::set_memory() of the rank
  std::unique_ptr<Memory> lane;  ///< the inner communicator's, used by whoever hands operations on; none: a rank that is alone

  /// Where a buffer lies.
  [[nodiscard]] Memory& memory_of(const TensorView& view) const noexcept {
    return memory != nullptr && view && memory->holds(view.data()) ? *memory : host_memory();
  }
};

/// An operation under way: first with the courier, then with the inner communicator, then late.
class LateWork final : public Work::State, public Parcel {
 public:
  /// Calls the inner communicator on copies of input and output.
  using Issue = std::function<Work(TensorView input, TensorView output)>;
  struct Order {
    std::string what;          ///< "all_reduce 'bucket 2' of 100 fp32"
    TensorView input, output;  ///< of one memory
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
  void take_back() const noexcept;

  const std::shared_ptr<Line> line_;
  Order order_;
  const Courier::Delays delays_;
  mutable Custody custody_;
  std::shared_ptr<Memory::Mark> ready_;  // of the copies, on a device
  Work inner_;                           // from here on written before it is delivered
  std::exception_ptr issue_error_;       // of the inner call
  Clock::time_point ready_at_{};
  // Of the rank's thread alone. done() takes the result back as well: who is told that it is there may read it.
  mutable bool taken_back_ = false;
  mutable std::optional<std::string> disturbance_;
  mutable std::exception_ptr take_back_error_;  // the device's
};

}  // namespace tandem::adversary
