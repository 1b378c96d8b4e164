// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/batch.h"
#include "core/pitfall.h"
#include "core/plan.h"
#include "optimized/comm/communicator.h"
#include "optimized/compression/codec.h"
#include "optimized/compression/compressed_bytes.h"
#include "optimized/compression/error_feedback.h"
#include "optimized/compression/power_sgd.h"
#include "optimized/memory/arena.h"

namespace tandem {

/// A run of neighbouring tensors whose gradients lie in one piece and are reduced by one call, and the group of ranks that does.
struct CompressedBucket {
  Interval tensors;
  int ranks = 1;  ///< 1: never reduced
  int rank = 0;   ///< this rank's place among them
};

struct CompressedReductionOptions {
  CompressionConfig config;
  std::uint64_t seed = 1;                 ///< of random_k's elements and power_sgd's first factors; the same on all ranks
  std::vector<CompressedTensor> tensors;  ///< in the order of the gradient buffer
  std::vector<CompressedBucket> buckets;
  PitfallSet pitfalls = {};
};

/// Sums gradients over ranks that send lossy codes of them. Every tensor is coded by itself: its blocks begin with it, the k
/// largest are its own, so that sums depend on no bucket's bounds, and copies of a tensor that different groups reduce stay
/// copies.
///
///   int8, int4, sign   each rank of the group sums one part of the bucket, a run of whole blocks (balanced_part of all blocks).
///                      all_to_all of coded parts; the owner decodes and adds them in rank order in fp32, adds the residual of
///                      the sum that it keeps, and codes the result; all_gather of the coded sums
///   top_k              all_gather of indices (int32) and values; every rank adds in rank order
///   random_k           all_reduce of the values at the elements that all ranks draw alike
///   power_sgd          all_reduce of the left factors and of what is not coded, all_reduce of the right factors
///
/// A step is begin_step(), reduce() of every bucket with ranks > 1, finish_step(). With error feedback, what a rank's code left
/// out of its gradient, and an owner's code out of the sum, is added in the next step. What is lost nowhere:
///   sum + residual of the sum + residuals of all ranks = gradients of all ranks + those residuals before
/// (reference/compressed_reduction.h: the definition, bit for bit but for power_sgd, whose products round in another order).
///
/// A gradient that no code exists for (compression.h: NaN, infinity, overflow) makes at least one element of its tensor's sum NaN
/// on every rank, so that a norm that is taken of the result is NaN everywhere: no other agreement is needed.
///
/// Memory: residuals 8 bytes an element and 8 of each own element of sums, category gradients; power_sgd's right factors twice,
/// same category; buffers for the largest bucket, category communication. All of it is allocated by the constructor. reduce()
/// may be called by another thread than the rest, one call at a time.
class CompressedReduction {
 public:
  /// The arena must outlive this. Throws ContractError on a bucket outside of the tensors, or an unknown codec.
  CompressedReduction(Arena& arena, CompressedReductionOptions options);
  ~CompressedReduction();

  [[nodiscard]] const CompressedReductionOptions& options() const noexcept { return options_; }

  /// `gradient_scale`: what the loss of this step is multiplied by. Residuals are in units of the scaled loss: where the scale is
  /// another than in the step that left them they are multiplied by the quotient (exact where it is a power of two).
  void begin_step(std::int64_t step, double gradient_scale);
  /// gradients (fp32, all of the bucket) <- their sum over `replicas`, the group of the bucket. Collective; blocks. `progress`:
  /// whose thread, and lane of the timeline, the communication is.
  void reduce(Communicator& replicas, TensorView gradients, int bucket, Progress progress = Progress::on_wait);
  /// `applied`: the step was not skipped, and its gradients were finite; the same on all ranks. Otherwise all residuals and
  /// factors stay as they were, bit for bit.
  void finish_step(bool applied);

  /// Sees each bucket before and after its reduction, on the thread that calls reduce(); for checks, costs a copy.
  using Observer = std::function<void(int bucket, std::span<const float> before, std::span<const float> after)>;
  void set_observer(Observer observer) { observer_ = std::move(observer); }

