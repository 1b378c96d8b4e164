// SPDX-License-Identifier: Apache-2.0
#include "optimized/recovery/fault_effects.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"
#include "core/rng.h"
#include "optimized/checkpoint/catalogue.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

// Where sign, exponent and fraction lie in an element.
struct FloatLayout {
  std::size_t bytes;
  int fraction_bits, exponent_bits;
};

FloatLayout layout_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::f64: return {8, 52, 11};
    case DType::f32: return {4, 23, 8};
    case DType::f16: return {2, 10, 5};
    case DType::bf16: return {2, 7, 8};
    default: return {0, 0, 0};
  }
}

class FloatBits {
 public:
  explicit FloatBits(TensorView values) noexcept
      : data_(static_cast<std::byte*>(values.data())), count_(values.num_elements()), layout_(layout_of(values.dtype())) {}

  [[nodiscard]] bool empty() const noexcept { return count_ == 0 || layout_.bytes == 0; }
  [[nodiscard]] std::int64_t middle() const noexcept { return count_ / 2; }
  [[nodiscard]] std::int64_t count() const noexcept { return count_; }
  [[nodiscard]] int exponent_bits() const noexcept { return layout_.exponent_bits; }

  [[nodiscard]] std::uint64_t load(std::int64_t element) const noexcept {
    std::uint64_t bits = 0;  // this machine's bytes go from low to high
    std::memcpy(&bits, data_ + static_cast<std::size_t>(element) * layout_.bytes, layout_.bytes);
    return bits;
  }
  void store(std::int64_t element, std::uint64_t bits) noexcept {
    std::memcpy(data_ + static_cast<std::size_t>(element) * layout_.bytes, &bits, layout_.bytes);
  }
  [[nodiscard]] std::uint64_t exponent(std::int64_t element) const noexcept {
    return load(element) >> layout_.fraction_bits & ((std::uint64_t{1} << layout_.exponent_bits) - 1);
  }
  void turn_exponent(std::int64_t element, int bit) noexcept {
    store(element, load(element) ^ std::uint64_t{1} << (layout_.fraction_bits + bit));
  }
  void make_nan(std::int64_t element) noexcept {
    const std::uint64_t exponent_and_quiet_bit = (std::uint64_t{2} << layout_.exponent_bits) - 1;
    store(element, exponent_and_quiet_bit << (layout_.fraction_bits - 1));
  }

 private:
  std::byte* data_;
  std::int64_t count_;
  FloatLayout layout_;
};

// A restarted run must take it for the same data: its identity is that of what it poisons.
class PoisonedSource final : public WrappedSource {
 public:
  PoisonedSource(const BatchSource& inner, std::set<std::int64_t> batches) : WrappedSource(inner), batches_(std::move(batches)) {}

  [[nodiscard]] Batch training_rows(std::int64_t step, std::int64_t global_rows, Interval rows) const override {
    Batch batch = inner().training_rows(step, global_rows, rows);
    if (!batches_.contains(step)) return batch;
    for (std::int64_t row = 0; row < batch.rows; ++row) {
      // However the rows are dealt, each has its own garbage.
      const std::int64_t id = batch.row_ids[static_cast<std::size_t>(row)];
      CounterRng rng(static_cast<std::uint64_t>(step), fmt::format("poisoned row {}", id));
      const auto draw = [&] { return static_cast<std::int32_t>(rng.next_below(static_cast<std::uint64_t>(vocabulary()))); };
      for (std::int64_t t = row * batch.sequence; t < (row + 1) * batch.sequence; ++t) {
        const auto at = static_cast<std::size_t>(t);
        batch.ids[at] = draw();
        if (batch.targets[at] != kIgnoredTarget) batch.targets[at] = draw();
      }
    }
    return batch;
  }
  [[nodiscard]] std::string describe() const override {
    return fmt::format("{}, {} batches of it poisoned", inner().describe(), batches_.size());
  }

 private:
  std::set<std::int64_t> batches_;
};

class FillingDisk final : public WrappedFiles {
 public:
  FillingDisk(FileOperations& inner, const std::atomic<bool>& is_full) : WrappedFiles(inner), is_full_(is_full) {}

