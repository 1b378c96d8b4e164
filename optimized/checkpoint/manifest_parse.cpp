// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/io/atomic_file.h"
#include "core/io/json_field.h"
#include "core/shard_runs.h"
#include "optimized/checkpoint/manifest.h"
#include "optimized/checkpoint/manifest_format.h"

namespace tandem {
namespace {

using nlohmann::json;

Interval interval(const JsonField& field) {
  field.require(field.size() == 2, "is not [begin, end]");
  const Interval result{field.at(0).count(), field.at(1).count()};
  field.require(result.begin <= result.end, fmt::format("ends at {} before it begins at {}", result.end, result.begin));
  return result;
}

constexpr std::string_view kFormat1 = "tandem-checkpoint-1";

std::string of_format_1(const std::string& file) {
  return fmt::format("{}: a checkpoint of format 1, this program reads format {}; go on with the version that wrote it", file,
                     kCheckpointVersion);
}

void check_format(const JsonField& root, const std::string& file) {
  root.require(root.value().is_object(), "not a JSON object");
  if (root["format"].text() == kFormat1) throw InputError(of_format_1(file));
  root.require_format(kCheckpointFormat, kCheckpointVersion);
}

void check_hash(const JsonField& root, std::string_view text, MissingHash missing_hash) {
  if (missing_hash == MissingHash::accept && !root.has(kManifestHashField)) return;
  const Hash128 said = root[kManifestHashField].hash();
  const std::string key = fmt::format("\"{}\"", kManifestHashField);
  const std::string_view hashed = text.substr(0, text.rfind(key));
  const Hash128 found = hash128(std::as_bytes(std::span(hashed)));
  root.require(found == said, fmt::format("damaged: its text hashes to {}, field '{}' says {}", to_hex(found), kManifestHashField,
                                          to_hex(said)));
  root.require(text.substr(hashed.size()) == manifest_ending(found),
               fmt::format("damaged: something else than '{}' ends it", kManifestHashField));
}

CheckpointInfo info_from(const JsonField& root, const std::string& file) {
  CheckpointInfo info;
  info.next_step = root["next_step"].count();
  info.updates = root["updates"].count();
  root["updates"].require(info.updates <= info.next_step,
                          fmt::format("is {}, more than the {} steps that there were", info.updates, info.next_step));
  info.learning_rate = root["learning_rate"].amount();
  info.data = root["data"].text();
  info.data_identity = root["data_identity"].text();
  if (root.has("skipped_batches")) {
    const JsonField skipped = root["skipped_batches"];
    for (std::size_t i = 0; i < skipped.size(); ++i) info.skipped_batches.push_back(skipped.at(i).count());
  }
  const JsonField scale = root["loss_scale"];
  info.loss_scaler = {scale["scale"].amount(), scale["growth_tracker"].count(), scale["skipped_steps"].count()};
  scale["scale"].require(info.loss_scaler.scale > 0, "is 0, which no run can have saved");
  const JsonField fp8 = root["fp8"];
  const JsonField histories = fp8["histories"];
  for (std::size_t i = 0; i < histories.size(); ++i) info.fp8.histories.push_back(histories.at(i).amount());
  info.fp8.position = fp8["position"].count();
  const JsonField config = root["config"];
  config.require(config.value().is_object(), "is no object");
  info.config = config_from_json(config.value().dump(), file);
  return info;
}

std::map<std::string, std::string> libraries_from(const JsonField& node) {
  node.require(node.value().is_object(), "is no object");
  std::map<std::string, std::string> libraries;
  for (const auto& [name, unused] : node.value().items()) libraries.emplace(name, node[name.c_str()].text());
  return libraries;
}

std::vector<CheckpointFile> files_from(const JsonField& node, MissingHash missing_hash) {
  std::vector<CheckpointFile> files;
  std::set<std::string> names;
  for (std::size_t i = 0; i < node.size(); ++i) {
    const JsonField entry = node.at(i);
    CheckpointFile file;
    file.name = entry["name"].text();
    const bool plain = !file.name.empty() && file.name.find('/') == std::string::npos && file.name != "." && file.name != ".." &&
                       file.name != kManifestName;
    entry["name"].require(plain, fmt::format("is '{}', no name of a file in the folder", file.name));
    entry["name"].require(names.insert(file.name).second, fmt::format("is '{}' a second time", file.name));
    file.bytes = entry["bytes"].count();
    if (missing_hash == MissingHash::refuse || entry.has("xxh128")) file.hash = entry["xxh128"].hash();
    files.push_back(std::move(file));
  }
  return files;
}

// Bytes of `elements`, refused where no file of the checkpoint could hold them: what follows may then count on sizes.
std::int64_t stored_bytes(const JsonField& node, const Shape& shape, DType dtype, std::int64_t most_bytes) {
  auto bytes = static_cast<std::int64_t>(size_bytes(dtype));
  for (const std::int64_t extent : shape) {
    const bool overflows = __builtin_mul_overflow(bytes, extent, &bytes);
    node.require(!overflows && bytes <= most_bytes,
                 fmt::format("is {} of {}, more than the {} bytes of its files", to_string(shape), name(dtype), most_bytes));
  }
  return bytes;
}

CheckpointPiece piece_from(const JsonField& node, const CheckpointTensor& tensor, const std::vector<CheckpointFile>& files) {
  CheckpointPiece piece;
  piece.file = static_cast<std::size_t>(node["file"].count());
  node["file"].require(piece.file < files.size(), fmt::format("is {}, there are {} files", piece.file, files.size()));
  piece.shard = whole(tensor.name, tensor.shape, tensor.dtype);
  if (node.has("slices")) {
    const JsonField slices = node["slices"];
    slices.require(slices.size() == tensor.shape.size(),
                   fmt::format("has {} dimensions, the tensor {}", slices.size(), tensor.shape.size()));
    for (std::size_t dim = 0; dim < slices.size(); ++dim) {
      std::vector<Interval>& along = piece.shard.slices[dim];
      along.clear();
      for (std::size_t i = 0; i < slices.at(dim).size(); ++i) {
        const JsonField one = slices.at(dim).at(i);
        along.push_back(interval(one));
        one.require(along.back().end <= tensor.shape[dim],
                    fmt::format("ends at {}, the dimension has {}", along.back().end, tensor.shape[dim]));
      }
    }
  }
  const std::int64_t file_bytes = files[piece.file].bytes;
  if (node.has("padded_rows")) {
    piece.shard.padded_rows = node["padded_rows"].count();
    node["padded_rows"].require(!tensor.shape.empty() && piece.shard.padded_rows <= std::numeric_limits<std::int32_t>::max(),
                                "is no number of rows that such a tensor can have");
  }
  constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();
  static_cast<void>(stored_bytes(node, piece.shard.local_shape(), tensor.dtype, kNoLimit));
  if (node.has("elements")) {
    piece.shard.flat_range = interval(node["elements"]);
    const std::int64_t local = num_elements(piece.shard.local_shape());
    node["elements"].require(piece.shard.flat_range->end <= local,
                             fmt::format("ends at {}, its slices have {} elements", piece.shard.flat_range->end, local));
  }
  static_cast<void>(stored_bytes(node, stored_shape(piece.shard), tensor.dtype, file_bytes));
  return piece;
}

void check_coverage(const JsonField& node, const CheckpointTensor& tensor) {
  std::vector<ShardRun> all;
  for (const CheckpointPiece& piece : tensor.pieces) {
    try {
      const std::vector<ShardRun> runs = shard_runs(piece.shard);
      all.insert(all.end(), runs.begin(), runs.end());
    } catch (const ContractError&) {
      node.refuse(fmt::format("of {}: the slices {} of one overlap", tensor.name, piece.shard.describe_slices()));
    }
  }
  if (tensor.pieces.size() > 1) std::ranges::sort(all, {}, &ShardRun::global);
  std::int64_t next = 0;
  for (const ShardRun& run : all) {
    node.require(run.global <= next, fmt::format("of {} leave a gap: elements {}:{}", tensor.name, next, run.global));
    node.require(run.global >= next,
                 fmt::format("of {} overlap: elements {}:{}", tensor.name, run.global, std::min(next, run.global + run.count)));
    next += run.count;
  }
  const std::int64_t elements = num_elements(tensor.shape);
  node.require(next == elements, fmt::format("of {} leave a gap: elements {}:{}", tensor.name, next, elements));
}

CheckpointTensor tensor_from(const JsonField& node, const std::vector<CheckpointFile>& files, std::int64_t total_bytes) {
  CheckpointTensor tensor;
  tensor.name = node["name"].text();
  node["name"].require(!tensor.name.empty(), "is empty");
  const std::string dtype = node["dtype"].text();
  for (const DType known : {DType::f64, DType::f32, DType::bf16, DType::f16}) {
    if (name(known) != dtype) continue;
    tensor.dtype = known;
    const JsonField shape = node["shape"];
    for (std::size_t dim = 0; dim < shape.size(); ++dim) {
      tensor.shape.push_back(shape.at(dim).count());
      shape.at(dim).require(tensor.shape.back() > 0, "is 0");
    }
    static_cast<void>(stored_bytes(shape, tensor.shape, tensor.dtype, total_bytes));
    const JsonField pieces = node["pieces"];
    std::set<std::size_t> used;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      tensor.pieces.push_back(piece_from(pieces.at(i), tensor, files));
      pieces.at(i)["file"].require(used.insert(tensor.pieces.back().file).second, "has a second piece of the same tensor");
    }
    check_coverage(pieces, tensor);
    return tensor;
  }
  node["dtype"].refuse(fmt::format("is '{}', not one of fp64, fp32, bf16, fp16", dtype));
}

}  // namespace

