// SPDX-License-Identifier: Apache-2.0
#include "core/io/trace_file.h"

#include <gtest/gtest.h>

#include <limits>
#include <thread>

#include <fmt/format.h>

#include "core/io/test_folder.h"
#include "core/io/trace_file_reader.h"
#include "core/io/trace_file_writer.h"

namespace tandem {
namespace {

GptConfig small_model() {
  GptConfig model;
  model.vocabulary = 11;
  model.sequence = 3;
  model.layers = 1;
  model.hidden = 4;
  model.heads = 2;
  return model;
}

TraceHeader small_header() {
  TraceHeader header;
  header.framework = "test";
  header.model = small_model();
  header.ranks = 2;
  return header;
}

Batch small_batch() {
  Batch batch = make_batch(2, 3);
  for (std::size_t i = 0; i < 6; ++i) batch.ids[i] = batch.targets[i] = static_cast<std::int32_t>(i);
  batch.targets[5] = kIgnoredTarget;
  batch.document_starts[5] = 2;
  return batch;
}

std::vector<float> counting(std::int64_t count) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < count; ++i) values.push_back(static_cast<float>(i) + 0.5F);
  return values;
}

// The six tokens of width 4 in two halves, a parameter and its gradient in two micro-batches.
void write_small(const std::filesystem::path& folder) {
  TraceWriter writer(folder, small_header());
  std::vector<float> values = counting(12);
  for (int rank = 0; rank < 2; ++rank) {
    TraceEntry entry = whole_entry("embedding", TraceKind::activation, {6, 4}, DType::f32);
    entry.rank = rank;
    entry.shard.slices[0] = {{3 * rank, 3 * rank + 3}};
    writer.append(entry, view_of(values, {3, 4}));
  }
  std::vector<double> bias = {1, 2, 3, 4};
  writer.append(whole_entry("ln_f.bias", TraceKind::parameter, {4}, DType::f64), view_of(bias, {4}));
  std::vector<std::uint16_t> half = {to_bf16_bits(1.5F), to_bf16_bits(-2), 0, to_bf16_bits(64)};
  TraceEntry gradient = whole_entry("d.ln_f.bias", TraceKind::parameter_gradient, {4}, DType::bf16);
  gradient.shard.partial_sum = true;
  gradient.micro_batch = 1;
  writer.append(gradient, TensorView(half.data(), DType::bf16, {4}));
  writer.set_batch(small_batch());
  writer.header().loss = 2.25;
  writer.close();
}

std::string replaced(std::string text, std::string_view what, std::string_view by) {
  const auto at = text.find(what);
  EXPECT_NE(at, std::string::npos) << what;
  return at == std::string::npos ? text : text.replace(at, what.size(), by);
}

TEST(TraceFile, ReadsBackWhatWasWritten) {
  const TestFolder folder;
  write_small(folder / "trace");

  const TraceReader trace = open_trace(folder / "trace");

  EXPECT_EQ(trace.header().framework, "test");
  EXPECT_EQ(trace.header().model, small_model());
  EXPECT_EQ(trace.header().loss, 2.25);
  EXPECT_EQ(trace.header().ranks, 2);
  ASSERT_EQ(trace.entries().size(), 4U);
  EXPECT_EQ(trace.entries()[1].rank, 1);
  EXPECT_EQ(trace.entries()[1].shard.describe_slices(), "[3:6, 0:4]");
  EXPECT_EQ(trace.values(1)[11], 11.5);
  EXPECT_EQ(trace.entries()[2].kind, TraceKind::parameter);
  EXPECT_TRUE(trace.entries()[3].shard.partial_sum);
  EXPECT_EQ(trace.entries()[3].micro_batch, 1);
  EXPECT_EQ(trace.entries()[3].shard.dtype, DType::bf16);
  EXPECT_EQ(trace.values(3), (std::vector<double>{1.5, -2, 0, 64}));
  ASSERT_TRUE(trace.batch());
  EXPECT_EQ(trace.batch()->targets, small_batch().targets);
  EXPECT_EQ(trace.batch()->document_starts, small_batch().document_starts);
}

