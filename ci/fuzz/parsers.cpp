// SPDX-License-Identifier: Apache-2.0
// Every parser of files and messages that come from outside, under libFuzzer: whatever the bytes, a parser returns or throws InputError
// (IoError where a file cannot be mapped). What it accepts it must write again, and read back the same.
//
//   TANDEM_FUZZ=safetensors build/fuzz/fuzz_parsers CORPUS [libFuzzer's options]       ci/fuzz/run.sh does it for all
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/cluster.h"
#include "core/config.h"
#include "core/error.h"
#include "core/fault_script.h"
#include "core/io/golden_set.h"
#include "core/io/hash.h"
#include "core/io/indexed_dataset.h"
#include "core/io/safetensors.h"
#include "core/io/trace_file_reader.h"
#include "core/model_shape.h"
#include "core/world_settings.h"
#include "harness/result_file.h"
#include "optimized/checkpoint/manifest.h"
#include "optimized/checkpoint/manifest_format.h"
#include "optimized/data_pipeline/llmc_file.h"
#include "optimized/data_pipeline/manifest.h"
#include "optimized/recovery/heartbeat_datagram.h"

namespace {

using Bytes = std::span<const std::uint8_t>;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "fuzz: %s\n", what);
  std::abort();
}

std::string_view text_of(Bytes bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

// A folder in memory, emptied for each input.
const std::filesystem::path& scratch() {
  static const std::filesystem::path folder = [] {
    std::filesystem::path made = std::filesystem::path("/dev/shm") / ("tandem_fuzz." + std::to_string(getpid()));
    std::filesystem::create_directories(made);
    return made;
  }();
  return folder;
}

std::filesystem::path file_of(const char* name, Bytes bytes) {
  std::filesystem::path path = scratch() / name;
  std::ofstream(path, std::ios::binary).write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  return path;
}

// Cuts the input in two at the first "\n--\n": two files of one format.
std::pair<Bytes, Bytes> halves(Bytes bytes) {
  const std::size_t at = text_of(bytes).find("\n--\n");
  if (at == std::string_view::npos) return {bytes, {}};
  return {bytes.first(at), bytes.subspan(at + 4)};
}

void fuzz_config(Bytes bytes) {
  const tandem::RunConfig config = tandem::config_from_json(text_of(bytes), "fuzz.json");
  const std::string written = tandem::to_json(config);
  if (tandem::to_json(tandem::config_from_json(written, "again.json")) != written) fail("a config changes when it is written and read");
}

void fuzz_cluster(Bytes bytes) {
  const tandem::ClusterSpec cluster = tandem::cluster_from_json(text_of(bytes), "fuzz.json");
  const std::string written = tandem::to_json(cluster);
  if (tandem::to_json(tandem::cluster_from_json(written, "again.json")) != written) fail("a cluster changes when it is written and read");
}

void fuzz_model_shape(Bytes bytes) { (void)tandem::model_shape_from_json(text_of(bytes), "fuzz.json"); }

void fuzz_result(Bytes bytes) {
  const tandem::ResultFile file = tandem::result_file_from_json(text_of(bytes), "fuzz.json");
  const std::string written = tandem::to_json(file);
  (void)tandem::result_file_from_json(written, "again.json");
}

// The hash at the end is put right, or nothing behind it would ever be reached.
void fuzz_manifest(Bytes bytes) {
  std::string text(text_of(bytes));
  if (const std::size_t at = text.rfind("\n--\n"); at != std::string::npos) text.resize(at);
  text += tandem::manifest_ending(tandem::hash128(std::as_bytes(std::span(text))));
  const tandem::CheckpointManifest manifest = tandem::parse_manifest(text, "manifest.json");
  (void)tandem::parse_manifest(tandem::to_json(manifest), "again.json");
}

void fuzz_data_manifest(Bytes bytes) {
  (void)tandem::to_json(tandem::parse_data_manifest(text_of(bytes), "fuzz.json"));
}

void fuzz_safetensors(Bytes bytes) {
  const tandem::SafetensorsFile file(file_of("fuzz.safetensors", bytes));
  for (const tandem::SafetensorsEntry& entry : file.entries()) {
    (void)file.bytes(entry.name);
    try {
      (void)file.read_as<double>(entry.name);
      (void)file.tensor(entry.name);
    } catch (const tandem::InputError&) {
    }
  }
}

void fuzz_indexed_dataset(Bytes bytes) {
  const auto [idx, bin] = halves(bytes);
  file_of("fuzz.idx", idx);
  file_of("fuzz.bin", bin);
  const tandem::IndexedDataset data(scratch() / "fuzz");
  std::vector<std::int32_t> tokens;
  for (std::int64_t i = 0; i < std::min<std::int64_t>(data.num_sequences(), 64); ++i) {
    const tandem::Interval range = data.sequence(i);
    tokens.resize(static_cast<std::size_t>(std::min<std::int64_t>(range.size(), 1 << 16)));
    data.read(range.begin, tokens);
  }
  for (std::int64_t i = 0; i < std::min<std::int64_t>(data.num_documents(), 64); ++i) (void)data.document_sequences(i);
  data.check();
}

void fuzz_llmc(Bytes bytes) {
  const tandem::LlmcTokens data(file_of("fuzz.bin", bytes));
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(std::min<std::int64_t>(data.num_tokens(), 1 << 16)));
  data.read(0, tokens);
}