  // State between steps, by tensor; what a checkpoint keeps. Empty where the codec or a plan without feedback has none.
  struct OwnedResidual {
    std::int64_t first = 0;  ///< element of the tensor
    std::span<const float> values;
  };
  [[nodiscard]] double gradient_scale() const noexcept { return gradient_scale_; }
  [[nodiscard]] std::span<const float> residual(std::string_view name) const;
  [[nodiscard]] std::vector<OwnedResidual> sum_residuals(std::string_view name) const;
  [[nodiscard]] std::span<const float> start(std::string_view name) const;
  void set_gradient_scale(double scale) noexcept { gradient_scale_ = scale; }
  void restore_residual(std::string_view name, std::span<const float> values);
  /// Values of the whole tensor, of which this rank takes what it owns.
  void restore_sum_residual(std::string_view name, std::span<const float> values);
  void restore_start(std::string_view name, std::span<const float> values);

 private:
  // Part of a tensor that one call of a codec codes.
  struct Segment {
    std::size_t tensor;
    std::int64_t in_tensor, in_bucket;  // first element
    std::int64_t elements;
    std::int64_t payload_bytes;
    std::int64_t sum_residual = -1;  // first element in sum_feedback_, where this rank owns it
  };
  // What reduce() does with a bucket, and what it needs for it.
  struct Bucket {
    std::int64_t elements = 0;
    std::vector<std::vector<Segment>> parts;  // [ranks] at owners; else [1]
    std::vector<std::int64_t> part_bytes;     // [ranks] at owners; else [1]
  };
  // What belongs to a tensor.
  struct Place {
    bool coded = false;          // and reduced
    std::int64_t residual = -1;  // first element in feedback_
    std::int64_t start = -1;     // first element in starts_
    std::int64_t key = 0;
    std::unique_ptr<Codec> codec;
  };

  void place_tensors(Arena& arena);
  [[nodiscard]] Bucket laid_out(const CompressedBucket& bucket) const;
  void place_sums(Arena& arena);
  void allocate_buffers(Arena& arena);
  [[nodiscard]] std::size_t index_of(std::string_view name) const;
  [[nodiscard]] std::span<float> start_of(const Arena::Buffer& starts, std::size_t tensor) const;

  void encode(const Segment& segment, std::span<const float> gradients, std::span<std::byte> payload);
  void encode_sum(const Segment& segment, std::span<const float> sum, std::span<std::byte> payload);
  [[nodiscard]] CodecPosition position(const Segment& segment) const;
  void reduce_at_owners(Communicator& replicas, std::span<float> gradients, const Bucket& bucket);
  void sum_parts(const Bucket& bucket, int rank, int ranks, std::span<const std::byte> payloads, std::span<std::byte> coded);
  void reduce_top_k(Communicator& replicas, std::span<float> gradients, const Bucket& bucket);
  void reduce_random_k(Communicator& replicas, std::span<float> gradients, const Bucket& bucket);
  void reduce_power_sgd(Communicator& replicas, std::span<float> gradients);
  void project_all(std::span<const float> gradients, std::span<float> left, std::span<float> right);
  void back_project_all(std::span<const float> gradients, std::span<float> left, std::span<float> right);
  void finish_power_sgd(std::span<float> gradients, std::span<float> left, std::span<float> right, int ranks);
  template <class Gradient, class Use>
  void for_each_tensor(std::span<Gradient> gradients, std::span<float> left, std::span<float> right, const Use& use) const;
  [[nodiscard]] PowerSgdShape shape_of(std::size_t tensor) const;
  void spoil(const Segment& segment, std::span<std::byte> payload);
  void plant_before_sending(const Segment& segment, std::span<std::byte> payload) const;
  [[nodiscard]] bool falls_back(Communicator& replicas, TensorView gradients, const Bucket& bucket);
  [[nodiscard]] CommOptions named(std::string_view what) const;

  CompressedReductionOptions options_;
  std::vector<Place> places_;  // [tensors]
  std::vector<Bucket> buckets_;
  std::unique_ptr<ErrorFeedback> feedback_, sum_feedback_;
  Arena::Buffer starts_, next_starts_;
  Arena::Buffer send_, receive_, sum_;
  std::int64_t start_elements_ = 0;
  std::int64_t step_ = 0;
  int bucket_ = 0;  // in work, as is:
  Progress progress_ = Progress::on_wait;
  double gradient_scale_ = 1;
  bool failed_ = false;  // this step, on this rank
  Observer observer_;
};

}  // namespace tandem
