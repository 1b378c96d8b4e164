// SPDX-License-Identifier: Apache-2.0
// What a rank keeps between steps, and where. compressed_reduction_codes.cpp and _factors.cpp have the sums.
#include "optimized/compression/compressed_reduction.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/compression/block_quantize.h"
#include "optimized/compression/power_sgd.h"
#include "optimized/compression/random_k.h"
#include "optimized/compression/sign.h"
#include "optimized/compression/top_k.h"

namespace tandem {
namespace {

std::unique_ptr<Codec> codec_of(const CompressedReductionOptions& options, std::int64_t elements) {
  const CompressionConfig& config = options.config;
  if (config.codec == "int8") return std::make_unique<BlockQuantizeCodec>(8, config.block);
  if (config.codec == "int4") return std::make_unique<BlockQuantizeCodec>(4, config.block);
  if (config.codec == "sign") return std::make_unique<SignCodec>(config.block);
  const std::int64_t k = sent_elements(config, elements);
  if (config.codec == "top_k") return std::make_unique<TopKCodec>(k);
  if (config.codec == "random_k") return std::make_unique<RandomKCodec>(k, options.seed);
  TANDEM_CHECK(config.codec == "power_sgd", fmt::format("no codec '{}'", config.codec));
  return nullptr;
}

std::string sum_name(const CompressedTensor& tensor, std::int64_t first) { return fmt::format("{} from {}", tensor.name, first); }

}  // namespace

CompressedReduction::CompressedReduction(Arena& arena, CompressedReductionOptions options) : options_(std::move(options)) {
  place_tensors(arena);
  for (const CompressedBucket& bucket : options_.buckets) buckets_.push_back(laid_out(bucket));
  if (options_.config.error_feedback && sums_at_owners(options_.config)) place_sums(arena);
  allocate_buffers(arena);
}

CompressedReduction::~CompressedReduction() = default;

void CompressedReduction::place_tensors(Arena& arena) {
  places_.resize(options_.tensors.size());
  for (const CompressedBucket& bucket : options_.buckets) {
    TANDEM_CHECK(bucket.tensors.begin >= 0 && bucket.tensors.end <= std::ssize(places_) && bucket.rank < bucket.ranks,
                 fmt::format("bucket of tensors [{}, {}) of {}, rank {} of {}", bucket.tensors.begin, bucket.tensors.end,
                             places_.size(), bucket.rank, bucket.ranks));
    for (auto t = static_cast<std::size_t>(bucket.tensors.begin); t < static_cast<std::size_t>(bucket.tensors.end); ++t) {
      places_[t].coded = bucket.ranks > 1 && is_coded(options_.config, options_.tensors[t]);
    }
  }
  std::vector<ResidualTensor> layout;
  std::int64_t residuals = 0;
  for (std::size_t t = 0; t < places_.size(); ++t) {
    const CompressedTensor& tensor = options_.tensors[t];
    Place& place = places_[t];
    if (!place.coded) continue;
    place.key = random_k_key(tensor.name);
    place.codec = codec_of(options_, tensor.elements());
    place.residual = std::exchange(residuals, residuals + tensor.elements());
    layout.push_back({tensor.name, tensor.elements()});
    if (place.codec == nullptr) {
      place.start = std::exchange(start_elements_, start_elements_ + options_.config.rank * tensor.columns);
    }
  }
  if (options_.config.error_feedback) feedback_ = std::make_unique<ErrorFeedback>(arena, std::move(layout));
  if (start_elements_ == 0) return;
  starts_ = arena.allocate(DType::f32, {start_elements_}, MemoryCategory::gradients);
  next_starts_ = arena.allocate(DType::f32, {start_elements_}, MemoryCategory::gradients);
  for (std::size_t t = 0; t < places_.size(); ++t) {
    const CompressedTensor& tensor = options_.tensors[t];
    if (places_[t].start < 0) continue;
    power_sgd_start({tensor.rows, tensor.columns, options_.config.rank}, options_.seed, tensor.name, start_of(starts_, t));
  }
}

// At owners: the blocks of all tensors of the bucket are dealt in order, so that a part begins and ends between blocks.
CompressedReduction::Bucket CompressedReduction::laid_out(const CompressedBucket& bucket) const {
  const bool at_owners = sums_at_owners(options_.config);
  const std::int64_t block = options_.config.block;
  Bucket result;
  std::int64_t blocks = 0;
  for (std::int64_t t = bucket.tensors.begin; t < bucket.tensors.end; ++t) {
    blocks += (options_.tensors[static_cast<std::size_t>(t)].elements() + block - 1) / block;
  }
  const int parts = at_owners ? bucket.ranks : 1;
  result.parts.resize(static_cast<std::size_t>(parts));
  result.part_bytes.resize(static_cast<std::size_t>(parts));
  std::int64_t block_before = 0;
  for (auto t = static_cast<std::size_t>(bucket.tensors.begin); t < static_cast<std::size_t>(bucket.tensors.end); ++t) {
    const std::int64_t elements = options_.tensors[t].elements();
    const std::int64_t own_blocks = (elements + block - 1) / block;
    for (int part = 0; part < parts && places_[t].codec != nullptr; ++part) {
      const Interval dealt = balanced_part(blocks, parts, part);
      const std::int64_t begin = std::clamp<std::int64_t>(dealt.begin - block_before, 0, own_blocks) * block;
      const std::int64_t end = std::min(std::clamp<std::int64_t>(dealt.end - block_before, 0, own_blocks) * block, elements);
      const Interval piece = at_owners ? Interval{begin, end} : Interval{0, elements};
      if (piece.size() <= 0) continue;
      const std::int64_t bytes = places_[t].codec->payload_bytes(piece.size());
      result.parts[static_cast<std::size_t>(part)].push_back(
          {t, piece.begin, result.elements + piece.begin, piece.size(), bytes});
      result.part_bytes[static_cast<std::size_t>(part)] += bytes;
    }
    block_before += own_blocks;
    result.elements += elements + options_.tensors[t].padding;
  }
  return result;
}

void CompressedReduction::place_sums(Arena& arena) {
  std::vector<ResidualTensor> layout;
  std::int64_t before = 0;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    if (options_.buckets[b].ranks == 1) continue;
    for (Segment& segment : buckets_[b].parts[static_cast<std::size_t>(options_.buckets[b].rank)]) {
      segment.sum_residual = std::exchange(before, before + segment.elements);
      layout.push_back({sum_name(options_.tensors[segment.tensor], segment.in_tensor), segment.elements});
    }
  }
  sum_feedback_ = std::make_unique<ErrorFeedback>(arena, std::move(layout));
}

