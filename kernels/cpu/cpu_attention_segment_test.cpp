// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/batch.h"
#include "kernels/cpu/attention_test_support.h"

namespace tandem::cpu {
namespace {

/// A setting and into how many chunks the sequence is cut.
struct Ring {
  Setting setting;
  int chunks;
};
// Chunks of one token, of less than a tile, of several; head sizes at and between registers; chunks that the documents of the
// queries hide, wholly and in part; masks whose first element is no multiple of four.
const std::vector<Ring> kRings = {{{0, 4, 2, 3, false, 0}, 2},     {{1, 1, 1, 1, false, 0}, 1},
                                  {{2, 5, 3, 7, true, 0.3}, 5},    {{2, 67, 3, 24, true, 0}, 4},
                                  {{2, 131, 2, 20, true, 0.2}, 3}, {{1, 260, 1, 33, true, 0.5}, 4},
                                  {{3, 97, 2, 64, false, 0.1}, 2}, {{1, 193, 5, 64, false, 0}, 1}};

class AttentionRing : public testing::TestWithParam<const char*> {};

/// Tokens of one chunk as the ring moves them: queries stay in the rows of qkv, keys and values travel in a buffer of their own.
template <class Real>
class Chunks {
 public:
  Chunks(const Inputs& inputs, int count, const std::vector<Real>& qkv, const std::vector<Real>& dout)
      : inputs_(inputs), qkv_(qkv), dqkv_(qkv.size(), Real(0)) {
    const Setting& s = inputs.setting;
    width_ = s.heads * s.head_size;
    for (int i = 0; i < count; ++i) {
      const Interval interval = balanced_part(s.sequence, count, i);
      intervals_.push_back(interval);
      keys_values_.push_back(cut(qkv, 3, 1, 2, interval));
      dkeys_values_.push_back(std::vector<Real>(keys_values_.back().size(), Real(0)));
      dout_.push_back(cut(dout, 1, 0, 1, interval));
      out_.push_back(std::vector<Real>(dout_.back().size(), Real(0)));
      logsumexp_.push_back(std::vector<Real>(static_cast<std::size_t>(s.rows * s.heads * interval.size()),
                                             -std::numeric_limits<Real>::infinity()));
    }
  }

  /// Every chunk of queries meets every chunk of keys, its own first and then backwards round the ring.
  Outputs<Real> run(Kernels& kernels) {
    const std::size_t count = intervals_.size();
    for (const bool backward : {false, true}) {
      for (std::size_t step = 0; step < count; ++step) {
        for (std::size_t mine = 0; mine < count; ++mine) meet(kernels, mine, (mine + count - step) % count, backward);
      }
    }
    return {join(out_, 1, 0, 1, std::vector<Real>(qkv_.size() / 3)), join(dkeys_values_, 3, 1, 2, dqkv_), logsumexp()};
  }

 private:
  /// Of parts [first, first + parts) of tensors [rows, sequence, of * width] the tokens of one chunk.
  std::vector<Real> cut(const std::vector<Real>& from, int of, int first, int parts, const Interval& interval) const {
    std::vector<Real> result;
    for (std::int64_t row = 0; row < inputs_.setting.rows; ++row) {
      for (std::int64_t t = interval.begin; t < interval.end; ++t) {
        const auto token = from.begin() + (row * inputs_.setting.sequence + t) * of * width_;
        result.insert(result.end(), token + first * width_, token + (first + parts) * width_);
      }
    }
    return result;
  }
  std::vector<Real> join(const std::vector<std::vector<Real>>& chunks, int of, int first, int parts, std::vector<Real> to) const {
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      auto from = chunks[i].begin();
      for (std::int64_t row = 0; row < inputs_.setting.rows; ++row) {
        for (std::int64_t t = intervals_[i].begin; t < intervals_[i].end; ++t, from += parts * width_) {
          std::copy_n(from, parts * width_, to.begin() + ((row * inputs_.setting.sequence + t) * of + first) * width_);
        }
      }
    }
    return to;
  }
  /// [rows, heads, sequence]
  std::vector<Real> logsumexp() const {
    const std::int64_t heads = inputs_.setting.rows * inputs_.setting.heads;
    std::vector<Real> result;
    for (std::int64_t head = 0; head < heads; ++head) {
      for (std::size_t i = 0; i < logsumexp_.size(); ++i) {
        const auto first = logsumexp_[i].begin() + head * intervals_[i].size();
        result.insert(result.end(), first, first + intervals_[i].size());
      }
    }
    return result;
  }

