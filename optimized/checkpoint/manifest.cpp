// SPDX-License-Identifier: Apache-2.0
#include "optimized/checkpoint/manifest.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "optimized/checkpoint/manifest_format.h"

namespace tandem {
namespace {

using nlohmann::json;

double finite(double value, const char* field) {
  TANDEM_CHECK(std::isfinite(value), fmt::format("'{}' of a checkpoint is {}", field, value));
  return value;
}

json to_json(const LossScalerState& state) {
  return {{"scale", finite(state.scale, "loss_scale.scale")},
          {"growth_tracker", state.growth_tracker},
          {"skipped_steps", state.skipped_steps}};
}

json to_json(const Fp8ScalingState& state) {
  for (const double amax : state.histories) static_cast<void>(finite(amax, "fp8.histories"));
  return {{"histories", state.histories}, {"position", state.position}};
}

json to_json(const CheckpointPiece& piece) {
  const ShardSpec& shard = piece.shard;
  json result = {{"file", piece.file}};
  ShardSpec cut = shard;
  cut.flat_range.reset();
  if (!cut.is_whole()) {
    json& slices = result["slices"] = json::array();
    for (const std::vector<Interval>& intervals : shard.slices) {
      json& along = slices.emplace_back(json::array());
      for (const Interval& interval : intervals) along.push_back({interval.begin, interval.end});
    }
  }
  if (shard.padded_rows != 0) result["padded_rows"] = shard.padded_rows;
  if (shard.flat_range) result["elements"] = {shard.flat_range->begin, shard.flat_range->end};
  return result;
}

json to_json(const CheckpointTensor& tensor) {
  json pieces = json::array();
  for (const CheckpointPiece& piece : tensor.pieces) pieces.push_back(to_json(piece));
  return {{"name", tensor.name}, {"dtype", name(tensor.dtype)}, {"shape", tensor.shape}, {"pieces", std::move(pieces)}};
}

json to_json(const CheckpointFile& file) { return {{"name", file.name}, {"bytes", file.bytes}, {"xxh128", to_hex(file.hash)}}; }

// A line for each element: the file can be read, and compared, by people.
template <class Element>
std::string lines(const std::vector<Element>& elements) {
  std::string text = "[";
  for (std::size_t i = 0; i < elements.size(); ++i) text += (i == 0 ? "\n  " : ",\n  ") + to_json(elements[i]).dump();
  return text + "\n]";
}

}  // namespace

std::string to_json(const CheckpointManifest& manifest) {
  const CheckpointInfo& info = manifest.info;
  std::string text = "{\n";
  const auto add = [&](const char* key, const std::string& value) { text += fmt::format("\"{}\": {},\n", key, value); };
  add("format", json(kCheckpointFormat).dump());
  add("version", json(kCheckpointVersion).dump());
  add("next_step", json(info.next_step).dump());
  add("updates", json(info.updates).dump());
  add("learning_rate", json(finite(info.learning_rate, "learning_rate")).dump());
  add("data", json(info.data).dump());
  add("data_identity", json(info.data_identity).dump());
  if (!info.skipped_batches.empty()) add("skipped_batches", json(info.skipped_batches).dump());
  add("loss_scale", to_json(info.loss_scaler).dump());
  add("fp8", to_json(info.fp8).dump());
  add("libraries", json(manifest.libraries).dump());
  add("config", json::parse(to_json(info.config)).dump());
  add("files", lines(manifest.files));
  add("tensors", lines(manifest.tensors));
  return text + manifest_ending(hash128(std::as_bytes(std::span(text))));
}

std::string manifest_ending(const Hash128& hash) { return fmt::format("\"{}\": \"{}\"\n}}\n", kManifestHashField, to_hex(hash)); }

const CheckpointTensor& CheckpointManifest::tensor(std::string_view name) const {
  const auto found = std::ranges::find(tensors, name, &CheckpointTensor::name);
  if (found == tensors.end()) {
    throw InputError(fmt::format("the checkpoint has no tensor '{}' among its {}", name, tensors.size()));
  }
  return *found;
}

std::int64_t CheckpointManifest::total_bytes() const noexcept {
  std::int64_t total = 0;
  for (const CheckpointFile& file : files) total += file.bytes;
  return total;
}

Shape stored_shape(const ShardSpec& shard) { return shard.flat_range ? Shape{shard.flat_range->size()} : shard.local_shape(); }

}  // namespace tandem