CheckpointManifest parse_manifest(std::string_view text, const std::string& file, MissingHash missing_hash) {
  json parsed;
  try {
    parsed = json::parse(text);
  } catch (const json::parse_error& failure) {
    throw InputError(fmt::format("{}: not JSON at byte {} of {}: truncated or damaged", file, failure.byte, text.size()));
  } catch (const json::exception& failure) {
    throw InputError(fmt::format("{}: not JSON: {}", file, failure.what()));
  }
  const JsonField root(file, parsed);
  check_format(root, file);
  check_hash(root, text, missing_hash);
  CheckpointManifest manifest;
  manifest.info = info_from(root, file);
  manifest.libraries = libraries_from(root["libraries"]);
  manifest.files = files_from(root["files"], missing_hash);
  std::int64_t total_bytes = 0;
  for (const CheckpointFile& one : manifest.files) {
    const bool overflows = __builtin_add_overflow(total_bytes, one.bytes, &total_bytes);
    root["files"].require(!overflows, "have more than 2^63 bytes");
  }
  const JsonField tensors = root["tensors"];
  std::set<std::string, std::less<>> names;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    manifest.tensors.push_back(tensor_from(tensors.at(i), manifest.files, total_bytes));
    const std::string& name = manifest.tensors.back().name;
    tensors.at(i)["name"].require(names.insert(name).second, fmt::format("is '{}' a second time", name));
  }
  return manifest;
}

CheckpointManifest read_manifest_of(const std::filesystem::path& step_folder, MissingHash missing_hash) {
  const std::filesystem::path file = step_folder / kManifestName;
  std::error_code error;
  if (!std::filesystem::exists(file, error) && std::filesystem::exists(step_folder / "state.json", error)) {
    throw InputError(of_format_1((step_folder / "state.json").string()));
  }
  // Reading a pipe would wait for ever.
  const std::filesystem::file_status status = std::filesystem::status(file, error);
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
    throw InputError(fmt::format("{}: is no regular file", file.string()));
  }
  return parse_manifest(read_text_file(file), file.string(), missing_hash);
}

}  // namespace tandem
