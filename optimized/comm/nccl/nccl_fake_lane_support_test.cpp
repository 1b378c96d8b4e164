// SPDX-License-Identifier: Apache-2.0
// The lanes of nccl_fake_test_support.h, and a world of threads on them.
#include <condition_variable>
#include <deque>
#include <exception>
#include <future>
#include <latch>
#include <utility>

#include "core/error.h"
#include "core/timeline.h"
#include "kernels/kernels.h"
#include "optimized/comm/nccl/nccl_communicator.h"
#include "optimized/comm/nccl/nccl_fake_test_support.h"

namespace tandem::nccl_test {
namespace {

class FakeMark final : public Memory::Mark, public std::enable_shared_from_this<FakeMark> {
 public:
  void reach() {
    const std::scoped_lock lock(mutex_);
    time_ns_ = Timeline::now_ns();
    changed_.notify_all();
  }
  void wait() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return time_ns_ != 0; });
  }
  [[nodiscard]] bool reached() override {
    const std::scoped_lock lock(mutex_);
    return time_ns_ != 0;
  }
  [[nodiscard]] std::int64_t time_ns() override {
    wait();
    return time_ns_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t time_ns_ = 0;
};

class FakeLane final : public Memory {
 public:
  explicit FakeLane(std::shared_ptr<FakeDevice> device)
      : device_(std::move(device)), inner_(device_->make_inner_lane()), worker_([this] { run(); }) {}
  ~FakeLane() override {
    enqueue({});
    worker_.join();
  }

  void enqueue(std::function<void(Memory&)> work) {
    const std::scoped_lock lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_all();
  }

  [[nodiscard]] bool on_host() const noexcept override { return false; }
  [[nodiscard]] std::string_view description() const noexcept override { return "fake device"; }
  [[nodiscard]] bool holds(const void* address) const noexcept override { return device_->holds(address); }
  [[nodiscard]] void* reserve(std::int64_t size_bytes) override { return device_->reserve(size_bytes); }
  void give_back(void* address, std::int64_t size_bytes) noexcept override {
    enqueue([device = device_, address, size_bytes](Memory& inner) {
      inner.synchronize();
      device->give_back(address, size_bytes);
    });
  }
  void copy(const void* from, void* to, std::int64_t size_bytes) override {
    enqueue([=](Memory& inner) { inner.copy(from, to, size_bytes); });
  }
  void copy_rows(const void* from, std::int64_t from_stride, void* to, std::int64_t to_stride, std::int64_t row_bytes,
                 std::int64_t rows) override {
    enqueue([=](Memory& inner) { inner.copy_rows(from, from_stride, to, to_stride, row_bytes, rows); });
  }
  void set_bytes(void* to, std::uint8_t value, std::int64_t size_bytes) override {
    enqueue([=](Memory& inner) { inner.set_bytes(to, value, size_bytes); });
  }
  void write(const void* from_host, void* to, std::int64_t size_bytes) override {
    const auto* const begin = static_cast<const std::byte*>(from_host);
    enqueue([bytes = std::vector<std::byte>(begin, begin + size_bytes), to](Memory& inner) {
      inner.write(bytes.data(), to, std::ssize(bytes));
    });
  }
  void read(const void* from, void* to_host, std::int64_t size_bytes) override {
    enqueue([=](Memory& inner) { inner.read(from, to_host, size_bytes); });
    synchronize();
  }
  void sum_in_order(DType dtype, std::span<const std::byte* const> sources, std::span<std::byte* const> destinations,
                    std::int64_t count) override {
    enqueue([dtype, count, from = std::vector<const std::byte*>(sources.begin(), sources.end()),
             to = std::vector<std::byte*>(destinations.begin(), destinations.end())](Memory& inner) {
      inner.sum_in_order(dtype, from, to, count);
    });
  }
  void synchronize() override { mark(Timed::no)->wait(); }
  [[nodiscard]] std::shared_ptr<Mark> mark(Timed) override {
    auto mark = std::make_shared<FakeMark>();
    enqueue([mark](Memory& inner) {
      inner.synchronize();
      mark->reach();
    });
    return mark;
  }
  void begin_after(Mark& mark) override {
    const auto alive = dynamic_cast<FakeMark&>(mark).shared_from_this();
    enqueue([alive](Memory&) { alive->wait(); });
  }
  [[nodiscard]] std::unique_ptr<Memory> new_lane() override { return std::make_unique<FakeLane>(device_); }

