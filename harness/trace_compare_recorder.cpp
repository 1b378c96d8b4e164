// SPDX-License-Identifier: Apache-2.0
#include "harness/trace_compare_recorder.h"

#include <cstring>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

template <class T, class Convert>
std::vector<double> converted(const std::vector<std::byte>& bytes, Convert convert) {
  std::vector<double> values(bytes.size() / sizeof(T));
  for (std::size_t i = 0; i < values.size(); ++i) {
    T value;
    std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof(T));
    values[i] = convert(value);
  }
  return values;
}

double widened(double value) { return value; }

}  // namespace

TraceSink TraceRecorder::sink(int rank) {
  return [this, rank](const TracedTensor& traced) {
    TraceEntry entry;
    entry.name = traced.name;
    entry.kind = traced.name.starts_with("d.") ? TraceKind::activation_gradient : TraceKind::activation;
    entry.shard = traced.shard;
    entry.rank = rank;
    entry.micro_batch = traced.micro_batch;
    append(std::move(entry), traced.values);
  };
}

void TraceRecorder::append(TraceEntry entry, TensorView values) {
  TANDEM_CHECK(values.num_elements() == num_elements(entry), fmt::format("{} of rank {}: {} values for a shard of {}", entry.name,
                                                                         entry.rank, values.num_elements(), num_elements(entry)));
  entry.shard.dtype = values.dtype();
  std::vector<std::byte> bytes(static_cast<std::size_t>(values.size_bytes()));
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  const std::lock_guard lock(mutex_);
  entries_.push_back(std::move(entry));
  bytes_.push_back(std::move(bytes));
}

std::vector<double> TraceRecorder::values(std::size_t index) const {
  const std::vector<std::byte>& bytes = bytes_.at(index);
  switch (entries_[index].shard.dtype) {
    case DType::f64: return converted<double>(bytes, widened);
    case DType::f32: return converted<float>(bytes, widened);
    case DType::f16: return converted<std::uint16_t>(bytes, from_f16_bits);
    case DType::bf16: return converted<std::uint16_t>(bytes, from_bf16_bits);
    default: break;
  }
  TANDEM_CHECK(false, fmt::format("{} is not traced as floating numbers", entries_[index].name));
}

}  // namespace tandem