  void write(int descriptor, const fs::path& file, std::span<const std::byte> bytes) override {
    if (is_full_) {
      throw IoError(fmt::format("cannot write {}: {}", file.string(), std::generic_category().message(ENOSPC)));
    }
    WrappedFiles::write(descriptor, file, bytes);
  }

 private:
  const std::atomic<bool>& is_full_;
};

}  // namespace

void turn_exponent_bit(TensorView values, FlipStrength strength) noexcept {
  FloatBits bits(values);
  if (bits.empty()) return;
  const int top = bits.exponent_bits() - 1;
  // Below 1 the top bit of the exponent is clear and not all others are set, so that no turned bit makes infinity of it.
  const std::uint64_t one = (std::uint64_t{1} << top) - 1;
  std::int64_t element = bits.middle();
  const auto is_good = [&](std::int64_t e) { return bits.exponent(e) > 0 && bits.exponent(e) < one; };
  for (std::int64_t i = 1; i < bits.count() && !is_good(element); ++i) element = (bits.middle() + i) % bits.count();
  int bit = top;
  if (is_good(element) && strength == FlipStrength::subtle) {
    for (bit = top - 1; (bits.exponent(element) >> bit & 1) != 0;) --bit;
  }
  if (!is_good(element)) {
    element = bits.middle();
    if (bits.exponent(element) == one) bit = top - 1;
  }
  bits.turn_exponent(element, bit);
}

void put_nan(TensorView values) noexcept {
  FloatBits bits(values);
  if (!bits.empty()) bits.make_nan(bits.middle());
}

const OwnedPart& part_to_strike(const ParameterStore& store) {
  TANDEM_CHECK(!store.parts().empty(), "this rank keeps no parameters");
  const OwnedPart* best = nullptr;
  const auto weight = [&](const OwnedPart& part) {
    const bool is_in_block = store.spec(part.parameter).name.starts_with("h.");
    return std::pair(is_in_block, part.elements.size());
  };
  for (const OwnedPart& part : store.parts()) {
    if (best == nullptr || weight(part) > weight(*best)) best = &part;
  }
  return *best;
}

fs::path shard_to_corrupt(const fs::path& folder) {
  std::error_code ignored;
  if (!fs::is_directory(folder, ignored)) return {};
  for (const CheckpointEntry& entry : list_checkpoints(folder)) {
    if (!fs::exists(entry.folder / kManifestName, ignored)) continue;
    fs::path largest;
    std::uintmax_t most_bytes = 0;
    for (const fs::directory_entry& file : fs::directory_iterator(entry.folder)) {
      const bool is_shard = file.path().filename().string().starts_with("shard-");
      if (!is_shard || file.file_size() < most_bytes) continue;
      const bool is_first_of_equal = file.file_size() > most_bytes || largest.empty() || file.path() < largest;
      if (is_first_of_equal) largest = file.path();
      most_bytes = file.file_size();
    }
    if (!largest.empty()) return largest;
  }
  return {};
}

void turn_middle_bit(const fs::path& file) {
  const auto at = static_cast<off_t>(fs::file_size(file) / 2);
  const int descriptor = ::open(file.c_str(), O_RDWR | O_CLOEXEC);
  unsigned char byte = 0;
  bool is_good = descriptor >= 0 && ::pread(descriptor, &byte, 1, at) == 1;
  byte ^= 0x10U;
  is_good = is_good && ::pwrite(descriptor, &byte, 1, at) == 1;
  const int reason = errno;
  if (descriptor >= 0) ::close(descriptor);
  if (!is_good) throw IoError(fmt::format("cannot turn a bit of {}: {}", file.string(), std::generic_category().message(reason)));
}

std::unique_ptr<BatchSource> make_poisoned(const BatchSource& inner, std::set<std::int64_t> batches) {
  return std::make_unique<PoisonedSource>(inner, std::move(batches));
}

std::unique_ptr<FileOperations> make_disk(FileOperations& inner, const std::atomic<bool>& is_full) {
  return std::make_unique<FillingDisk>(inner, is_full);
}

}  // namespace tandem
