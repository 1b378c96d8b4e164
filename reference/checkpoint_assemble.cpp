// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <map>
#include <span>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/io/atomic_file.h"
#include "core/io/hash.h"
#include "core/io/mapped_file.h"
#include "core/io/safetensors.h"
#include "core/shard.h"
#include "reference/checkpoint.h"

namespace tandem::reference {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kHashField = "manifest_xxh128";

// The last field is the hash of all text before it.
json read_manifest(const fs::path& file) {
  const std::string text = read_text_file(file);
  json manifest;
  try {
    manifest = json::parse(text);
  } catch (const json::exception& failure) {
    throw InputError(fmt::format("{}: {}", file.string(), failure.what()));
  }
  const std::size_t end = text.rfind(fmt::format("\"{}\"", kHashField));
  if (end == std::string::npos) throw InputError(fmt::format("{}: no field '{}'", file.string(), kHashField));
  const std::string found = to_hex(hash128(std::as_bytes(std::span(text).first(end))));
  if (manifest.at(kHashField) != found) throw InputError(fmt::format("{}: its hash is {}", file.string(), found));
  if (manifest.at("format") != "tandem-checkpoint" || manifest.at("version") != 2) {
    throw InputError(fmt::format("{}: another format or version", file.string()));
  }
  return manifest;
}

void check_file(const fs::path& path, const json& entry) {
  const MappedFile file(path);
  const std::span<const std::byte> content = file.bytes();
  if (std::ssize(content) != entry.at("bytes").get<std::int64_t>()) {
    throw InputError(fmt::format("{}: {} bytes, the manifest says {}", path.string(), content.size(), entry.at("bytes").dump()));
  }
  const std::string hash = to_hex(hash128(content));
  if (entry.at("xxh128") != hash) {
    throw InputError(fmt::format("{}: hash {}, the manifest says {}", path.string(), hash, entry.at("xxh128").dump()));
  }
}

// Slices that are not given are whole.
ShardSpec shard_of(const json& piece, const std::string& name, const StateTensor& tensor) {
  ShardSpec shard = whole(name, tensor.shape, tensor.dtype);
  if (piece.contains("slices")) {
    for (std::size_t dim = 0; dim < tensor.shape.size(); ++dim) {
      shard.slices[dim].clear();
      for (const json& interval : piece.at("slices").at(dim)) shard.slices[dim].push_back({interval.at(0), interval.at(1)});
    }
  }
  if (piece.contains("padded_rows")) piece.at("padded_rows").get_to(shard.padded_rows);
  if (piece.contains("elements")) shard.flat_range = Interval{piece.at("elements").at(0), piece.at("elements").at(1)};
  return shard;
}

// Puts the elements of one piece where they belong; an element that has its value already is counted again.
void place(const ShardSpec& shard, std::span<const std::byte> values, StateTensor& tensor, std::vector<int>& given) {
  const std::size_t size = size_bytes(tensor.dtype);
  const std::vector<std::int64_t> indices = global_indices(shard);
  for (std::size_t i = 0; i < indices.size(); ++i) {
    if (indices[i] < 0) continue;
    const auto index = static_cast<std::size_t>(indices[i]);
    for (std::size_t b = 0; b < size; ++b) tensor.bytes.at(index * size + b) = values[i * size + b];
    given.at(index) += 1;
  }
}

StateTensor put_together(const json& entry, const std::vector<SafetensorsFile>& files, const fs::path& manifest) {
  const std::string name = entry.at("name");
  StateTensor tensor{entry.at("shape").get<Shape>(), parse_dtype(entry.at("dtype").get<std::string>()), {}};
  const auto elements = static_cast<std::size_t>(num_elements(tensor.shape));
  tensor.bytes.resize(elements * size_bytes(tensor.dtype));
  std::vector<int> given(elements, 0);
  for (const json& piece : entry.at("pieces")) {
    const SafetensorsFile& file = files.at(piece.at("file").get<std::size_t>());
    const ShardSpec shard = shard_of(piece, name, tensor);
    const auto stored = static_cast<std::int64_t>(file.bytes(name).size() / size_bytes(tensor.dtype));
    if (file.entry(name).dtype != tensor.dtype || stored != shard.num_elements()) {
      throw InputError(fmt::format("{}: {} is not as the manifest says", file.path().string(), name));
    }
    place(shard, file.bytes(name), tensor, given);
  }
  for (std::size_t i = 0; i < elements; ++i) {
    if (given[i] == 1) continue;
    throw InputError(fmt::format("{}: element {} of {} is given {} times", manifest.string(), i, name, given[i]));
  }
  return tensor;
}

void read_fields(const json& manifest, State& state) {
  manifest.at("next_step").get_to(state.next_step);
  manifest.at("updates").get_to(state.updates);
  manifest.at("learning_rate").get_to(state.learning_rate);
  manifest.at("data_identity").get_to(state.data_identity);
  manifest.at("config").at("run").at("seed").get_to(state.seed);
  manifest.at("loss_scale").at("scale").get_to(state.loss_scale);
  manifest.at("loss_scale").at("growth_tracker").get_to(state.growth_tracker);
  manifest.at("loss_scale").at("skipped_steps").get_to(state.skipped_steps);
  manifest.at("fp8").at("histories").get_to(state.fp8_histories);
  manifest.at("fp8").at("position").get_to(state.fp8_position);
}

State assemble_from(const fs::path& step_folder, const json& manifest) {
  State state;
  read_fields(manifest, state);
  std::vector<SafetensorsFile> files;
  for (const json& entry : manifest.at("files")) {
    const fs::path path = step_folder / entry.at("name").get<std::string>();
    check_file(path, entry);
    files.emplace_back(path);
  }
  for (const json& entry : manifest.at("tensors")) {
    state.tensors.emplace(entry.at("name").get<std::string>(), put_together(entry, files, step_folder / "manifest.json"));
  }
  for (const SafetensorsFile& file : files) {
    const std::string stem = file.path().stem().string();
    if (!stem.starts_with("residuals-")) continue;
    for (const SafetensorsEntry& entry : file.entries()) {
      const auto bytes = file.bytes(entry.name);
      state.tensors.emplace(fmt::format("{}/{}", stem, entry.name),
                            StateTensor{entry.shape, entry.dtype, {bytes.begin(), bytes.end()}});
    }
  }
  return state;
}

}  // namespace

State assemble(const fs::path& step_folder) {
  const json manifest = read_manifest(step_folder / "manifest.json");
  try {
    return assemble_from(step_folder, manifest);
  } catch (const json::exception& failure) {
    throw InputError(fmt::format("{}: {}", (step_folder / "manifest.json").string(), failure.what()));
  }
}

}  // namespace tandem::reference