void CompressedReduction::allocate_buffers(Arena& arena) {
  std::int64_t send = 0, receive = 0, sum = 0;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    const CompressedBucket& given = options_.buckets[b];
    const Bucket& bucket = buckets_[b];
    if (given.ranks == 1) continue;
    std::int64_t payload = 0, left = 0, right = 0, own = 0;
    for (const std::int64_t bytes : bucket.part_bytes) payload += bytes;
    if (options_.config.codec == "power_sgd") {
      for (auto t = static_cast<std::size_t>(given.tensors.begin); t < static_cast<std::size_t>(given.tensors.end); ++t) {
        const CompressedTensor& tensor = options_.tensors[t];
        left += places_[t].coded ? options_.config.rank * tensor.rows : tensor.elements();
        right += places_[t].coded ? options_.config.rank * tensor.columns : 0;
      }
    }
    const auto part = sums_at_owners(options_.config) ? static_cast<std::size_t>(given.rank) : 0;
    for (const Segment& segment : bucket.parts[part]) own += segment.elements;
    send = std::max({send, payload, 4 * left});
    const std::int64_t from_all = options_.config.codec == "random_k" ? 0 : given.ranks * bucket.part_bytes[part];
    receive = std::max({receive, from_all, 4 * right});
    sum = std::max(sum, sums_at_owners(options_.config) ? own : 0);
  }
  send_ = arena.allocate(send, MemoryCategory::communication);
  receive_ = arena.allocate(receive, MemoryCategory::communication);
  sum_ = arena.allocate(DType::f32, {sum}, MemoryCategory::communication);
}

void CompressedReduction::begin_step(std::int64_t step, double gradient_scale) {
  step_ = step;
  failed_ = false;
  const double factor = gradient_scale / std::exchange(gradient_scale_, gradient_scale);
  if (factor == 1 || options_.pitfalls.on(Pitfall::residual_keeps_old_scale)) return;
  if (feedback_) feedback_->scale(static_cast<float>(factor));
  if (sum_feedback_) sum_feedback_->scale(static_cast<float>(factor));
}

