// SPDX-License-Identifier: Apache-2.0
#include "harness/trace_compare_assemble.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "core/error.h"
#include "harness/trace_compare_recorder.h"

namespace tandem {
namespace {

// Two heads of size 2.
TraceHeader small_header() {
  TraceHeader header;
  header.model.hidden = 4;
  header.model.heads = 2;
  return header;
}

void append(TraceRecorder& recorder, const TraceEntry& entry, const std::vector<double>& values) {
  std::vector<float> narrow(values.begin(), values.end());
  recorder.append(entry, view_of(narrow, {static_cast<std::int64_t>(narrow.size())}));
}

// Merges and returns the one tensor that comes out.
std::vector<double> merged(const TraceRecorder& recorder, std::vector<std::string>* notes = nullptr) {
  TraceRecorder whole_trace(recorder.header());
  const std::vector<std::string> said = merge_trace(recorder, whole_trace.consumer());
  if (notes != nullptr) *notes = said;
  EXPECT_EQ(whole_trace.entries().size(), 1U);
  EXPECT_TRUE(whole_trace.entries().front().shard.is_whole());
  return whole_trace.values(0);
}

std::vector<double> counting(std::size_t count) {
  std::vector<double> values(count);
  for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<double>(i) + 1;
  return values;
}

TEST(TraceMerge, JoinsColumnSlicesAndLeavesPaddingOut) {
  TraceRecorder recorder(small_header());
  const std::vector<double> global = counting(5 * 4);
  for (int rank = 0; rank < 2; ++rank) {  // rows 0..2 and 3..4 with one padded row, as of a vocabulary of five on two ranks
    TraceEntry entry = whole_entry("wte.weight", TraceKind::parameter, {5, 4}, DType::f32);
    entry.rank = rank;
    entry.shard.slices[0] = {{3 * rank, std::min(3 * rank + 3, 5)}};
    entry.shard.padded_rows = rank;
    append(recorder, entry, gather_from(entry.shard, global));
  }
  EXPECT_EQ(merged(recorder), global);
}

TEST(TraceMerge, UndoesMegatronsOrderOfTheFusedQueryKeyValue) {
  TraceRecorder recorder(small_header());  // two heads of size 2
  for (int rank = 0; rank < 2; ++rank) {
    TraceEntry entry = whole_entry("h.0.attn.c_attn.weight", TraceKind::parameter, {4, 12}, DType::f32);
    entry.rank = rank;
    entry.shard.slices[1] = {{2 * rank, 2 * rank + 2}, {4 + 2 * rank, 6 + 2 * rank}, {8 + 2 * rank, 10 + 2 * rank}};
    entry.megatron_qkv = entry.transposed = true;
    // Rank r holds head r as a [6, 4] matrix of rows q0 q1 k0 k1 v0 v1; a value tells its global place.
    std::vector<double> stored;
    for (int which = 0; which < 3; ++which) {
      for (int i = 0; i < 2; ++i) {
        for (int in = 0; in < 4; ++in) stored.push_back(12 * in + 4 * which + 2 * rank + i + 1);
      }
    }
    append(recorder, entry, stored);
  }
  EXPECT_EQ(merged(recorder), counting(48));
}

TEST(TraceMerge, UndoesMegatronsOrderOfSeveralHeadsOnOneRank) {
  TraceRecorder recorder(small_header());
  TraceEntry entry = whole_entry("h.0.attn.c_attn.bias", TraceKind::parameter, {12}, DType::f32);
  entry.megatron_qkv = true;
  append(recorder, entry, {1, 2, 5, 6, 9, 10, 3, 4, 7, 8, 11, 12});
  EXPECT_EQ(merged(recorder), counting(12));
}

TEST(TraceMerge, JoinsFlatShardsAndLeavesTheirPaddingOut) {
  TraceRecorder recorder(small_header());
  for (int rank = 0; rank < 4; ++rank) {  // 15 elements on 4 ranks: 4 each, the last with one of padding
    TraceEntry entry = whole_entry("h.0.ln_1.weight", TraceKind::parameter, {3, 5}, DType::f32);
    entry.rank = rank;
    entry.shard.flat_range = Interval{4 * rank, 4 * rank + 4};
    std::vector<double> values;
    for (int i = 4 * rank; i < 4 * rank + 4; ++i) values.push_back(i < 15 ? i + 1 : -777);
    append(recorder, entry, values);
  }
  EXPECT_EQ(merged(recorder), counting(15));
}

TEST(TraceMerge, JoinsFlatShardsOfATransposedMatrix) {
  TraceRecorder recorder(small_header());
  const std::vector<double> stored = {1, 4, 2, 5, 3, 6};  // the transpose of [2, 3]
  for (int rank = 0; rank < 2; ++rank) {
    TraceEntry entry = whole_entry("h.0.mlp.c_fc.weight", TraceKind::parameter, {2, 3}, DType::f32);
    entry.rank = rank;
    entry.transposed = true;
    entry.shard.flat_range = Interval{3 * rank, 3 * rank + 3};
    append(recorder, entry, {stored.begin() + 3 * rank, stored.begin() + 3 * rank + 3});
  }
  EXPECT_EQ(merged(recorder), counting(6));
}

TEST(TraceMerge, AddsPartialSums) {
  TraceRecorder recorder(small_header());
  for (int part = 0; part < 4; ++part) {
    TraceEntry entry = whole_entry("d.ln_f.bias", TraceKind::parameter_gradient, {2}, DType::f32);
    entry.rank = part / 2;
    entry.micro_batch = part % 2;
    entry.shard.partial_sum = true;
    append(recorder, entry, {1.0 * part, 10.0 * part});
  }
  EXPECT_EQ(merged(recorder), (std::vector<double>{6, 60}));
}

TEST(TraceMerge, SaysWhatIsMissingAndWhichReplicasDiffer) {
  TraceRecorder recorder(small_header());
  TraceEntry entry = whole_entry("ln_f.bias", TraceKind::parameter, {4}, DType::f32);
  entry.shard.slices[0] = {{0, 3}};
  append(recorder, entry, {1, 2, 3});
  EXPECT_THROW(static_cast<void>(merge_trace(recorder, [](const TraceEntry&, TensorView) {})), InputError);
  entry.rank = 1;
  entry.shard.slices[0] = {{2, 4}};
  append(recorder, entry, {33, 4});
  std::vector<std::string> notes;
  EXPECT_EQ(merged(recorder, &notes), (std::vector<double>{1, 2, 3, 4}));
  ASSERT_EQ(notes.size(), 1U);
  EXPECT_NE(notes[0].find("ln_f.bias: replicas differ in 1 of 4 elements, the first is 2"), std::string::npos);
}

TEST(TraceMerge, KeepsTheDtypeOfTheParts) {
  TraceRecorder recorder(small_header());
  std::vector<std::uint16_t> bits = {to_bf16_bits(1.5F), to_bf16_bits(-3)};
  for (int rank = 0; rank < 2; ++rank) {
    TraceEntry entry = whole_entry("h.0", TraceKind::activation, {1, 4}, DType::bf16);
    entry.shard.slices[1] = {{2 * rank, 2 * rank + 2}};
    recorder.append(entry, TensorView(bits.data(), DType::bf16, {2}));
  }
  TraceRecorder joined(small_header());
  EXPECT_TRUE(merge_trace(recorder, joined.consumer()).empty());
  EXPECT_EQ(joined.entries().front().shard.dtype, DType::bf16);
  EXPECT_EQ(joined.values(0), (std::vector<double>{1.5, -3, 1.5, -3}));
}

}  // namespace
}  // namespace tandem
