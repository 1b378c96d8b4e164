// SPDX-License-Identifier: Apache-2.0
#include <memory>

#include "core/batch.h"
#include "kernels/cuda/attention_test_support.h"

namespace tandem::device_test {
namespace {

using CudaAttentionSegments = DeviceTest;

constexpr double kUnseen = -std::numeric_limits<double>::infinity();

std::vector<double> filled(std::int64_t count, double value) {
  return std::vector<double>(static_cast<std::size_t>(count), value);
}

/// The sequence in chunks, each of which meets each as queries and keys; queries lie in the rows of qkv, keys and values beside
/// each other in a tensor of their own. What is added to is of `sums`.
class Ring {
 public:
  Ring(Kernels& kernels, const Inputs& inputs, int chunks, DType sums)
      : kernels_(kernels),
        inputs_(inputs),
        s_(inputs.setting),
        qkv_(kernels, s_.dtype, s_.qkv_shape(), inputs.qkv),
        key_value_(kernels, s_.dtype, {s_.rows, s_.sequence, 2 * s_.width()}, keys_and_values()),
        dqkv_(kernels, sums, s_.qkv_shape(), filled(s_.tokens() * 3 * s_.width(), 0)),
        dkey_value_(kernels, sums, {s_.rows, s_.sequence, 2 * s_.width()}, filled(s_.tokens() * 2 * s_.width(), 0)) {
    for (int i = 0; i < chunks; ++i) {
      const Interval interval = balanced_part(s_.sequence, chunks, i);
      const Shape shape = {s_.rows, interval.size(), s_.width()}, statistics = {s_.rows, s_.heads, interval.size()};
      intervals_.push_back(interval);
      out_.push_back(std::make_unique<DeviceTensor>(kernels, sums, shape, filled(num_elements(shape), 0)));
      dout_.push_back(std::make_unique<DeviceTensor>(kernels, s_.dtype, shape, tokens_of(inputs.dout, interval)));
      logsumexp_.push_back(
          std::make_unique<DeviceTensor>(kernels, wide(s_.dtype), statistics, filled(num_elements(statistics), kUnseen)));
    }
  }

  /// Its own chunk first, then backwards round the ring.
  Results run() {
    const std::size_t count = intervals_.size();
    for (const bool backward : {false, true}) {
      for (std::size_t step = 0; step < count; ++step) {
        for (std::size_t mine = 0; mine < count; ++mine) meet(mine, (mine + count - step) % count, backward);
      }
    }
    return {out(), gradients(), {}};
  }

 private:
  std::vector<double> keys_and_values() const {
    std::vector<double> result;
    for (std::int64_t token = 0; token < s_.tokens(); ++token) {
      const auto from = inputs_.qkv.begin() + token * 3 * s_.width();
      result.insert(result.end(), from + s_.width(), from + 3 * s_.width());
    }
    return result;
  }
  std::vector<double> tokens_of(const std::vector<double>& from, const Interval& interval) const {
    std::vector<double> result;
    for (std::int64_t row = 0; row < s_.rows; ++row) {
      const auto begin = from.begin() + row * s_.sequence * s_.width();
      result.insert(result.end(), begin + interval.begin * s_.width(), begin + interval.end * s_.width());
    }
    return result;
  }
  std::vector<double> out() const {
    std::vector<double> result(inputs_.dout.size());
    for (std::size_t i = 0; i < intervals_.size(); ++i) {
      const std::vector<double> part = out_[i]->values();
      const std::int64_t size = intervals_[i].size() * s_.width();
      for (std::int64_t row = 0; row < s_.rows; ++row) {
        std::copy_n(part.begin() + row * size, size, result.begin() + (row * s_.sequence + intervals_[i].begin) * s_.width());
      }
    }
    return result;
  }
  std::vector<double> gradients() const {
    std::vector<double> result = dqkv_.values();
    const std::vector<double> pairs = dkey_value_.values();
    for (std::int64_t token = 0; token < s_.tokens(); ++token) {
      std::copy_n(pairs.begin() + token * 2 * s_.width(), 2 * s_.width(), result.begin() + (token * 3 + 1) * s_.width());
    }
    return result;
  }

  StridedRows queries(const DeviceTensor& tensor, const Interval& of) const {
    return {tensor.view(), of.begin * 3 * s_.width(), s_.sequence * 3 * s_.width(), 3 * s_.width()};
  }
  /// Keys (part 0) or values (1).
  StridedRows keys(const DeviceTensor& tensor, const Interval& of, std::int64_t part) const {
    return {tensor.view(), (of.begin * 2 + part) * s_.width(), s_.sequence * 2 * s_.width(), 2 * s_.width()};
  }

