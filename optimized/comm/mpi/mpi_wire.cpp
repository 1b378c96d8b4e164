// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/mpi/mpi_wire.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <exception>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/comm/mpi/mpi_progress.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

// MPI counts in int; longer messages go in pieces of this size.
constexpr std::size_t kPieceBytes = std::size_t{1} << 30;

struct Header {
  std::uint64_t mark = 0;
  std::uint64_t size = 0;
  std::int64_t payload_tag = -1;  ///< of the message that follows; -1: the bytes are behind the header
};

// How long a waiting thread looks without pause before it sleeps.
struct Vigil {
  std::chrono::microseconds keeps_core, stays_awake;
};
constexpr Vigil kVigilOnOwnCore{std::chrono::microseconds(100), std::chrono::microseconds(1000)};
constexpr Vigil kVigilOnSharedCore{std::chrono::microseconds(20), std::chrono::microseconds(200)};

// Looks often while something is likely to come soon, and leaves the core to others when it is not. To offer a core takes longer
// than a small message, even where nobody wants it; a sleeper is late by tens of microseconds.
class Backoff {
 public:
  explicit Backoff(CoreUse cores) : vigil_(cores == CoreUse::own ? kVigilOnOwnCore : kVigilOnSharedCore) {}

  // Between two looks; `now` is the time of the first of them.
  void pause(Clock::time_point now) {
    if (since_ == kNever) since_ = now;
    const auto waited = now - since_;
    if (waited < vigil_.keeps_core) return;
    if (waited < vigil_.stays_awake) return std::this_thread::yield();
    std::this_thread::sleep_for(sleep_);
    sleep_ = std::min(sleep_ * 2, std::chrono::microseconds(500));
  }

 private:
  static constexpr Clock::time_point kNever{};

  const Vigil vigil_;
  Clock::time_point since_ = kNever;
  std::chrono::microseconds sleep_{20};
};

using Progress = MpiProgress;
using Failed = std::shared_ptr<const std::function<bool()>>;

// What the transfers of a wire have in common.
struct Shared {
  Failed failed;
  std::shared_ptr<Progress> progress;
  CoreUse cores = CoreUse::shared;
};

// Who calls MPI so that a transfer proceeds.
enum class Mover : std::uint8_t {
  waiter,            // whoever started it waits for it at once
  waiter_or_thread,  // the wire's thread, too, while nobody waits
};

template <class Action>
class Finally {
 public:
  explicit Finally(Action action) : action_(std::move(action)) {}
  Finally(const Finally&) = delete;
  Finally& operator=(const Finally&) = delete;
  ~Finally() { action_(); }

 private:
  Action action_;
};

// Header and payload of one message: the requests of both, and the memory of the first.
class MpiTransfer : public Transfer {
 public:
  MpiTransfer(const Shared& shared, Mover mover)
      : failed_(shared.failed), progress_(shared.progress), ended_(mover == Mover::waiter), backoff_(shared.cores) {
    if (!ended_.load()) progress_->transfer_begins();
  }
  MpiTransfer(const MpiTransfer&) = delete;
  MpiTransfer& operator=(const MpiTransfer&) = delete;
  ~MpiTransfer() override { ends(); }

  [[nodiscard]] bool wait(Clock::time_point deadline) final {
    progress_->wait_begins();
    const Finally leave([this] { progress_->wait_ends(); });
    while (!test()) {
      const Clock::time_point now = Clock::now();
      if (now >= deadline || (*failed_)()) return test();
      progress_->look();
      backoff_.pause(now);
    }
    return true;
  }

  [[nodiscard]] bool test() final {
    const bool done = is_complete();
    if (done) ends();
    return done;
  }

