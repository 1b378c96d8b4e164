// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_parallel/gradient_sync.h"

#include <algorithm>
#include <span>
#include <vector>

#include <fmt/format.h>

namespace tandem {
namespace {

void to_half(std::span<const float> values, std::span<std::uint16_t> wire, float factor) {
  for (std::size_t i = 0; i < values.size(); ++i) wire[i] = to_f16_bits(values[i] * factor);
}

void from_half(std::span<const std::uint16_t> wire, std::span<float> values, float factor) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = from_f16_bits(wire[i]) * factor;
}

TensorView half_view(std::span<std::uint16_t> bits) {
  return {bits.data(), DType::f16, {static_cast<std::int64_t>(bits.size())}};
}

// What a sum formed in half precision gives: infinity where it passes 65504, or zero where a value was divided below 2^-24.
void planted_half_sum(const RankContext& context, Communicator& comm, std::span<float> values, const CommOptions& options) {
  const auto ranks = static_cast<float>(comm.size());
  const bool divides_first = context.pitfalls.on(Pitfall::half_reduction_divides_before_summing);
  std::vector<std::uint16_t> wire(values.size());
  to_half(values, wire, divides_first ? 1.0F / ranks : 1.0F);
  all_reduce(comm, half_view(wire), options);
  from_half(wire, values, divides_first ? 1.0F : 1.0F / ranks);
}

}  // namespace

void all_reduce_mean_f16(const RankContext& context, Communicator& comm, TensorView values, const CommOptions& options) {
  // The sums are the host's: on a device the exchange is one of copies.
  Memory& memory = context.kernels->memory();
  HostView host(memory, values, Access::update);
  const std::span<float> elements = host.view().as<float>();
  // The sum must not be formed in half precision, nor may a value be divided before it is summed.
  if (context.pitfalls.on(Pitfall::half_reduction_sums_before_dividing) ||
      context.pitfalls.on(Pitfall::half_reduction_divides_before_summing)) {
    planted_half_sum(context, comm, elements, options);
    return;
  }
  const int ranks = comm.size();
  std::vector<std::int64_t> counts;
  for (int r = 0; r < ranks; ++r) counts.push_back(balanced_part(values.num_elements(), ranks, r).size());
  const Interval mine = balanced_part(values.num_elements(), ranks, comm.rank());
  const std::vector<std::int64_t> mine_from_each(static_cast<std::size_t>(ranks), mine.size());

  const Arena::Buffer wire_memory = context.arena->allocate(DType::u16, values.shape(), MemoryCategory::communication);
  const Arena::Buffer parts_memory = context.arena->allocate(DType::u16, {ranks * mine.size()}, MemoryCategory::communication);
  const HostView wire_view(memory, wire_memory.view(DType::u16, values.shape()), Access::write);
  const HostView parts_view(memory, parts_memory.view(DType::u16, {ranks * mine.size()}), Access::write);
  const std::span<std::uint16_t> wire = wire_view.view().as<std::uint16_t>();
  const std::span<std::uint16_t> parts = parts_view.view().as<std::uint16_t>();
  to_half(elements, wire, 1.0F);
  comm.all_to_all(half_view(wire), counts, half_view(parts), mine_from_each, options).wait_host();
  const auto size = static_cast<std::size_t>(mine.size());
  const std::span<std::uint16_t> own = wire.subspan(static_cast<std::size_t>(mine.begin), size);
  for (std::size_t i = 0; i < size; ++i) {
    float sum = 0.0F;
    for (std::size_t r = 0; r < static_cast<std::size_t>(ranks); ++r) sum += from_f16_bits(parts[r * size + i]);
    own[i] = to_f16_bits(sum / static_cast<float>(ranks));
  }
  comm.all_gather(half_view(own), half_view(wire), counts, options).wait_host();
  from_half(wire, elements, 1.0F);
}

Work GradientSync::start(Communicator& replicas, TensorView gradients, int bucket_index, Progress progress) {
  const CommOptions options = {Purpose::gradient, fmt::format("gradient bucket {}", bucket_index), progress};
  // Gradients that are 16 bits wide anyway are summed in fp32 by the communicator and rounded once.
  if (numerics_.reduce != DType::f16 || numerics_.accumulate == DType::f16) return replicas.all_reduce(gradients, options);
  // The sum of shares is the mean of `ranks` times each share, which has the size of a whole batch's gradient.
  context_.kernels->scale(gradients, replicas.size());
  all_reduce_mean_f16(context_, replicas, gradients, options);
  return {};
}

}  // namespace tandem