 private:
  void run() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !work_.empty(); });
      const std::function<void(Memory&)> work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      if (!work) return;
      work(*inner_);
    }
  }

  std::shared_ptr<FakeDevice> device_;
  std::unique_ptr<Memory> inner_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void(Memory&)>> work_;
  std::thread worker_;
};

// Outlives the kernels that it is the memory of.
std::unique_ptr<Memory> emulated_memory() {
  static const std::unique_ptr<Kernels> kernels = make_cuda_kernels("simt", {});
  return kernels->memory().new_lane();
}

}  // namespace

FakeDevice::FakeDevice(std::unique_ptr<Memory> memory) : memory_(memory ? std::move(memory) : host_memory().new_lane()) {}

std::unique_ptr<Memory> FakeDevice::make_inner_lane() {
  const std::scoped_lock lock(mutex_);
  return memory_->new_lane();
}

void* FakeDevice::reserve(std::int64_t size_bytes) {
  const std::scoped_lock lock(mutex_);
  auto* const address = static_cast<const std::byte*>(memory_->reserve(size_bytes));
  reserved_.insert({address, address + size_bytes});
  return const_cast<std::byte*>(address);
}

void FakeDevice::give_back(void* address, std::int64_t size_bytes) {
  const std::scoped_lock lock(mutex_);
  auto* const begin = static_cast<const std::byte*>(address);
  reserved_.erase({begin, begin + size_bytes});
  memory_->give_back(address, size_bytes);
}

bool FakeDevice::holds(const void* address) const {
  const std::scoped_lock lock(mutex_);
  const auto* const byte = static_cast<const std::byte*>(address);
  for (const auto& [begin, end] : reserved_) {
    if (byte >= begin && byte < end) return true;
  }
  return false;
}

std::unique_ptr<Memory> make_fake_lane(const std::shared_ptr<FakeDevice>& device) { return std::make_unique<FakeLane>(device); }

void enqueue(Memory& lane, std::function<void(Memory& inner)> work) { dynamic_cast<FakeLane&>(lane).enqueue(std::move(work)); }

void run_fake_world(const FakeWorldOptions& options, const std::function<void(Communicator&, Memory& lane)>& body) {
  const auto world = std::make_shared<WorldState>(options.ranks, options.deadline, options.generation);
  const auto count = static_cast<std::size_t>(options.ranks);
  std::vector<std::shared_ptr<NcclRank>> ranks(count);
  std::vector<std::shared_ptr<FakeDevice>> devices(count);
  for (std::size_t rank = 0; rank < count; ++rank) {
    devices[rank] = std::make_shared<FakeDevice>(options.emulated_gpu ? emulated_memory() : nullptr);
    const NcclDevice device{FakeNccl::functions(), [own = devices[rank]] { return make_fake_lane(own); },
                            [](Memory& lane) { return static_cast<void*>(&lane); }};
    ranks[rank] =
        std::make_shared<NcclRank>(world, static_cast<int>(rank), device, [&ranks, rank](int to, const std::string& letter) {
          ranks[static_cast<std::size_t>(to)]->heard(static_cast<int>(rank), letter);
        });
  }
  std::vector<std::exception_ptr> errors(count);
  std::latch all_done(options.ranks);
  const auto run_one = [&](std::size_t rank) {
    const std::unique_ptr<Memory> lane = make_fake_lane(devices[rank]);
    errors[rank] = run_nccl_rank(ranks[rank], [&](Communicator& comm) {
      comm.set_memory(lane.get());
      body(comm, *lane);
    });
    all_done.arrive_and_wait();
    if (world->failed()) return ranks[rank]->abort_all();
    ranks[rank]->close_all();
  };
  {
    std::vector<std::jthread> threads;
    for (std::size_t rank = 0; rank < count; ++rank) threads.emplace_back(run_one, rank);
  }
  ranks.clear();
  if (!world->failed()) return;
  const std::exception_ptr& of_origin = errors[static_cast<std::size_t>(world->failure().rank)];
  if (of_origin) std::rethrow_exception(of_origin);
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace tandem::nccl_test