void CompressedReduction::reduce(Communicator& replicas, TensorView gradients, int bucket, Progress progress) {
  const Bucket& which = buckets_.at(static_cast<std::size_t>(bucket));
  const CompressedBucket& given = options_.buckets[static_cast<std::size_t>(bucket)];
  TANDEM_CHECK(replicas.size() == given.ranks && replicas.rank() == given.rank,
               fmt::format("bucket {} belongs to rank {} of {}, not to {} of {}", bucket, given.rank, given.ranks,
                           replicas.rank(), replicas.size()));
  TANDEM_CHECK(gradients.num_elements() == which.elements,
               fmt::format("bucket {} has {} elements, not {}", bucket, which.elements, gradients.num_elements()));
  bucket_ = bucket;
  progress_ = progress;
  const std::span<float> values = gradients.as<float>();
  const std::vector<float> before = observer_ ? std::vector<float>(values.begin(), values.end()) : std::vector<float>();
  if (falls_back(replicas, gradients, which)) {
  } else if (options_.config.codec == "power_sgd") {
    reduce_power_sgd(replicas, values);
  } else if (options_.config.codec == "top_k") {
    reduce_top_k(replicas, values, which);
  } else if (options_.config.codec == "random_k") {
    reduce_random_k(replicas, values, which);
  } else {
    reduce_at_owners(replicas, values, which);
  }
  if (observer_) observer_(bucket, before, values);
}

void CompressedReduction::finish_step(bool applied) {
  // What a skipped step sent reached no parameter: it has to be sent again.
  const bool commits = !failed_ && (applied || options_.pitfalls.on(Pitfall::residual_committed_on_skipped_step));
  for (ErrorFeedback* feedback : {feedback_.get(), sum_feedback_.get()}) {
    if (feedback == nullptr) continue;
    if (commits) {
      feedback->commit();
    } else {
      feedback->discard();
    }
  }
  if (commits) std::swap(starts_, next_starts_);
}

std::size_t CompressedReduction::index_of(std::string_view name) const {
  const auto found = std::ranges::find_if(options_.tensors, [&](const CompressedTensor& tensor) { return tensor.name == name; });
  TANDEM_CHECK(found != options_.tensors.end(), fmt::format("{} is not reduced here", name));
  return static_cast<std::size_t>(found - options_.tensors.begin());
}

std::span<float> CompressedReduction::start_of(const Arena::Buffer& starts, std::size_t tensor) const {
  return starts.view(DType::f32, {start_elements_})
      .flat(places_[tensor].start, options_.config.rank * options_.tensors[tensor].columns)
      .as<float>();
}

std::span<const float> CompressedReduction::residual(std::string_view name) const {
  if (!feedback_ || !places_[index_of(name)].coded) return {};
  return feedback_->residual(name);
}

std::vector<CompressedReduction::OwnedResidual> CompressedReduction::sum_residuals(std::string_view name) const {
  std::vector<OwnedResidual> owned;
  if (!sum_feedback_) return owned;
  const std::size_t tensor = index_of(name);
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    for (const Segment& segment : buckets_[b].parts[static_cast<std::size_t>(options_.buckets[b].rank)]) {
      if (segment.tensor != tensor || segment.sum_residual < 0) continue;
      owned.push_back({segment.in_tensor, sum_feedback_->residual(sum_name(options_.tensors[tensor], segment.in_tensor))});
    }
  }
  return owned;
}

std::span<const float> CompressedReduction::start(std::string_view name) const {
  const std::size_t tensor = index_of(name);
  if (places_[tensor].start < 0) return {};
  return start_of(starts_, tensor);
}

void CompressedReduction::restore_residual(std::string_view name, std::span<const float> values) {
  TANDEM_CHECK(!residual(name).empty(), fmt::format("{} has no residual", name));
  feedback_->restore(name, values);
}

void CompressedReduction::restore_sum_residual(std::string_view name, std::span<const float> values) {
  const CompressedTensor& tensor = options_.tensors[index_of(name)];
  TANDEM_CHECK(std::ssize(values) == tensor.elements(),
               fmt::format("the residual of the sum of {} has {} elements, not {}", name, tensor.elements(), values.size()));
  for (const OwnedResidual& owned : sum_residuals(name)) {
    sum_feedback_->restore(sum_name(tensor, owned.first),
                           values.subspan(static_cast<std::size_t>(owned.first), owned.values.size()));
  }
}

void CompressedReduction::restore_start(std::string_view name, std::span<const float> values) {
  const std::size_t tensor = index_of(name);
  TANDEM_CHECK(start(name).size() == values.size(),
               fmt::format("the factor of {} has {} elements, not {}", name, start(name).size(), values.size()));
  if (!values.empty()) std::ranges::copy(values, start_of(starts_, tensor).begin());
}

}  // namespace tandem
