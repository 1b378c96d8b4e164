// SPDX-License-Identifier: Apache-2.0
// What preparing and opening data costs.
//
// prepare_bytes: from file to files: reading (from the page cache), checking, encoding, writing, making durable, and the check of
// the result (inspect_data()).
//
// encode: without writing, by 1 and 2 threads, in real time; the column CPU is that of all threads. `bpe` is a tokenizer that was
// trained here, which remembers words, `model` the same one from a file, which does not.
//
// open_index: an .idx of 10 GB (sparse) and a .bin of 6 GiB; check_index reads all of a tenth of it.
//
// read_cached: a .bin of 64 MiB behind a store that is a folder, read once from front to back in pieces of 8 KiB: `cold` from the
// store, `disk` from the files of an earlier run, `memory` from memory; with and without two blocks read ahead.
#include <benchmark/benchmark.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "core/io/indexed_dataset.h"
#include "core/io/test_folder.h"
#include "core/rng.h"
#include "optimized/data_pipeline/block_cache.h"
#include "optimized/data_pipeline/encode_chunks.h"
#include "optimized/data_pipeline/prepare.h"
#include "optimized/storage/folder_store.h"

namespace tandem {
namespace {

/// `bytes` of lines of words, the frequent ones short and often.
std::string text_of_words(std::size_t bytes) {
  CounterRng rng(1, "words");
  std::vector<std::string> words;
  for (std::size_t w = 0; w < 20'000; ++w) {
    std::string word;
    for (std::uint64_t i = 0, length = 2 + rng.next_below(3 + w / 3000); i < length; ++i) {
      word += static_cast<char>('a' + rng.next_below(26));
    }
    words.push_back(word);
  }
  std::string text;
  text.reserve(bytes + 64);
  while (text.size() < bytes) {
    const std::uint64_t bound = 1 + rng.next_below(words.size());
    text += words[rng.next_below(bound)];
    text += rng.next_below(12) == 0 ? ".\n" : " ";
  }
  return text;
}

/// A text of 16 MiB, and a model trained on 4 MiB of it.
class Text {
 public:
  Text() : file_(folder_.write("text", text_of_words(std::size_t{16} << 20))) {}

  [[nodiscard]] const std::filesystem::path& file() const { return file_; }
  [[nodiscard]] std::filesystem::path out() const { return folder_ / "out"; }
  [[nodiscard]] std::shared_ptr<const TextTokenizer> tokenizer(const std::string& which) {
    if (which == "bytes") return bytes_tokenizer();
    if (model_.empty()) model_ = train_bpe(8192, {file_}, std::int64_t{4} << 20);
    return sentencepiece_tokenizer(which == "bpe" ? "bpe:8192" : "bench.model", model_, "the benchmark's model");
  }

 private:
  TestFolder folder_;
  std::filesystem::path file_;
  std::string model_;
};

Text& text() {
  static Text made;
  return made;
}

void prepare_bytes(benchmark::State& state) {
  std::int64_t tokens = 0;
  const PrepareOptions options = {.threads = static_cast<int>(state.range(0))};
  (void)text();
  for (auto _ : state) {
    tokens += prepare_data({text().file()}, "bytes", text().out(), DocumentRule::line, options).tokens;
  }
  state.SetItemsProcessed(tokens);
}
BENCHMARK(prepare_bytes)->Arg(1)->Arg(2)->MeasureProcessCPUTime()->UseRealTime()->Unit(benchmark::kMillisecond);

void encode(benchmark::State& state, const std::string& which) {
  const auto tokenizer = text().tokenizer(which);
  const DType dtype = token_dtype(tokenizer->vocabulary());
  std::int64_t stored_bytes = 0;
  std::int64_t text_bytes = 0;
  for (auto _ : state) {
    ChunkEncoder encoder(
        static_cast<int>(state.range(0)), [&](const TextChunk& chunk) { return encode_chunk(chunk, *tokenizer, dtype); },
        [&](EncodedChunk&& chunk) {
          stored_bytes += std::ssize(chunk.tokens);
          text_bytes += static_cast<std::int64_t>(chunk.text_bytes);
        });
    for_each_chunk({text().file()}, DocumentRule::line, std::size_t{1} << 20,
                   [&](TextChunk chunk) { encoder.submit(std::move(chunk)); });
    encoder.finish();
  }
  state.SetItemsProcessed(stored_bytes / static_cast<std::int64_t>(size_bytes(dtype)));
  state.SetBytesProcessed(text_bytes);
}
BENCHMARK_CAPTURE(encode, bytes, "bytes")->Arg(1)->Arg(2)->MeasureProcessCPUTime()->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(encode, bpe, "bpe")->Arg(1)->Arg(2)->MeasureProcessCPUTime()->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(encode, model, "model")
    ->Arg(1)
    ->Arg(2)
    ->MeasureProcessCPUTime()
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond)
    ->Iterations(1);

void train_tokenizer(benchmark::State& state) {
  for (auto _ : state) benchmark::DoNotOptimize(train_bpe(8192, {text().file()}, std::int64_t{4} << 20));
}
BENCHMARK(train_tokenizer)->Unit(benchmark::kMillisecond)->Iterations(1);

/// An .idx of `sequences` documents without tokens, but for the last, which takes the whole .bin of 6 GiB.
class SparseIndex {
 public:
  explicit SparseIndex(std::int64_t sequences) {
    constexpr std::int64_t kBinBytes = std::int64_t{6} << 30;
    const std::int64_t pointers = 34 + sequences * 4;
    const std::int64_t documents = pointers + sequences * 8;
    for (const auto& [file, size] :
         {std::pair(folder_ / "x.idx", documents + (sequences + 1) * 8), {folder_ / "x.bin", kBinBytes}}) {
      std::ofstream(file).flush();
      std::filesystem::resize_file(file, static_cast<std::uintmax_t>(size));
    }
    put(0, std::string(kIndexMagic));
    put(9, bytes_of(std::uint64_t{1}) + '\x04');
    put(18, bytes_of(sequences) + bytes_of(sequences + 1));
    put(pointers - 4, bytes_of(std::int32_t{1} << 30));
    put(documents - 8, bytes_of(kBinBytes - (std::int64_t{4} << 30)));
    put(documents + sequences * 8, bytes_of(sequences));
  }
  [[nodiscard]] std::filesystem::path prefix() const { return folder_ / "x"; }