 protected:
  [[nodiscard]] static bool complete(MPI_Request& request) {
    if (request == MPI_REQUEST_NULL) return true;
    int done = 0;
    check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "MPI_Test");
    return done != 0;
  }
  [[nodiscard]] static bool complete(std::vector<MPI_Request>& requests) {
    while (!requests.empty() && complete(requests.back())) requests.pop_back();
    return requests.empty();
  }
  // For a transfer that goes away: true where MPI is done with the request within a moment.
  [[nodiscard]] static bool settles(MPI_Request& request) noexcept {
    const Clock::time_point end = Clock::now() + std::chrono::milliseconds(50);
    Backoff backoff(CoreUse::shared);
    int done = request == MPI_REQUEST_NULL ? 1 : 0;
    for (Clock::time_point now = Clock::now(); done == 0 && now < end; now = Clock::now()) {
      if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return true;
      if (done == 0) backoff.pause(now);
    }
    return done != 0;
  }

  [[nodiscard]] virtual bool is_complete() = 0;
  [[nodiscard]] Progress& progress() noexcept { return *progress_; }

 private:
  void ends() noexcept {
    if (!ended_.exchange(true)) progress_->transfer_ends();
  }

  const Failed failed_;
  const std::shared_ptr<Progress> progress_;
  std::atomic<bool> ended_;  // as far as the wire's thread is concerned
  Backoff backoff_;          // of all waits for this transfer together
};

// To wake the wire's thread takes several times as long as a small message.
Mover mover_on(std::uint32_t channel) { return is_collective_channel(channel) ? Mover::waiter : Mover::waiter_or_thread; }

class MpiSend final : public MpiTransfer {
 public:
  MpiSend(MPI_Comm comm, int to, int tag, const Header& header, std::span<const std::byte> bytes, const Shared& shared,
          Mover mover)
      : MpiTransfer(shared, mover) {
    const bool is_inline = header.payload_tag < 0;
    first_ = std::make_unique<std::vector<std::byte>>(sizeof(header) + (is_inline ? bytes.size() : 0));
    std::memcpy(first_->data(), &header, sizeof(header));
    if (is_inline && !bytes.empty()) std::memcpy(first_->data() + sizeof(header), bytes.data(), bytes.size());
    check_mpi(MPI_Isend(first_->data(), static_cast<int>(first_->size()), MPI_BYTE, to, tag, comm, &first_request_), "MPI_Isend");
    for (std::size_t at = 0; !is_inline && at < bytes.size(); at += kPieceBytes) {
      const std::size_t size = std::min(kPieceBytes, bytes.size() - at);
      rest_.push_back(MPI_REQUEST_NULL);
      check_mpi(MPI_Isend(bytes.data() + at, static_cast<int>(size), MPI_BYTE, to, static_cast<int>(header.payload_tag), comm,
                          &rest_.back()),
                "MPI_Isend");
    }
  }
  ~MpiSend() override { cancel(); }

  void cancel() noexcept override {
    // MPI may read what it has been given until it says that it has: a header that nobody takes is left to it for good.
    if (!settles(first_request_)) static_cast<void>(first_.release());
    first_request_ = MPI_REQUEST_NULL;
    for (MPI_Request& request : rest_) static_cast<void>(settles(request));
    rest_.clear();
  }

 private:
  [[nodiscard]] bool is_complete() override { return complete(first_request_) && complete(rest_); }

  std::unique_ptr<std::vector<std::byte>> first_;
  MPI_Request first_request_ = MPI_REQUEST_NULL;
  std::vector<MPI_Request> rest_;
};

class MpiReceive final : public MpiTransfer, private Progress::Receiver {
 public:
  MpiReceive(MPI_Comm comm, int from, int tag, std::uint64_t mark, std::span<std::byte> bytes, const Shared& shared, Mover mover)
      : MpiTransfer(shared, mover),
        comm_(comm),
        from_(from),
        tag_(tag),
        mark_(mark),
        bytes_(bytes),
        first_(std::make_unique_for_overwrite<First>()) {
    check_mpi(MPI_Irecv(first_->data(), static_cast<int>(first_->size()), MPI_BYTE, from, tag, comm, &first_request_),
              "MPI_Irecv");
    progress().add(*this);
  }
  ~MpiReceive() override { cancel(); }

  void cancel() noexcept override {
    progress().remove(*this);
    const auto give_up = [](MPI_Request& request) {
      if (request == MPI_REQUEST_NULL) return true;
      static_cast<void>(MPI_Cancel(&request));
      return settles(request);
    };
    if (!give_up(first_request_)) static_cast<void>(first_.release());
    first_request_ = MPI_REQUEST_NULL;
    for (MPI_Request& request : rest_) static_cast<void>(give_up(request));
    rest_.clear();
  }