  void meet(std::size_t mine, std::size_t theirs, bool backward) {
    const Interval &q = intervals_[mine], &k = intervals_[theirs];
    const AttentionSegment segment{.rows = s_.rows,
                                   .queries = q.size(),
                                   .keys = k.size(),
                                   .query_begin = q.begin,
                                   .key_begin = k.begin,
                                   .heads = s_.heads,
                                   .head_size = s_.head_size,
                                   .document_starts = std::span(inputs_.starts).subspan(static_cast<std::size_t>(q.begin)),
                                   .document_stride = s_.sequence,
                                   .dropout_sequence = inputs_.side()};
    if (backward) {
      kernels_.attention_segment_backward(
          segment, inputs_.dropout(), dout_[mine]->view(), queries(qkv_, q), keys(key_value_, k, 0), keys(key_value_, k, 1),
          out_[mine]->view(), logsumexp_[mine]->view(), queries(dqkv_, q), keys(dkey_value_, k, 0), keys(dkey_value_, k, 1));
    } else {
      kernels_.attention_segment_forward(segment, inputs_.dropout(), queries(qkv_, q), keys(key_value_, k, 0),
                                         keys(key_value_, k, 1), out_[mine]->view(), logsumexp_[mine]->view());
    }
  }

  Kernels& kernels_;
  const Inputs& inputs_;
  const Setting& s_;
  DeviceTensor qkv_, key_value_, dqkv_, dkey_value_;
  std::vector<Interval> intervals_;
  std::vector<std::unique_ptr<DeviceTensor>> out_, dout_, logsumexp_;
};

// Chunks of one token and of several tiles; documents that hide chunks wholly and in part.
TEST_F(CudaAttentionSegments, AreTheDefinitionInSingleAndDouble) {
  for (const auto& [s, chunks] :
       {std::pair{
            Setting{.dtype = DType::f32, .rows = 2, .sequence = 5, .heads = 3, .head_size = 7, .documents = true, .dropout = 0.3},
            5},
        {Setting{.dtype = DType::f64, .rows = 2, .sequence = 91, .heads = 1, .head_size = 20, .documents = true, .dropout = 0.2},
         3}}) {
    SCOPED_TRACE(s.text());
    const Inputs inputs(s);

    const Results got = Ring(kernels(), inputs, chunks, s.dtype).run();

    const Results truth = reference_attention<double>(inputs);
    const Results same = s.dtype == DType::f32 ? reference_attention<float>(inputs) : Results{};
    // Every chunk rounds what is merged once more.
    expect_close("out", got.out, truth.out, s.dtype, same.out, s.chain() + 3 * chunks);
    expect_close("dqkv", got.dqkv, truth.dqkv, s.dtype, same.dqkv, s.chain() + 3 * chunks);
  }
}

TEST_F(CudaAttentionSegments, OnTensorCoresAreOffByTheRoundingOfProbabilitiesAndOfSums) {
  struct Case {
    Setting setting;
    int chunks;
    DType sums;
  };
  for (const auto& [s, chunks, sums] :
       {Case{{.dtype = DType::bf16, .rows = 2, .sequence = 150, .heads = 2, .head_size = 64, .documents = true, .dropout = 0.3},
             2,
             DType::f32},
        Case{{.dtype = DType::f16, .rows = 1, .sequence = 77, .heads = 1, .head_size = 128, .documents = true}, 3, DType::f16}}) {
    SCOPED_TRACE(s.text());
    const Inputs inputs(s);

    const Results got = Ring(kernels(), inputs, chunks, sums).run();

    const Results truth = reference_attention<double>(inputs);
    const double merges = sums == DType::f32 ? 0 : chunks;
    expect_within_roundings("out", got.out, truth.out, s.dtype, 1 + merges);
    expect_within_roundings("dqkv", got.dqkv, truth.dqkv, s.dtype, 1 + merges);
  }
}

/// Three queries at positions 4, 5, 6, one head; keys at positions 1, 2, 3. The values of the first two channels, zeros beyond.
class Small {
 public:
  Small(Kernels& kernels, DType dtype, std::int64_t head_size) : kernels_(kernels), dtype_(dtype), size_(head_size) {
    segment = {.rows = 1,
               .queries = 3,
               .keys = 3,
               .query_begin = 4,
               .key_begin = 1,
               .heads = 1,
               .head_size = size_,
               .document_starts = {},
               .document_stride = 3};
  }
  void forward() { kernels_.attention_segment_forward(segment, {}, rows(q), rows(k), rows(v), out.view(), logsumexp.view()); }
  void backward() {
    kernels_.attention_segment_backward(segment, {}, dout.view(), rows(q), rows(k), rows(v), out.view(), logsumexp.view(),
                                        rows(dq), rows(dk), rows(dv));
  }
  [[nodiscard]] std::vector<std::vector<std::uint8_t>> bits() const {
    return {out.bits(), logsumexp.bits(), dq.bits(), dk.bits(), dv.bits()};
  }
  /// Channel 0 of a token.
  [[nodiscard]] double first_of(const DeviceTensor& tensor, std::int64_t token) const {
    return tensor.values()[static_cast<std::size_t>(token * size_)];
  }

