// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/adversary.h"

#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"
#include "optimized/comm/adversary/late_work.h"
#include "optimized/comm/arguments.h"

namespace tandem {
namespace {

using adversary::Courier;
using adversary::LateWork;
using adversary::Line;
using adversary::Parcel;
using adversary::Route;
using Counts = std::span<const std::int64_t>;

// Stands for an operation that the rank's own thread carries out when its turn has come.
class Turn final : public Parcel {
 public:
  void deliver() noexcept override {}
};

std::string describe(std::string_view operation, const CommOptions& options, const std::string& size, DType dtype) {
  const std::string label = options.name.empty() ? "" : fmt::format(" '{}'", options.name);
  return fmt::format("{}{} of {} {}", operation, label, size, name(dtype));
}

std::string elements_of(TensorView data) { return std::to_string(data.num_elements()); }

// The inner communicator's operations are begun by the courier's thread, and waited for by the rank's: its own parts see to it
// that this works.
class AdversarialCommunicator final : public Communicator {
 public:
  AdversarialCommunicator(std::unique_ptr<Communicator> owned, Communicator& inner, std::shared_ptr<Courier> courier)
      : owned_(std::move(owned)), inner_(inner), line_(std::make_shared<Line>()), messages_(2 * ranks()) {
    line_->courier = std::move(courier);
  }
  AdversarialCommunicator(const AdversarialCommunicator&) = delete;
  AdversarialCommunicator& operator=(const AdversarialCommunicator&) = delete;
  ~AdversarialCommunicator() override {
    line_->courier->deliver_now(line_.get());
    if (line_->lane) inner_.set_memory(nullptr);
  }

  [[nodiscard]] int rank() const noexcept override { return inner_.rank(); }
  [[nodiscard]] int size() const noexcept override { return inner_.size(); }
  [[nodiscard]] std::uint64_t generation() const noexcept override { return inner_.generation(); }

  [[nodiscard]] Work all_reduce(TensorView data, const CommOptions& options) override {
    return start(collectives_,
                 {.what = describe("all_reduce", options, elements_of(data), data.dtype()),
                  .input = data,
                  .output = data,
                  .step = options.step,
                  .issue = [this, options](TensorView copy, TensorView) { return inner_.all_reduce(copy, options); }});
  }

  [[nodiscard]] Work reduce_scatter(TensorView input, TensorView output, Counts counts, const CommOptions& options) override {
    check_reduce_scatter(input, output, counts, rank(), size());
    return start(collectives_,
                 {.what = describe("reduce_scatter", options, fmt::format("[{}]", fmt::join(counts, ", ")), input.dtype()),
                  .input = input,
                  .output = output,
                  .step = options.step,
                  .issue = [this, options, parts = std::vector(counts.begin(), counts.end())](TensorView in, TensorView out) {
                    return inner_.reduce_scatter(in, out, parts, options);
                  }});
  }

  [[nodiscard]] Work all_gather(TensorView input, TensorView output, Counts counts, const CommOptions& options) override {
    check_all_gather(input, output, counts, rank(), size());
    return start(collectives_,
                 {.what = describe("all_gather", options, fmt::format("[{}]", fmt::join(counts, ", ")), input.dtype()),
                  .input = input,
                  .output = output,
                  .step = options.step,
                  .issue = [this, options, parts = std::vector(counts.begin(), counts.end())](TensorView in, TensorView out) {
                    return inner_.all_gather(in, out, parts, options);
                  }});
  }

  [[nodiscard]] Work all_to_all(TensorView input, Counts send_counts, TensorView output, Counts receive_counts,
                                const CommOptions& options) override {
    check_all_to_all(input, send_counts, output, receive_counts, size());
    return start(collectives_,
                 {.what = describe("all_to_all", options, fmt::format("[{}]", fmt::join(send_counts, ", ")), input.dtype()),
                  .input = input,
                  .output = output,
                  .step = options.step,
                  .issue = [this, options, sent = std::vector(send_counts.begin(), send_counts.end()),
                            received = std::vector(receive_counts.begin(), receive_counts.end())](TensorView in, TensorView out) {
                    return inner_.all_to_all(in, sent, out, received, options);
                  }});
  }

  [[nodiscard]] Work broadcast(TensorView data, int root, const CommOptions& options) override {
    check_root(root, size());
    const bool gives = rank() == root;
    return start(collectives_, {.what = describe("broadcast", options, elements_of(data), data.dtype()),
                                .input = gives ? data : TensorView(),
                                .output = gives ? TensorView() : data,
                                .step = options.step,
                                .issue = [this, options, root, gives](TensorView in, TensorView out) {
                                  return inner_.broadcast(gives ? in : out, root, options);
                                }});
  }