TEST(TraceFile, KeepsNothingOfATraceThatWasNotClosed) {
  const TestFolder folder;
  {
    TraceWriter writer(folder / "trace", small_header());
    std::vector<float> values = counting(4);
    writer.append(whole_entry("ln_f", TraceKind::activation, {1, 4}, DType::f32), view_of(values, {4}));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder / "trace"));
}

TEST(TraceFile, ReplacesAnOlderTrace) {
  const TestFolder folder;
  write_small(folder / "trace");
  TraceWriter writer(folder / "trace", small_header());
  std::vector<float> values = {7, 8, 9, 10};
  writer.append(whole_entry("ln_f", TraceKind::activation, {1, 4}, DType::f32), view_of(values, {4}));
  EXPECT_EQ(open_trace(folder / "trace").entries().size(), 4U) << "valid until the new one is closed";

  writer.close();

  EXPECT_EQ(open_trace(folder / "trace").entries().size(), 1U);
  EXPECT_EQ(open_trace(folder / "trace").values(0)[3], 10);
}

TEST(TraceFile, SeveralRanksMayWriteAtOnce) {
  const TestFolder folder;
  TraceWriter writer(folder / "trace", small_header());
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([&writer, rank] {
      for (int micro_batch = 0; micro_batch < 50; ++micro_batch) {
        TraceEntry entry = whole_entry("ln_f", TraceKind::activation, {1, 4}, DType::f32);
        entry.rank = rank;
        entry.micro_batch = micro_batch;
        std::vector<float> values(4, static_cast<float>(100 * rank + micro_batch));
        writer.append(entry, view_of(values, {4}));
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  writer.close();

  const TraceReader trace = open_trace(folder / "trace");
  ASSERT_EQ(trace.entries().size(), 200U);
  for (std::size_t i = 0; i < 200; ++i) {
    EXPECT_EQ(trace.values(i)[2], 100 * trace.entries()[i].rank + trace.entries()[i].micro_batch);
  }
}

TEST(TraceFile, FullDiskIsAnIoErrorAndLeavesTheOldTrace) {
  const TestFolder folder;
  write_small(folder / "trace");
  const auto write_large = [&] {
    TraceWriter writer(folder / "trace", small_header());
    std::vector<float> values(1 << 18);
    for (int i = 0; i < 4; ++i) {
      writer.append(whole_entry("ln_f", TraceKind::activation, {1 << 16, 4}, DType::f32), view_of(values, {1 << 18}));
    }
    writer.close();
  };

  std::string message;
  {
    const FileSizeLimit limit(1 << 20);
    message = message_of<IoError>(write_large);
  }

  EXPECT_NE(message, "");
  EXPECT_EQ(open_trace(folder / "trace").entries().size(), 4U);
}

TEST(TraceFile, RefusesValuesThatAreNotAsManyAsTheSlicesSay) {
  const TestFolder folder;
  TraceWriter writer(folder / "trace", small_header());
  std::vector<float> values = counting(3);
  EXPECT_THROW(writer.append(whole_entry("ln_f", TraceKind::activation, {1, 4}, DType::f32), view_of(values, {3})),
               ContractError);
}

struct Damage {
  std::string what, from, to, complaint;
};

TEST(TraceFile, SaysWhatIsWrongWithADamagedIndex) {
  const TestFolder folder;
  write_small(folder / "trace");
  const std::string good = TestFolder::read(folder / "trace" / "trace.json");
  const std::vector<Damage> damages = {
      {"format", "tandem-trace-1", "tandem-trace-9", "\"format\" must be \"tandem-trace-1\""},
      {"JSON", "{", "", "not valid JSON"},
      {"precision", "\"fp32\"", "\"fp31\"", "must be fp64, fp32, fp16 or bf16"},
      {"model", "\"n_head\": 2", "\"n_head\": 3", "does not divide"},
      {"field", "\"ranks\"", "\"rank\"", "\"rank\" is not known, did you mean \"ranks\"?"},
      {"dropout", "\"off\"", "\"on\"", "\"dropout\" is \"on\""},
      {"kind", "\"kind\": \"activation\"", "\"kind\": \"activity\"", "entries[0]: field \"kind\""},
      {"gradient name", "\"name\": \"d.ln_f.bias\"", "\"name\": \"ln_f.bias\"", "begin with \"d.\""},
      {"key", "\"key\": \"000000.embedding\"", "\"key\": \"nowhere\"", "nowhere"},
      {"file", "\"file\": \"values.safetensors\"", "\"file\": \"../values.safetensors\"", "does not lie in the folder"},
      {"missing file", "\"file\": \"values.safetensors\"", "\"file\": \"other.safetensors\"", "other.safetensors"},
      {"element type", "\"partial_sum\": true", "\"partial_sum\": 1", "must be true or false"},
      {"rank", "\"rank\": 1", "\"rank\": -1", "entries[1]: field \"rank\" is -1"},
      {"count", "\"micro_batch\": 1", "\"micro_batch\": 1, \"padded_rows\": 2",
       "has 4 values, shape and slices of the entry ask for 6"},
      {"transposed", "\"micro_batch\": 1", "\"micro_batch\": 1, \"transposed\": true", "is transposed"},
      {"qkv", "\"micro_batch\": 1", "\"micro_batch\": 1, \"layout\": \"megatron_qkv\"", "3 x heads x head size"},
      {"layout", "\"micro_batch\": 1", "\"micro_batch\": 1, \"layout\": \"qkv\"", "only \"megatron_qkv\" is known"},
      {"batch", "\"batch.safetensors\"", "\"values.safetensors\"", "ids"}};
  for (const Damage& damage : damages) {
    folder.write("trace/trace.json", replaced(good, damage.from, damage.to));
    const std::string message = message_of<InputError>([&] { static_cast<void>(open_trace(folder / "trace")); });
    EXPECT_NE(message.find(damage.complaint), std::string::npos) << damage.what << ": " << message;
    EXPECT_NE(message.find((folder / "trace").string()), std::string::npos) << damage.what << ": " << message;
  }
  folder.write("trace/trace.json", good);
  EXPECT_NO_THROW(open_trace(folder / "trace"));
}

TEST(TraceFile, RefusesSlicesThatLeaveTheTensor) {
  TraceEntry entry = whole_entry("ln_f", TraceKind::activation, {6, 4}, DType::f32);
  EXPECT_NO_THROW(require_possible(entry, 2, "x"));
  entry.shard.slices[1] = {{2, 5}};
  EXPECT_NE(message_of<InputError>([&] { require_possible(entry, 2, "x"); }).find("slice [2, 5) in dimension 1 of extent 4"),
            std::string::npos);
  entry.shard.slices[1] = {{3, 2}};
  EXPECT_THROW(require_possible(entry, 2, "x"), InputError);
  entry.shard.slices[1] = {{0, 3}, {2, 4}};
  EXPECT_THROW(require_possible(entry, 2, "x"), InputError);
  entry.shard.slices.pop_back();
  EXPECT_THROW(require_possible(entry, 2, "x"), InputError);
}

TEST(TraceFile, RefusesTruncatedValues) {
  const TestFolder folder;
  write_small(folder / "trace");
  const std::string bytes = TestFolder::read(folder / "trace" / "values.safetensors");
  folder.write("trace/values.safetensors", bytes.substr(0, bytes.size() - 1));
  EXPECT_NE(message_of<InputError>([&] { static_cast<void>(open_trace(folder / "trace")); }).find("values.safetensors"),
            std::string::npos);
}

TEST(TraceFile, RefusesAFolderThatIsNoTrace) {
  const TestFolder folder;
  EXPECT_NE(message_of<InputError>([&] { static_cast<void>(open_trace(folder.path())); }).find("no trace.json"),
            std::string::npos);
  EXPECT_NE(message_of<InputError>([&] { static_cast<void>(open_trace(folder / "none")); }).find("no such folder"),
            std::string::npos);
}

// One folder per rank, with the rows that it saw.
void write_rank(const std::filesystem::path& folder, std::int64_t first_row, std::int64_t rows, const Batch& global) {
  TraceWriter writer(folder, small_header());
  std::vector<float> values = counting(rows * 12);
  TraceEntry entry = whole_entry("embedding", TraceKind::activation, {6, 4}, DType::f32);
  entry.shard.slices[0] = {{3 * first_row, 3 * (first_row + rows)}};
  writer.append(entry, view_of(values, {rows * 12}));
  writer.set_batch(slice_rows(global, first_row, rows));
  writer.close();
}

TEST(TraceFile, PutsTheRowsOfSeveralRanksTogether) {
  const TestFolder folder;
  write_rank(folder / "0", 1, 1, small_batch());
  write_rank(folder / "1", 0, 1, small_batch());

  const TraceReader trace = open_trace(folder.path());

  ASSERT_EQ(trace.entries().size(), 2U);
  ASSERT_TRUE(trace.batch());
  EXPECT_EQ(trace.batch()->rows, 2);
  EXPECT_EQ(trace.batch()->ids, small_batch().ids);
}

TEST(TraceFile, RefusesBatchesThatContradictEachOtherOrMissRows) {
  const TestFolder folder;
  write_rank(folder / "0", 0, 2, small_batch());
  Batch other = small_batch();
  other.ids[4] = 9;
  write_rank(folder / "1", 1, 1, other);
  EXPECT_NE(message_of<InputError>([&] { static_cast<void>(open_trace(folder.path())); }).find("row 1 differs"),
            std::string::npos);
  EXPECT_NE(message_of<InputError>([&] { static_cast<void>(open_trace(folder / "1")); }).find("no row 0"), std::string::npos);
}

TEST(TraceFile, RefusesRanksOfDifferentSteps) {
  const TestFolder folder;
  write_small(folder / "0");
  write_small(folder / "1");
  const std::string text = TestFolder::read(folder / "1" / "trace.json");
  folder.write("1/trace.json", replaced(text, "\"step\": 0", "\"step\": 1"));
  EXPECT_NE(message_of<InputError>([&] { static_cast<void>(open_trace(folder.path())); }).find("the step differs"),
            std::string::npos);
}

TEST(TraceFile, MegatronOrderIsHeadByHead) {
  TraceEntry entry = whole_entry("h.0.attn.c_attn.bias", TraceKind::parameter, {12}, DType::f32);
  entry.megatron_qkv = true;
  // Two heads of size 2: q of head 0, k of head 0, v of head 0, q of head 1, ...
  EXPECT_EQ(global_indices(entry, 2), (std::vector<std::int64_t>{0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11}));
}

TEST(TraceFile, MegatronOrderOfOneTensorRankAndTransposedWeight) {
  TraceEntry entry = whole_entry("h.0.attn.c_attn.weight", TraceKind::parameter, {2, 12}, DType::f32);
  entry.shard.slices[1] = {{2, 4}, {6, 8}, {10, 12}};  // head 1
  entry.megatron_qkv = true;
  entry.transposed = true;
  EXPECT_EQ(global_indices(entry, 2), (std::vector<std::int64_t>{2, 14, 3, 15, 6, 18, 7, 19, 10, 22, 11, 23}));
}

TEST(TraceFile, FlatShardsMayEndInPadding) {
  TraceEntry entry = whole_entry("ln_f.weight", TraceKind::parameter, {5}, DType::f32);
  entry.shard.flat_range = Interval{3, 6};
  EXPECT_EQ(global_indices(entry, 2), (std::vector<std::int64_t>{3, 4, -1}));
  entry.shard.flat_range = Interval{6, 9};
  EXPECT_EQ(global_indices(entry, 2), (std::vector<std::int64_t>{-1, -1, -1}));
}

}  // namespace
}  // namespace tandem