 private:
  DeviceTensor tensor(const std::vector<double>& pairs) const {
    std::vector<double> values(static_cast<std::size_t>(3 * size_), 0.0);
    for (std::size_t i = 0; i < pairs.size(); ++i) values[i / 2 * static_cast<std::size_t>(size_) + i % 2] = pairs[i];
    return DeviceTensor(kernels_, dtype_, {1, 3, size_}, values);
  }
  [[nodiscard]] StridedRows rows(const DeviceTensor& of) const { return {of.view(), 0, 3 * size_, size_}; }
  Kernels& kernels_;
  DType dtype_;
  std::int64_t size_;

 public:
  AttentionSegment segment;
  DeviceTensor q = tensor({1, 2, 3, 4, 5, 6}), k = tensor({1, -1, 2, -2, 1, 0.5}), v = tensor({10, 20, 30, 40, 50, 60});
  DeviceTensor dout = tensor({1, 2, 3, 4, 5, 6}), out = tensor({7, 8, 0, 0, 9, 10});
  DeviceTensor logsumexp = DeviceTensor(kernels_, wide(dtype_), {1, 1, 3}, {0.5, kUnseen, -0.25});
  DeviceTensor dq = tensor({1, 1, 1, 1, 1, 1}), dk = tensor({2, 2, 2, 2, 2, 2}), dv = tensor({3, 3, 3, 3, 3, 3});
};

TEST_F(CudaAttentionSegments, KeysThatNoQuerySeesChangeNothing) {
  const std::vector<std::int32_t> starts = {4, 4, 4};
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const bool by_document : {false, true}) {
      Small small(kernels(), dtype, dtype == DType::f32 ? 2 : 64);
      if (by_document) small.segment.document_starts = starts;
      if (!by_document) small.segment.key_begin = 7;
      const auto before = small.bits();

      small.forward();
      small.backward();

      EXPECT_TRUE(small.bits() == before) << name(dtype) << (by_document ? " other documents" : " later keys");
    }
  }
}

TEST_F(CudaAttentionSegments, QueriesThatSeeNoneOfTheKeysStayBesideOnesThatDo) {
  const std::vector<std::int32_t> starts = {4, 5, 3};  // the last query sees key 3, the others none
  for (const DType dtype : {DType::f32, DType::f16}) {
    SCOPED_TRACE(name(dtype));
    const std::int64_t size = dtype == DType::f32 ? 2 : 64;
    Small small(kernels(), dtype, size);
    small.segment.document_starts = starts;
    const auto of_first_two = [&](const DeviceTensor& tensor) {
      const std::vector<double> values = tensor.values();
      return std::vector<double>(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 3 * 2));
    };
    const auto out = of_first_two(small.out), statistics = of_first_two(small.logsumexp), dq = of_first_two(small.dq),
               dv = of_first_two(small.dv);

    small.forward();

    EXPECT_TRUE(of_first_two(small.out) == out && of_first_two(small.logsumexp) == statistics);
    const double score = 8 / std::sqrt(static_cast<double>(size)), total = std::log(std::exp(-0.25) + std::exp(score));
    const double u = unit_roundoff(dtype);
    EXPECT_NEAR(small.logsumexp.values()[2], total, 1e-5);
    EXPECT_NEAR(small.first_of(small.out, 2), 9 * std::exp(-0.25 - total) + 50 * std::exp(score - total), 50 * u + 1e-4);
    small.backward();
    EXPECT_TRUE(of_first_two(small.dq) == dq && of_first_two(small.dv) == dv);
    EXPECT_NEAR(small.first_of(small.dv, 2), 3 + 5 * std::exp(score - total), 10 * u + 1e-4);
  }
}

}  // namespace
}  // namespace tandem::device_test
