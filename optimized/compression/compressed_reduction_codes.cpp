// SPDX-License-Identifier: Apache-2.0
// Sums of block codes at owners, and of single elements.
#include <algorithm>
#include <cstring>
#include <limits>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/compression/compressed_reduction.h"
#include "optimized/compression/random_k.h"

namespace tandem {
namespace {

std::span<std::byte> bytes_of(const Arena::Buffer& buffer, std::int64_t first, std::int64_t count) {
  return std::span(static_cast<std::byte*>(buffer.data()) + first, static_cast<std::size_t>(count));
}

TensorView byte_view(std::span<std::byte> bytes) { return {bytes.data(), DType::u8, {static_cast<std::int64_t>(bytes.size())}}; }

template <class T>
std::span<T> part(std::span<T> all, std::int64_t first, std::int64_t count) {
  return all.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
}

// Leaves a residual as it is.
void keep(ErrorFeedback& feedback, std::int64_t first, std::int64_t count) {
  const ErrorFeedback::Piece piece = feedback.begin(first, count);
  std::ranges::copy(piece.residual, piece.new_residual.begin());
}

void fill_with_nan(std::span<std::byte> numbers) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (std::size_t at = 0; at + sizeof nan <= numbers.size(); at += sizeof nan) {
    std::memcpy(numbers.data() + at, &nan, sizeof nan);
  }
}

}  // namespace

CommOptions CompressedReduction::named(std::string_view what) const {
  CommOptions options{Purpose::gradient, fmt::format("gradient bucket {}, {} {}", bucket_, options_.config.codec, what)};
  options.step = static_cast<int>(step_);
  options.progress = progress_;
  return options;
}

CodecPosition CompressedReduction::position(const Segment& segment) const { return {step_, places_[segment.tensor].key}; }

void CompressedReduction::encode(const Segment& segment, std::span<const float> gradients, std::span<std::byte> payload) {
  const Codec& codec = *places_[segment.tensor].codec;
  const std::span<const float> own = part(gradients, segment.in_bucket, segment.elements);
  bool finite = false;
  if (feedback_) {
    const std::int64_t residual = places_[segment.tensor].residual + segment.in_tensor;
    finite = feedback_->compress(codec, residual, own, payload, position(segment));
  } else {
    finite =
        codec.compress({.gradient = own, .residual = {}, .new_residual = {}, .payload = payload, .position = position(segment)});
  }
  if (!finite) spoil(segment, payload);
  plant_before_sending(segment, payload);
}

// A code that decodes to NaN: the other ranks learn from it that the step is lost.
void CompressedReduction::spoil(const Segment& segment, std::span<std::byte> payload) {
  failed_ = true;
  std::ranges::fill(payload, std::byte{0});
  if (sums_at_owners(options_.config)) {
    const std::int64_t blocks = (segment.elements + options_.config.block - 1) / options_.config.block;
    fill_with_nan(payload.first(static_cast<std::size_t>(4 * blocks)));
    return;
  }
  const std::int64_t k = sent_elements(options_.config, segment.elements);
  const std::int64_t index_bytes = options_.config.codec == "top_k" ? 4 * k : 0;
  for (std::int32_t i = 0; i < k && index_bytes > 0; ++i)
    std::memcpy(payload.data() + 4 * static_cast<std::size_t>(i), &i, sizeof i);
  fill_with_nan(payload.subspan(static_cast<std::size_t>(index_bytes)));
}

void CompressedReduction::encode_sum(const Segment& segment, std::span<const float> sum, std::span<std::byte> payload) {
  const Codec& codec = *places_[segment.tensor].codec;
  bool finite = false;
  // What the second code leaves out belongs to no rank's gradient: without a residual of its own it is lost.
  if (sum_feedback_ && !options_.pitfalls.on(Pitfall::quantized_sum_without_server_feedback)) {
    finite = sum_feedback_->compress(codec, segment.sum_residual, sum, payload, position(segment));
  } else {
    if (sum_feedback_) keep(*sum_feedback_, segment.sum_residual, segment.elements);
    finite =
        codec.compress({.gradient = sum, .residual = {}, .new_residual = {}, .payload = payload, .position = position(segment)});
  }
  if (!finite) spoil(segment, payload);
  plant_before_sending(segment, payload);
}

void CompressedReduction::reduce_at_owners(Communicator& replicas, std::span<float> gradients, const Bucket& bucket) {
  const int ranks = replicas.size();
  const auto own = static_cast<std::size_t>(replicas.rank());
  std::int64_t payload_bytes = 0, own_begin = 0;
  for (std::size_t r = 0; r < bucket.parts.size(); ++r) {
    if (r == own) own_begin = payload_bytes;
    for (const Segment& segment : bucket.parts[r]) {
      encode(segment, gradients, bytes_of(send_, payload_bytes, segment.payload_bytes));
      payload_bytes += segment.payload_bytes;
    }
  }
  const std::int64_t own_bytes = bucket.part_bytes[own];
  const TensorView payload = byte_view(bytes_of(send_, 0, payload_bytes));
  const std::span<std::byte> received = bytes_of(receive_, 0, ranks * own_bytes);
  const std::vector<std::int64_t> from_each(static_cast<std::size_t>(ranks), own_bytes);
  replicas.all_to_all(payload, bucket.part_bytes, byte_view(received), from_each, named("parts")).wait_host();

  const std::span<std::byte> coded_sum = bytes_of(send_, own_begin, own_bytes);
  sum_parts(bucket, replicas.rank(), ranks, received, coded_sum);
  replicas.all_gather(byte_view(coded_sum), payload, bucket.part_bytes, named("sums")).wait_host();

  std::int64_t at = 0;
  for (const std::vector<Segment>& segments : bucket.parts) {
    for (const Segment& segment : segments) {
      places_[segment.tensor].codec->decompress(bytes_of(send_, at, segment.payload_bytes),
                                                part(gradients, segment.in_bucket, segment.elements), position(segment));
      at += segment.payload_bytes;
    }
  }
}