  [[nodiscard]] Work send(TensorView data, int to, const Envelope& envelope, const CommOptions& options) override {
    check_peer(to, size());
    return start(messages_[static_cast<std::size_t>(to)], {.what = describe("send", options, elements_of(data), data.dtype()),
                                                           .input = data,
                                                           .output = {},
                                                           .step = options.step,
                                                           .issue = [this, options, envelope, to](TensorView in, TensorView) {
                                                             return inner_.send(in, to, envelope, options);
                                                           }});
  }

  [[nodiscard]] Work recv(TensorView data, int from, const Envelope& expected, const CommOptions& options) override {
    check_peer(from, size());
    return start(messages_[ranks() + static_cast<std::size_t>(from)],
                 {.what = describe("recv", options, elements_of(data), data.dtype()),
                  .input = {},
                  .output = data,
                  .step = options.step,
                  .issue = [this, options, expected, from](TensorView, TensorView out) {
                    return inner_.recv(out, from, expected, options);
                  }});
  }

  void barrier() override {
    await_turn();
    inner_.barrier();
  }

  [[nodiscard]] std::unique_ptr<Communicator> split(int colour, int key) override {
    await_turn();
    std::unique_ptr<Communicator> part = inner_.split(colour, key);
    Communicator& borrowed = *part;
    auto wrapped = std::make_unique<AdversarialCommunicator>(std::move(part), borrowed, line_->courier);
    wrapped->line_->timeline = line_->timeline.load();
    wrapped->set_memory(line_->memory);
    return wrapped;
  }

  void abort(std::string_view reason) noexcept override { inner_.abort(reason); }
  void set_timeline(Timeline* timeline) noexcept override {
    line_->timeline = timeline;
    inner_.set_timeline(timeline);
  }
  // What the courier's thread begins needs a lane of its own for its marks, behind the copies that the rank's has made.
  void set_memory(Memory* memory) override {
    const bool on_device = memory != nullptr && !memory->on_host();
    std::unique_ptr<Memory> lane = on_device && inner_.size() > 1 ? memory->new_lane() : nullptr;
    inner_.set_memory(lane ? lane.get() : memory);
    line_->memory = memory;
    line_->lane = std::move(lane);
  }
  void register_memory(void* address, std::int64_t size_bytes) override { inner_.register_memory(address, size_bytes); }
  void deregister_memory(void* address) noexcept override { inner_.deregister_memory(address); }
  [[nodiscard]] std::int64_t bytes_sent(Purpose purpose) const noexcept override { return inner_.bytes_sent(purpose); }

 private:
  [[nodiscard]] std::size_t ranks() const noexcept { return static_cast<std::size_t>(inner_.size()); }

  // One rank alone waits for nobody, and what follows a dropped operation fails at its call.
  [[nodiscard]] bool at_once() const noexcept { return inner_.size() == 1 || line_->dropped; }

  [[nodiscard]] Work start(Route& route, LateWork::Order order) {
    Courier& courier = *line_->courier;
    require_one_memory(order);
    if (at_once()) {
      auto work = std::make_shared<LateWork>(line_, std::move(order), Courier::Delays{});
      work->deliver_here();
      return Work(work);
    }
    const Courier::Delays delays = courier.next_delays();
    auto work = std::make_shared<LateWork>(line_, std::move(order), delays);
    courier.send(line_.get(), route, work, delays.before);
    return Work(work);
  }

  void require_one_memory(const LateWork::Order& order) const {
    if (order.input.size_bytes() == 0 || order.output.size_bytes() == 0) return;
    const Memory& input = line_->memory_of(order.input);
    const Memory& output = line_->memory_of(order.output);
    TANDEM_CHECK(&input == &output, fmt::format("rank {}: input of {} lies in {}, output in {}", line_->courier->rank(),
                                                order.what, input.description(), output.description()));
  }

  // Behind all collectives before it, which are handed on by then.
  void await_turn() {
    if (at_once()) return;
    const auto turn = std::make_shared<Turn>();
    line_->courier->send(line_.get(), collectives_, turn, line_->courier->next_delays().before);
    line_->courier->wait_until_delivered(*turn);
  }

  std::unique_ptr<Communicator> owned_;
  Communicator& inner_;
  std::shared_ptr<Line> line_;
  Route collectives_;
  std::vector<Route> messages_;  // to each rank, then from each
};

}  // namespace

std::unique_ptr<Communicator> make_adversarial(std::unique_ptr<Communicator> inner, const AdversaryScript& script) {
  Communicator& borrowed = *inner;
  auto courier = std::make_shared<Courier>(script, borrowed.rank());
  return std::make_unique<AdversarialCommunicator>(std::move(inner), borrowed, std::move(courier));
}

std::unique_ptr<Communicator> make_adversarial(Communicator& inner, const AdversaryScript& script) {
  return std::make_unique<AdversarialCommunicator>(nullptr, inner, std::make_shared<Courier>(script, inner.rank()));
}

}  // namespace tandem