 private:
  [[nodiscard]] bool is_complete() override {
    if (!has_header_.load()) progress().look();
    if (!has_header_.load()) return false;
    if (error_) std::rethrow_exception(error_);
    return complete(rest_);
  }

  using First = std::array<std::byte, sizeof(Header) + MpiWire::kInlineBytes>;

  bool take_header() noexcept override {
    try {
      if (!complete(first_request_)) return false;
      Header header;
      std::memcpy(&header, first_->data(), sizeof(header));
      read(header);
    } catch (...) {
      error_ = std::current_exception();
    }
    has_header_.store(true);
    return true;
  }

  void read(const Header& header) {
    if (header.size != bytes_.size() || header.mark != mark_) {
      throw ContractError(
          fmt::format("message from process {} on channel {}: {} bytes with mark {:016x} came where {} bytes with "
                      "mark {:016x} are expected",
                      from_, tag_, header.size, header.mark, bytes_.size(), mark_));
    }
    if (header.payload_tag < 0) {
      if (!bytes_.empty()) std::memcpy(bytes_.data(), first_->data() + sizeof(header), bytes_.size());
      return;
    }
    for (std::size_t at = 0; at < bytes_.size(); at += kPieceBytes) {
      const std::size_t size = std::min(kPieceBytes, bytes_.size() - at);
      rest_.push_back(MPI_REQUEST_NULL);
      check_mpi(MPI_Irecv(bytes_.data() + at, static_cast<int>(size), MPI_BYTE, from_, static_cast<int>(header.payload_tag),
                          comm_, &rest_.back()),
                "MPI_Irecv");
    }
  }

  const MPI_Comm comm_;
  const int from_;
  const int tag_;
  const std::uint64_t mark_;
  const std::span<std::byte> bytes_;
  std::unique_ptr<First> first_;
  MPI_Request first_request_ = MPI_REQUEST_NULL;
  // Written before has_header_, by whoever looks.
  std::vector<MPI_Request> rest_;
  std::exception_ptr error_;
  std::atomic<bool> has_header_{false};
};

}  // namespace

void check_mpi(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) length = 0;
  throw IoError(fmt::format("{}: {}", what, std::string(text.data(), static_cast<std::size_t>(length))));
}

MpiWire::MpiWire(MPI_Comm comm, std::function<bool()> failed, CoreUse cores)
    : comm_(comm),
      failed_(std::make_shared<const std::function<bool()>>(std::move(failed))),
      progress_(std::make_shared<MpiProgress>(comm)),
      cores_(cores) {
  check_mpi(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(comm_, &ranks_), "MPI_Comm_size");
  void* value = nullptr;
  int found = 0;
  check_mpi(MPI_Comm_get_attr(comm_, MPI_TAG_UB, &value, &found), "MPI_Comm_get_attr");
  const int largest_tag = found != 0 ? *static_cast<int*>(value) : 32767;
  channels_ = static_cast<std::uint32_t>(largest_tag) / 2 + 1;
}

MpiWire::~MpiWire() { progress_->stop(); }

std::int64_t MpiWire::looks_of_thread() const noexcept { return progress_->looks_of_thread(); }

int MpiWire::tag_of(std::uint32_t channel) const {
  TANDEM_CHECK(channel < channels_, fmt::format("channel {}; this MPI has tags for {}", channel, channels_));
  return static_cast<int>(channel);
}

std::unique_ptr<Transfer> MpiWire::send(int to, std::uint32_t channel, std::uint64_t mark, std::span<const std::byte> bytes) {
  Header header{mark, bytes.size()};
  // Its own while fewer than a billion messages are under way.
  if (bytes.size() > kInlineBytes) header.payload_tag = channels_ + payloads_.fetch_add(1) % (channels_ - 1);
  return std::make_unique<MpiSend>(comm_, to, tag_of(channel), header, bytes, Shared{failed_, progress_, cores_},
                                   mover_on(channel));
}

std::unique_ptr<Transfer> MpiWire::receive(int from, std::uint32_t channel, std::uint64_t mark, std::span<std::byte> bytes) {
  return std::make_unique<MpiReceive>(comm_, from, tag_of(channel), mark, bytes, Shared{failed_, progress_, cores_},
                                      mover_on(channel));
}

}  // namespace tandem
