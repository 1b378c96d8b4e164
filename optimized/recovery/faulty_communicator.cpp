// SPDX-License-Identifier: Apache-2.0
#include "optimized/recovery/faulty_communicator.h"

#include <chrono>
#include <thread>
#include <utility>

#include "core/rng.h"
#include "kernels/memory.h"
#include "optimized/comm/work_state.h"
#include "optimized/recovery/fault_effects.h"

namespace tandem {
namespace {

using Counts = std::span<const std::int64_t>;

bool holds_numbers(TensorView values) {
  const DType dtype = values.dtype();
  return values.num_elements() > 0 && (dtype == DType::f64 || dtype == DType::f32 || is_16bit(dtype));
}

// An operation whose output is damaged when it is complete, and before its rank may read it.
class DamagedWork final : public Work::State {
 public:
  DamagedWork(Work inner, TensorView output, Memory& memory) : inner_(std::move(inner)), output_(output), memory_(memory) {}

  void wait() override {
    inner_.wait_host();
    damage();
  }
  // Who is told that it is complete may read the output, which the damage must have reached by then.
  [[nodiscard]] bool done() const noexcept override {
    if (!inner_.done()) return false;
    damage();
    return true;
  }
  void drop() noexcept override { inner_ = Work(); }

 private:
  void damage() const noexcept {
    if (std::exchange(is_damaged_, true)) return;
    try {
      HostView output(memory_, output_, Access::update);
      turn_exponent_bit(output.view(), FlipStrength::subtle);
    } catch (const std::exception&) {
      // The device has failed, as the rank's next call to it will say.
    }
  }

  Work inner_;
  TensorView output_;
  Memory& memory_;
  mutable bool is_damaged_ = false;  // of the rank's thread, which alone waits and polls
};

class FaultyCommunicator final : public Communicator {
 public:
  FaultyCommunicator(std::unique_ptr<Communicator> owned, Communicator& inner, MessageFaults& faults)
      : owned_(std::move(owned)), inner_(inner), faults_(faults) {}

  [[nodiscard]] int rank() const noexcept override { return inner_.rank(); }
  [[nodiscard]] int size() const noexcept override { return inner_.size(); }
  [[nodiscard]] std::uint64_t generation() const noexcept override { return inner_.generation(); }

  [[nodiscard]] Work all_reduce(TensorView data, const CommOptions& options) override {
    be_late();
    return damaged(inner_.all_reduce(data, options), data, options);
  }
  [[nodiscard]] Work reduce_scatter(TensorView input, TensorView output, Counts counts, const CommOptions& options) override {
    be_late();
    return damaged(inner_.reduce_scatter(input, output, counts, options), output, options);
  }
  [[nodiscard]] Work all_gather(TensorView input, TensorView output, Counts counts, const CommOptions& options) override {
    be_late();
    return damaged(inner_.all_gather(input, output, counts, options), output, options);
  }
  [[nodiscard]] Work all_to_all(TensorView input, Counts send_counts, TensorView output, Counts receive_counts,
                                const CommOptions& options) override {
    be_late();
    return damaged(inner_.all_to_all(input, send_counts, output, receive_counts, options), output, options);
  }
  [[nodiscard]] Work broadcast(TensorView data, int root, const CommOptions& options) override {
    be_late();
    Work work = inner_.broadcast(data, root, options);
    return root == rank() ? std::move(work) : damaged(std::move(work), data, options);
  }
  [[nodiscard]] Work send(TensorView data, int to, const Envelope& envelope, const CommOptions& options) override {
    be_late();
    return inner_.send(data, to, envelope, options);
  }
  [[nodiscard]] Work recv(TensorView data, int from, const Envelope& expected, const CommOptions& options) override {
    be_late();
    return damaged(inner_.recv(data, from, expected, options), data, options);
  }
  void barrier() override {
    be_late();
    inner_.barrier();
  }

  [[nodiscard]] std::unique_ptr<Communicator> split(int colour, int key) override {
    be_late();
    std::unique_ptr<Communicator> part = inner_.split(colour, key);
    Communicator& borrowed = *part;
    auto faulty = std::make_unique<FaultyCommunicator>(std::move(part), borrowed, faults_);
    faulty->memory_ = memory_;
    return faulty;
  }
  void abort(std::string_view reason) noexcept override { inner_.abort(reason); }
  void set_timeline(Timeline* timeline) noexcept override { inner_.set_timeline(timeline); }
  void set_memory(Memory* memory) override {
    memory_ = memory;
    inner_.set_memory(memory);
  }
  void register_memory(void* address, std::int64_t size_bytes) override { inner_.register_memory(address, size_bytes); }
  void deregister_memory(void* address) noexcept override { inner_.deregister_memory(address); }
  [[nodiscard]] std::int64_t bytes_sent(Purpose purpose) const noexcept override { return inner_.bytes_sent(purpose); }

 private:
  void be_late() {
    const double most = faults_.jitter_milliseconds.load(std::memory_order_relaxed);
    if (most <= 0 || size() == 1) return;
    CounterRng rng(faults_.seed, "jitter", 2 * faults_.operations.fetch_add(1));
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(most * rng.next_unit()));
  }

  [[nodiscard]] Work damaged(Work work, TensorView output, const CommOptions& options) {
    if (!faults_.flip_next.load(std::memory_order_relaxed)) return work;
    const bool is_struck = size() > 1 && options.purpose != Purpose::other && holds_numbers(output);
    if (!is_struck || !faults_.flip_next.exchange(false)) return work;
    Memory& memory = memory_ != nullptr && memory_->holds(output.data()) ? *memory_ : host_memory();
    return Work(std::make_shared<DamagedWork>(std::move(work), output, memory));
  }

  std::unique_ptr<Communicator> owned_;
  Communicator& inner_;
  MessageFaults& faults_;
  Memory* memory_ = nullptr;
};

}  // namespace

std::unique_ptr<Communicator> make_faulty(Communicator& inner, MessageFaults& faults) {
  return std::make_unique<FaultyCommunicator>(nullptr, inner, faults);
}

}  // namespace tandem
