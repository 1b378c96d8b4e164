// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/communicator.h"

#include <utility>

#include "optimized/comm/work_state.h"

namespace tandem {

Work::Work() = default;
Work::Work(std::shared_ptr<State> state) : state_(std::move(state)) {}
Work::Work(Work&&) noexcept = default;

Work& Work::operator=(Work&& other) noexcept {
  if (this != &other) {
    if (state_) state_->drop();
    state_ = std::move(other.state_);
  }
  return *this;
}

Work::~Work() {
  if (state_) state_->drop();
}

void Work::wait_host() {
  // Taken out first: an operation that failed has been waited for, too.
  if (const auto state = std::move(state_)) state->wait();
}

bool Work::done() const noexcept { return !state_ || state_->done(); }

void all_reduce(Communicator& comm, TensorView data, const CommOptions& options) {
  CommOptions now = options;
  now.progress = Progress::on_wait;
  comm.all_reduce(data, now).wait_host();
}

double all_reduce_sum(Communicator& comm, double value) {
  all_reduce(comm, TensorView(&value, DType::f64, {1}), {.name = "sum of host values"});
  return value;
}

std::vector<std::uint64_t> all_gather_u64(Communicator& comm, std::uint64_t value) {
  const auto size = static_cast<std::size_t>(comm.size());
  std::vector<std::uint64_t> values(size);
  const std::vector<std::int64_t> counts(size, 1);
  // Moved, not added: the bits of a u64 travel as an i64.
  comm.all_gather(TensorView(&value, DType::i64, {1}), TensorView(values.data(), DType::i64, {comm.size()}), counts,
                  {.name = "host values", .progress = Progress::on_wait})
      .wait_host();
  return values;
}

}  // namespace tandem