  void meet(Kernels& kernels, std::size_t mine, std::size_t theirs, bool backward) {
    const Setting& s = inputs_.setting;
    const Interval queries = intervals_[mine], keys = intervals_[theirs];
    AttentionSegment segment{.rows = s.rows,
                             .queries = queries.size(),
                             .keys = keys.size(),
                             .query_begin = queries.begin,
                             .key_begin = keys.begin,
                             .heads = s.heads,
                             .head_size = s.head_size,
                             .document_starts = {},
                             .document_stride = s.sequence,
                             .dropout_sequence = inputs_.model_sequence};
    if (s.rows > 0) segment.document_starts = std::span(inputs_.starts).subspan(static_cast<std::size_t>(queries.begin));
    const DropoutSpec dropout{.key = inputs_.key,
                              .probability = s.dropout,
                              .row_ids = inputs_.row_ids,
                              .row_elements = s.heads * inputs_.model_sequence * inputs_.model_sequence};
    const auto query_of = [&](std::vector<Real>& from) {
      return StridedRows{view_of(from, {s.rows, s.sequence, 3 * width_}), queries.begin * 3 * width_, s.sequence * 3 * width_,
                         3 * width_};
    };
    const auto pair_of = [&](std::vector<Real>& from, int part) {
      return StridedRows{view_of(from, {s.rows, keys.size(), 2 * width_}), part * width_, keys.size() * 2 * width_, 2 * width_};
    };
    const Shape rows = {s.rows, queries.size(), width_}, heads = {s.rows, s.heads, queries.size()};
    const StridedRows key = pair_of(keys_values_[theirs], 0), value = pair_of(keys_values_[theirs], 1);
    const TensorView out = view_of(out_[mine], rows), logsumexp = view_of(logsumexp_[mine], heads);
    if (backward) {
      kernels.attention_segment_backward(segment, dropout, view_of(dout_[mine], rows), query_of(qkv_), key, value, out, logsumexp,
                                         query_of(dqkv_), pair_of(dkeys_values_[theirs], 0), pair_of(dkeys_values_[theirs], 1));
    } else {
      kernels.attention_segment_forward(segment, dropout, query_of(qkv_), key, value, out, logsumexp);
    }
  }

  const Inputs& inputs_;
  std::int64_t width_ = 0;
  std::vector<Real> qkv_, dqkv_;
  std::vector<Interval> intervals_;
  std::vector<std::vector<Real>> keys_values_, dkeys_values_, dout_, out_, logsumexp_;
};

/// out, dqkv, logsumexp of one call over all keys.
template <class Real>
Outputs<Real> whole(Kernels& kernels, const Inputs& inputs, std::vector<Real> qkv, std::vector<Real> dout) {
  const Setting& s = inputs.setting;
  const std::int64_t tokens = s.rows * s.sequence, width = s.heads * s.head_size;
  const AttentionShape shape{.rows = s.rows,
                             .sequence = s.sequence,
                             .heads = s.heads,
                             .head_size = s.head_size,
                             .document_starts = inputs.starts,
                             .dropout_sequence = inputs.model_sequence};
  const DropoutSpec dropout{inputs.key, s.dropout, inputs.row_ids, s.heads * inputs.model_sequence * inputs.model_sequence};
  std::vector<Real> out(dout.size()), logsumexp(static_cast<std::size_t>(tokens * s.heads)), dqkv(qkv.size());
  const TensorView out_view = view_of(out, {tokens, width}), kept = view_of(logsumexp, {s.rows, s.heads, s.sequence});
  kernels.attention_forward(shape, dropout, view_of(qkv, {tokens, 3 * width}), out_view, kept);
  kernels.attention_backward(shape, dropout, view_of(dout, {tokens, width}), view_of(qkv, {tokens, 3 * width}), out_view, kept,
                             view_of(dqkv, {tokens, 3 * width}));
  return {out, dqkv, logsumexp};
}

template <class Real>
void check(const char* set) {
  for (const Ring& ring : kRings) {
    const Setting& s = ring.setting;
    SCOPED_TRACE(fmt::format("{} rows of {} in {}, {} heads of {}", s.rows, s.sequence, ring.chunks, s.heads, s.head_size));
    const Inputs inputs = make_inputs(s);
    const std::int64_t tokens = s.rows * s.sequence, width = s.heads * s.head_size;
    const auto qkv = random_values<Real>(tokens * 3 * width, 1), dout = random_values<Real>(tokens * width, 2);
    auto got = with_any_threads<Real>(
        set, "auto", [&](Kernels& kernels) { return Chunks<Real>(inputs, ring.chunks, qkv, dout).run(kernels); });
    if (got.empty()) GTEST_SKIP() << "not available here";
    const auto one_call = whole<Real>(*try_kernels(1, set), inputs, qkv, dout);
    EXPECT_TRUE(ring.chunks > 1 || same_bits(got, one_call));

    const auto same_precision = reference_attention<Real>(inputs, qkv, dout);
    auto truth = reference_attention<double>(inputs, {qkv.begin(), qkv.end()}, {dout.begin(), dout.end()});
    // Two sums follow each other, over the head's channels and over the keys, and every chunk rounds what is merged once more.
    const double chain = static_cast<double>(s.head_size + s.sequence + 3 * ring.chunks);
    expect_close<Real>({got[0], got[1]}, truth, same_precision, chain);
    expect_close<Real>({got[2]}, {{one_call[2].begin(), one_call[2].end()}}, {}, chain);
  }
}

TEST_P(AttentionRing, InSegmentsIsTheDefinitionInSingle) { check<float>(GetParam()); }
TEST_P(AttentionRing, InSegmentsIsTheDefinitionInDouble) { check<double>(GetParam()); }

/// One row of three queries at positions 4, 5, 6, one head of two channels.
struct SmallSegment {
  AttentionSegment segment{.rows = 1,
                           .queries = 3,
                           .keys = 3,
                           .query_begin = 4,
                           .key_begin = 1,
                           .heads = 1,
                           .head_size = 2,
                           .document_starts = {},
                           .document_stride = 3};
  std::vector<float> q = {1, 2, 3, 4, 5, 6}, k = {1, -1, 2, -2, 1, 0.5F}, v = {10, 20, 30, 40, 50, 60}, dout = {1, 2, 3, 4, 5, 6};
  std::vector<float> out = {7, 8, 0, 0, 9, 10};
  std::vector<float> logsumexp = {0.5F, -std::numeric_limits<float>::infinity(), -0.25F};
  std::vector<float> dq = {1, 1, 1, 1, 1, 1}, dk = {2, 2, 2, 2, 2, 2}, dv = {3, 3, 3, 3, 3, 3};