void CompressedReduction::sum_parts(const Bucket& bucket, int rank, int ranks, std::span<const std::byte> payloads,
                                    std::span<std::byte> coded) {
  const std::int64_t stride = bucket.part_bytes[static_cast<std::size_t>(rank)];
  std::int64_t at = 0;
  for (const Segment& segment : bucket.parts[static_cast<std::size_t>(rank)]) {
    const Codec& codec = *places_[segment.tensor].codec;
    const std::span<float> sum = sum_.view(DType::f32, {segment.elements}).as<float>();
    codec.decompress(part(payloads, at, segment.payload_bytes), sum, position(segment));
    for (int r = 1; r < ranks; ++r) {
      codec.decompress_accumulate(part(payloads, r * stride + at, segment.payload_bytes), sum, position(segment));
    }
    encode_sum(segment, sum, part(coded, at, segment.payload_bytes));
    at += segment.payload_bytes;
  }
}

void CompressedReduction::reduce_top_k(Communicator& replicas, std::span<float> gradients, const Bucket& bucket) {
  const std::int64_t stride = bucket.part_bytes.front();
  const std::span<std::byte> own = bytes_of(send_, 0, stride);
  const std::span<std::byte> all = bytes_of(receive_, 0, replicas.size() * stride);
  std::int64_t at = 0;
  for (const Segment& segment : bucket.parts.front()) {
    encode(segment, gradients, part(own, at, segment.payload_bytes));
    at += segment.payload_bytes;
  }
  const std::vector<std::int64_t> counts(static_cast<std::size_t>(replicas.size()), stride);
  replicas.all_gather(byte_view(own), byte_view(all), counts, named("elements")).wait_host();
  at = 0;
  for (const Segment& segment : bucket.parts.front()) {
    const Codec& codec = *places_[segment.tensor].codec;
    const std::span<float> sum = part(gradients, segment.in_bucket, segment.elements);
    codec.decompress(part(all, at, segment.payload_bytes), sum, position(segment));
    for (int r = 1; r < replicas.size(); ++r) {
      codec.decompress_accumulate(part(all, r * stride + at, segment.payload_bytes), sum, position(segment));
    }
    at += segment.payload_bytes;
  }
}

void CompressedReduction::reduce_random_k(Communicator& replicas, std::span<float> gradients, const Bucket& bucket) {
  const std::int64_t bytes = bucket.part_bytes.front();
  std::int64_t at = 0;
  for (const Segment& segment : bucket.parts.front()) {
    encode(segment, gradients, bytes_of(send_, at, segment.payload_bytes));
    at += segment.payload_bytes;
  }
  replicas.all_reduce(send_.view(DType::f32, {bytes / 4}), named("values")).wait_host();
  at = 0;
  for (const Segment& segment : bucket.parts.front()) {
    places_[segment.tensor].codec->decompress(bytes_of(send_, at, segment.payload_bytes),
                                              part(gradients, segment.in_bucket, segment.elements), position(segment));
    at += segment.payload_bytes;
  }
}

// Planted faults of packing; the residual that encode() has formed believes that everything was sent.
void CompressedReduction::plant_before_sending(const Segment& segment, std::span<std::byte> payload) const {
  if (options_.pitfalls.on(Pitfall::sparse_index_wraps) && options_.config.codec == "top_k") {
    // 16-bit indices, as wide as 16-bit values would be.
    for (std::size_t at = 0; at < payload.size() / 2; at += sizeof(std::int32_t)) {
      std::int32_t index;
      std::memcpy(&index, payload.data() + at, sizeof index);
      index &= std::numeric_limits<std::int16_t>::max();
      std::memcpy(payload.data() + at, &index, sizeof index);
    }
  }
  // Two elements share a byte: the last of an odd number has one alone.
  const bool odd = segment.elements % options_.config.block % 2 != 0;
  if (options_.pitfalls.on(Pitfall::last_nibble_dropped) && options_.config.codec == "int4" && odd) payload.back() = {};
}

// Planted: buckets of a size that does not divide evenly are sent as they are, and nobody is told.
bool CompressedReduction::falls_back(Communicator& replicas, TensorView gradients, const Bucket& bucket) {
  if (!options_.pitfalls.on(Pitfall::compression_not_active) || bucket.elements % replicas.size() == 0) return false;
  replicas.all_reduce(gradients, named("not compressed")).wait_host();
  for (const std::vector<Segment>& segments : bucket.parts) {
    for (const Segment& segment : segments) {
      if (feedback_) keep(*feedback_, places_[segment.tensor].residual + segment.in_tensor, segment.elements);
      if (segment.sum_residual >= 0) keep(*sum_feedback_, segment.sum_residual, segment.elements);
    }
  }
  return true;
}

}  // namespace tandem