void fuzz_trace(Bytes bytes) {
  const auto [index, tensors] = halves(bytes);
  std::filesystem::create_directories(scratch() / "trace");
  file_of("trace/trace.json", index);
  file_of("trace/values.safetensors", tensors);
  const tandem::TraceReader reader({scratch() / "trace"});
  for (std::size_t i = 0; i < reader.entries().size(); ++i) (void)reader.values(i);
}

void fuzz_golden(Bytes bytes) {
  const auto [config, tensors] = halves(bytes);
  std::filesystem::create_directories(scratch() / "golden");
  file_of("golden/config.json", config);
  for (const char* const name : {"golden/data.safetensors", "golden/init.safetensors", "golden/summary.safetensors"}) file_of(name, tensors);
  (void)tandem::read_golden_set(scratch() / "golden");
}

void fuzz_words(Bytes bytes) {
  const std::string text(text_of(bytes));
  try {
    (void)tandem::to_string(tandem::parse_fault(text));
  } catch (const tandem::InputError&) {
  }
  // A name without a slash or a dot would be looked for among the shipped ones, another as a file: both may be missing.
  (void)tandem::parse_link(text);
}

void fuzz_heartbeat(Bytes bytes) {
  std::vector<tandem::Heartbeat> beats;
  if (tandem::decode_beats(std::as_bytes(bytes), beats) == beats.empty()) fail("beats and the answer do not agree");
}

const std::map<std::string_view, void (*)(Bytes)> kTargets = {
    {"config", fuzz_config},           {"cluster", fuzz_cluster},         {"model_shape", fuzz_model_shape},
    {"result", fuzz_result},           {"manifest", fuzz_manifest},       {"data_manifest", fuzz_data_manifest},
    {"safetensors", fuzz_safetensors}, {"indexed_dataset", fuzz_indexed_dataset}, {"llmc", fuzz_llmc},
    {"trace", fuzz_trace},             {"golden", fuzz_golden},           {"words", fuzz_words},
    {"heartbeat", fuzz_heartbeat},
};

void (*target)(Bytes) = nullptr;

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  const char* const name = std::getenv("TANDEM_FUZZ");
  const auto found = kTargets.find(name == nullptr ? "" : name);
  if (found == kTargets.end()) {
    std::fprintf(stderr, "set TANDEM_FUZZ to one of:");
    for (const auto& [each, unused] : kTargets) std::fprintf(stderr, " %s", std::string(each).c_str());
    std::fprintf(stderr, "\n");
    std::exit(2);
  }
  target = found->second;
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    target({data, size});
  } catch (const tandem::InputError&) {
  } catch (const tandem::IoError&) {
  }
  return 0;
}