  static StridedRows rows(std::vector<float>& values) { return {view_of(values, {1, 3, 2}), 0, 6, 2}; }
  void forward(Kernels& kernels) {
    kernels.attention_segment_forward(segment, {}, rows(q), rows(k), rows(v), view_of(out, {1, 3, 2}),
                                      view_of(logsumexp, {1, 1, 3}));
  }
  void backward(Kernels& kernels) {
    kernels.attention_segment_backward(segment, {}, view_of(dout, {1, 3, 2}), rows(q), rows(k), rows(v), view_of(out, {1, 3, 2}),
                                       view_of(logsumexp, {1, 1, 3}), rows(dq), rows(dk), rows(dv));
  }
};

TEST_P(AttentionRing, KeysThatNoQuerySeesChangeNothing) {
  const auto kernels = try_kernels(1, GetParam());
  if (kernels == nullptr) GTEST_SKIP() << "not available here";
  const std::vector<std::int32_t> starts = {4, 4, 4};
  for (const bool by_document : {false, true}) {
    SmallSegment got;
    if (by_document) got.segment.document_starts = starts;
    if (!by_document) got.segment.key_begin = 7;
    got.forward(*kernels);
    got.backward(*kernels);
    const SmallSegment before;
    EXPECT_EQ(got.out, before.out);
    EXPECT_EQ(got.logsumexp, before.logsumexp);
    EXPECT_TRUE(got.dq == before.dq && got.dk == before.dk && got.dv == before.dv);
  }
}

TEST_P(AttentionRing, QueriesThatSeeNoneOfTheKeysStayBesideOnesThatDo) {
  const auto kernels = try_kernels(1, GetParam());
  if (kernels == nullptr) GTEST_SKIP() << "not available here";
  const std::vector<std::int32_t> starts = {4, 5, 3};  // the last query sees key 3, the others none
  SmallSegment got;
  got.segment.document_starts = starts;
  const SmallSegment before;

  got.forward(*kernels);

  EXPECT_TRUE(std::equal(got.out.begin(), got.out.begin() + 4, before.out.begin()));
  EXPECT_EQ(got.logsumexp[0], before.logsumexp[0]);
  EXPECT_EQ(got.logsumexp[1], before.logsumexp[1]);
  const double score = 8 / std::sqrt(2.0), total = std::log(std::exp(-0.25) + std::exp(score));
  EXPECT_NEAR(got.logsumexp[2], total, 1e-5);
  EXPECT_NEAR(got.out[4], 9 * std::exp(-0.25 - total) + 50 * std::exp(score - total), 1e-4);
  got.backward(*kernels);
  EXPECT_TRUE(std::equal(got.dq.begin(), got.dq.begin() + 4, before.dq.begin()));
  EXPECT_TRUE(std::equal(got.dv.begin(), got.dv.begin() + 4, before.dv.begin()));
  EXPECT_NEAR(got.dv[4], 3 + 5 * std::exp(score - total), 1e-4);
}

TEST_P(AttentionRing, RefusesOperandsThatReachBeyondTheirMemory) {
  const auto kernels = try_kernels(1, GetParam());
  if (kernels == nullptr) GTEST_SKIP() << "not available here";
  SmallSegment small;
  StridedRows value = SmallSegment::rows(small.v);
  value.offset = 1;
  EXPECT_THROW(kernels->attention_segment_forward(small.segment, {}, SmallSegment::rows(small.q), SmallSegment::rows(small.k),
                                                  value, view_of(small.out, {1, 3, 2}), view_of(small.logsumexp, {1, 1, 3})),
               ContractError);
}

INSTANTIATE_TEST_SUITE_P(Sets, AttentionRing, testing::ValuesIn(kInstructionSets),
                         [](const auto& test) { return std::string(test.param); });

}  // namespace
}  // namespace tandem::cpu