 private:
  template <class T>
  static std::string bytes_of(T value) {
    return {reinterpret_cast<const char*>(&value), sizeof(T)};
  }
  void put(std::int64_t at, const std::string& bytes) const {
    std::fstream file(folder_ / "x.idx", std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(at).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
  TestFolder folder_;
};

void open_index(benchmark::State& state) {
  const SparseIndex index(state.range(0));
  for (auto _ : state) benchmark::DoNotOptimize(IndexedDataset(index.prefix()).num_tokens());
  state.counters["idx_bytes"] = static_cast<double>(std::filesystem::file_size(idx_path(index.prefix())));
}
BENCHMARK(open_index)->Arg(1'000'000)->Arg(500'000'000)->Unit(benchmark::kMicrosecond);

void check_index(benchmark::State& state) {
  const SparseIndex index(state.range(0));
  const IndexedDataset dataset(index.prefix());
  for (auto _ : state) {
    // Sequences that begin at 0 and hold nothing, before one that does not: refused at the last of them, all have been read.
    try {
      dataset.check();
    } catch (const InputError&) {
    }
  }
}
BENCHMARK(check_index)->Arg(50'000'000)->Unit(benchmark::kMillisecond)->Iterations(1);

constexpr std::int64_t kObjectBytes = std::int64_t{64} << 20;

void read_cached(benchmark::State& state, const std::string& from) {
  const TestFolder folder;
  const auto store = std::make_shared<FolderStore>(folder / "store");
  store->put("x.bin", std::vector<std::byte>(static_cast<std::size_t>(kObjectBytes), std::byte{7}));
  std::vector<std::byte> piece(8192);
  const auto open = [&](int run) {
    auto disk = std::make_shared<DiskCache>(folder / ("cache" + std::to_string(run)), 2 * kObjectBytes);
    return std::make_unique<BlockCache>(store, "x.bin", kObjectBytes, disk, "x",
                                        BlockCacheOptions{.memory_bytes = 2 * kObjectBytes, .read_ahead_blocks = state.range(0)});
  };
  const auto read_all = [&](BlockCache& cache) {
    for (std::int64_t at = 0; at < kObjectBytes; at += std::ssize(piece)) cache.read(at, piece);
  };
  auto cache = open(0);
  if (from != "cold") read_all(*cache);
  int run = 0;
  for (auto _ : state) {
    if (from != "memory") {
      state.PauseTiming();
      cache = open(from == "cold" ? ++run : 0);
      state.ResumeTiming();
    }
    read_all(*cache);
  }
  state.SetBytesProcessed(state.iterations() * kObjectBytes);
}
BENCHMARK_CAPTURE(read_cached, cold, "cold")
    ->Arg(0)
    ->Arg(2)
    ->MeasureProcessCPUTime()
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(read_cached, disk, "disk")
    ->Arg(0)
    ->Arg(2)
    ->MeasureProcessCPUTime()
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(read_cached, memory, "memory")->Arg(0)->MeasureProcessCPUTime()->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace tandem
