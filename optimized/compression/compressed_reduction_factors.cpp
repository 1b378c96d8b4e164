// SPDX-License-Identifier: Apache-2.0
// Sums of low-rank factors.
#include <algorithm>
#include <cmath>
#include <limits>

#include "optimized/compression/compressed_reduction.h"
#include "optimized/compression/power_sgd.h"

namespace tandem {
namespace {

bool all_finite(std::span<const float> values) {
  return std::ranges::all_of(values, [](float value) { return std::isfinite(value); });
}

// Hands out the next `count` elements of a buffer.
template <class T>
std::span<T> take(std::span<T>& rest, std::int64_t count) {
  const std::span<T> taken = rest.first(static_cast<std::size_t>(count));
  rest = rest.subspan(static_cast<std::size_t>(count));
  return taken;
}

}  // namespace

// Calls use(tensor, its gradients, its left factor or all of it, its right factor) for each tensor of the bucket.
template <class Gradient, class Use>
void CompressedReduction::for_each_tensor(std::span<Gradient> gradients, std::span<float> left, std::span<float> right,
                                          const Use& use) const {
  const Interval tensors = options_.buckets[static_cast<std::size_t>(bucket_)].tensors;
  for (auto t = static_cast<std::size_t>(tensors.begin); t < static_cast<std::size_t>(tensors.end); ++t) {
    const CompressedTensor& tensor = options_.tensors[t];
    const bool coded = places_[t].coded;
    const std::int64_t rank = options_.config.rank;
    const std::span<Gradient> own = take(gradients, tensor.elements());
    take(gradients, tensor.padding);
    const std::span<float> own_left = take(left, coded ? rank * tensor.rows : tensor.elements());
    use(t, own, own_left, take(right, coded ? rank * tensor.columns : 0));
  }
}

PowerSgdShape CompressedReduction::shape_of(std::size_t tensor) const {
  return {options_.tensors[tensor].rows, options_.tensors[tensor].columns, options_.config.rank};
}

void CompressedReduction::reduce_power_sgd(Communicator& replicas, std::span<float> gradients) {
  std::int64_t left_elements = 0, right_elements = 0;
  const Interval tensors = options_.buckets[static_cast<std::size_t>(bucket_)].tensors;
  for (auto t = static_cast<std::size_t>(tensors.begin); t < static_cast<std::size_t>(tensors.end); ++t) {
    const PowerSgdShape shape = shape_of(t);
    left_elements += places_[t].coded ? shape.rank * shape.rows : shape.rows * shape.columns;
    right_elements += places_[t].coded ? shape.rank * shape.columns : 0;
  }
  const TensorView left_view = send_.view(DType::f32, {left_elements});
  const TensorView right_view = receive_.view(DType::f32, {right_elements});
  const std::span<float> left = left_view.as<float>(), right = right_view.as<float>();
  project_all(gradients, left, right);
  replicas.all_reduce(left_view, named("left factors")).wait_host();
  back_project_all(gradients, left, right);
  if (right_elements > 0) replicas.all_reduce(right_view, named("right factors")).wait_host();
  finish_power_sgd(gradients, left, right, replicas.size());
}

// What is not finite stays so in the sum of the factors, on all ranks.
void CompressedReduction::project_all(std::span<const float> gradients, std::span<float> left, std::span<float> right) {
  for_each_tensor(gradients, left, right, [&](std::size_t t, auto own, std::span<float> p, std::span<float>) {
    if (!places_[t].coded) {
      std::ranges::copy(own, p.begin());
      return;
    }
    ErrorFeedback::Piece piece;
    if (feedback_) piece = feedback_->begin(places_[t].residual, std::ssize(own));
    const bool finite = power_sgd_project(shape_of(t), own, piece.residual, start_of(starts_, t), piece.new_residual, p);
    if (!finite) std::ranges::fill(p, std::numeric_limits<float>::quiet_NaN());
  });
}

void CompressedReduction::back_project_all(std::span<const float> gradients, std::span<float> left, std::span<float> right) {
  for_each_tensor(gradients, left, right, [&](std::size_t t, auto own, std::span<float> p, std::span<float> q) {
    if (!places_[t].coded) return;
    const PowerSgdShape shape = shape_of(t);
    // C is where the next residual will be; without feedback it is the gradient.
    const std::span<float> c = feedback_ ? feedback_->next(places_[t].residual, std::ssize(own)) : std::span<float>();
    bool finite = all_finite(p);
    if (finite) power_sgd_orthogonalize(shape, p);
    finite = finite && power_sgd_back_project(shape, feedback_ ? std::span<const float>(c) : own, p, q);
    if (!finite) {
      std::ranges::fill(q, std::numeric_limits<float>::quiet_NaN());
    } else if (feedback_) {
      power_sgd_subtract(shape, p, q, c);
    }
  });
}

void CompressedReduction::finish_power_sgd(std::span<float> gradients, std::span<float> left, std::span<float> right, int ranks) {
  for_each_tensor(gradients, left, right, [&](std::size_t t, std::span<float> own, std::span<float> p, std::span<float> q) {
    if (!places_[t].coded) {
      std::ranges::copy(p, own.begin());
      return;
    }
    if (!all_finite(q)) {
      failed_ = true;
      std::ranges::fill(own, std::numeric_limits<float>::quiet_NaN());
      return;
    }
    const PowerSgdShape shape = shape_of(t);
    power_sgd_decompress(shape, p, q, own);
    for (float& value : q) value /= static_cast<float>(ranks);
    const std::span<float> next = start_of(next_starts_, t);
    std::ranges::copy(start_of(starts_, t), next.begin());
    power_sgd_next_start(shape, q, next);
  });
}

}  // namespace tandem
