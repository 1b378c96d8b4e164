// SPDX-License-Identifier: Apache-2.0
#include "kernels/simt/heap.h"

#include <atomic>
#include <csignal>
#include <cstring>
#include <iterator>

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include "core/error.h"
#include "kernels/simt/sanitizers.h"

namespace tandem::simt_gpu {
namespace {

constexpr std::int64_t kRangeBytes = std::int64_t{64} << 30;
constexpr std::int64_t kPage = 2 << 20;  // huge ones: protecting 256 MiB takes 20 us, and 6 ms with small ones
constexpr int kPoison = 0xFF;            // NaN in every floating-point type, -1 in the integers

std::atomic<std::uintptr_t> g_range_begin{0};  // for the signal handler
struct sigaction g_before {};

/// Only what may be done in a signal handler: digits by hand, write().
void write_address(std::uintptr_t address) {
  char text[] = "host code touched memory of the emulated GPU at 0x0000000000000000, which only kernels and Memory may\n";
  char* digit = std::strstr(text, "0x") + 2 + 15;
  for (; address != 0; address >>= 4) *digit-- = "0123456789abcdef"[address & 15];
  static_cast<void>(!write(STDERR_FILENO, text, sizeof text - 1));
}

void on_fault(int signal, siginfo_t* info, void* context) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  const std::uintptr_t begin = g_range_begin.load();
  if (begin != 0 && address >= begin && address - begin < static_cast<std::uintptr_t>(kRangeBytes)) write_address(address);
  if ((g_before.sa_flags & SA_SIGINFO) != 0 && g_before.sa_sigaction != nullptr) {
    g_before.sa_sigaction(signal, info, context);
  } else if (g_before.sa_handler != SIG_DFL && g_before.sa_handler != SIG_IGN) {
    g_before.sa_handler(signal);
  } else {
    sigaction(signal, &g_before, nullptr);  // the access faults again, without us
  }
}

std::int64_t rounded_up(std::int64_t value, std::int64_t to) { return (value + to - 1) / to * to; }

/// With the gap behind it, which keeps neighbours apart: what is written beyond a block's end is found, not another tensor.
std::int64_t span_of(std::int64_t size_bytes) { return rounded_up(size_bytes, Heap::kAlignment) + Heap::kAlignment; }

}  // namespace

Heap& heap() {
  static Heap* const value = new Heap;  // never destroyed: queues of static objects may outlive it
  return *value;
}

Heap::Heap() {
  void* const range = mmap(nullptr, kRangeBytes + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) throw GpuError("emulated GPU: no address range of 64 GiB");
  const auto begin = reinterpret_cast<std::uintptr_t>(range), past = begin % static_cast<std::uintptr_t>(kPage);
  base_ = static_cast<std::byte*>(range) + (past == 0 ? 0 : static_cast<std::uintptr_t>(kPage) - past);
  madvise(base_, kRangeBytes, MADV_DONTDUMP);
  madvise(base_, kRangeBytes, MADV_HUGEPAGE);
  g_range_begin = reinterpret_cast<std::uintptr_t>(base_);
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &g_before);
}

std::byte* Heap::allocate(std::int64_t size_bytes) {
  const std::int64_t span = span_of(size_bytes);
  const std::lock_guard lock(mutex_);
  std::int64_t offset = 0;
  if (const auto fits = by_size_.lower_bound({span, 0}); fits != by_size_.end()) {
    const auto [size, at] = *fits;
    by_size_.erase(fits);
    free_.erase(at);
    if (size > span) {
      free_.emplace(at + span, size - span);
      by_size_.emplace(size - span, at + span);
    }
    offset = at;
  } else {
    offset = end_;
    if (span > kRangeBytes - end_) throw IoError(fmt::format("emulated GPU: out of memory for {} bytes", size_bytes));
    const std::int64_t pages_before = rounded_up(end_, kPage);
    end_ += span;
    if (!protected_ || accesses_ > 0) protect(PROT_READ | PROT_WRITE, pages_before, rounded_up(end_, kPage));
  }
  blocks_.emplace(offset, size_bytes);
  if (under_address_sanitizer()) {
    __asan_poison_memory_region(base_ + offset, static_cast<std::size_t>(span));
    __asan_unpoison_memory_region(base_ + offset, static_cast<std::size_t>(size_bytes));
  }
  return base_ + offset;
}

void Heap::release(std::byte* block) noexcept {
  const std::lock_guard lock(mutex_);
  const auto entry = blocks_.find(block - base_);
  if (entry == blocks_.end()) return;
  std::int64_t offset = entry->first, size = span_of(entry->second);
  if (under_address_sanitizer()) __asan_poison_memory_region(block, static_cast<std::size_t>(entry->second));
  blocks_.erase(entry);
  auto after = free_.lower_bound(offset);
  if (after != free_.end() && offset + size == after->first) {
    size += after->second;
    by_size_.erase({after->second, after->first});
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == offset) {
      by_size_.erase({before->second, before->first});
      offset = before->first;
      size += before->second;
      free_.erase(before);
    }
  }
  free_.emplace(offset, size);
  by_size_.emplace(size, offset);
}

std::int64_t Heap::size_bytes(const std::byte* block) const {
  const std::lock_guard lock(mutex_);
  const auto entry = blocks_.find(block - base_);
  return entry == blocks_.end() ? -1 : entry->second;
}

// The gap is not to be touched under the address sanitizer, which reports whoever does.
void Heap::poison(std::byte* block, std::int64_t size_bytes) {
  std::memset(block, kPoison, static_cast<std::size_t>(under_address_sanitizer() ? size_bytes : span_of(size_bytes)));
}

void Heap::check_gap(const std::byte* block, std::int64_t size_bytes) {
  if (under_address_sanitizer()) return;
  for (std::int64_t i = size_bytes; i < span_of(size_bytes); ++i) {
    if (block[i] != std::byte{kPoison}) {
      throw GpuError(fmt::format("emulated GPU: something has been written to byte {} of the block of {} bytes at {}", i,
                                 size_bytes, static_cast<const void*>(block)));
    }
  }
}

bool Heap::holds(const void* address) const noexcept {
  const auto* const at = static_cast<const std::byte*>(address);
  return at >= base_ && at < base_ + kRangeBytes;
}

bool Heap::holds_all(const void* address, std::int64_t size_bytes) const {
  if (!holds(address)) return false;
  const std::int64_t offset = static_cast<const std::byte*>(address) - base_;
  const std::lock_guard lock(mutex_);
  auto block = blocks_.upper_bound(offset);
  if (block == blocks_.begin()) return false;
  --block;
  return offset + size_bytes <= block->first + block->second;
}

void Heap::protect(int protection, std::int64_t from, std::int64_t end) const {
  if (end > from) mprotect(base_ + from, static_cast<std::size_t>(end - from), protection);
}

void Heap::open() {
  const std::lock_guard lock(mutex_);
  if (accesses_++ == 0 && protected_) protect(PROT_READ | PROT_WRITE, 0, rounded_up(end_, kPage));
}

void Heap::close() {
  const std::lock_guard lock(mutex_);
  if (--accesses_ == 0 && protected_) protect(PROT_NONE, 0, rounded_up(end_, kPage));
}

void Heap::set_protected(bool on) {
  const std::lock_guard lock(mutex_);
  protected_ = on;
  if (accesses_ == 0) protect(on ? PROT_NONE : PROT_READ | PROT_WRITE, 0, rounded_up(end_, kPage));
}

}  // namespace tandem::simt_gpu
