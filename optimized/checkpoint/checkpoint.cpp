// SPDX-License-Identifier: Apache-2.0
#include "optimized/checkpoint/checkpoint.h"

#include <cmath>
#include <system_error>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/io/atomic_file.h"
#include "core/io/safetensors.h"
#include "optimized/checkpoint/residuals.h"
#include "optimized/hybrid_parallel/whole_tensors.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
constexpr const char* kFormat = "tandem-checkpoint-1";

constexpr const char* kMomentPrefixes[] = {"m.", "v."};

struct Tensors {
  std::vector<WholeTensor> parameters;
  std::vector<WholeTensor> moments[2];
};

// On rank 0, whatever the layout: what the optimizer updates, so that nothing is lost to the storage's precision.
Tensors gather(const Engine& engine) {
  const auto whole = [&](PartView view) {
    return gather_whole_tensors(engine.groups().world(), engine.options().model, engine.options().plan, engine.store(), view);
  };
  Tensors tensors;
  tensors.parameters = whole(&ParameterStore::master);
  if (engine.options().optimizer.kind != OptimizerKind::adamw) return tensors;
  tensors.moments[0] = whole(&ParameterStore::first_moment);
  tensors.moments[1] = whole(&ParameterStore::second_moment);
  return tensors;
}

void write_tensors(const fs::path& folder, const Tensors& tensors) {
  std::vector<NamedTensor> parameters;
  std::vector<NamedTensor> moments;
  for (const WholeTensor& tensor : tensors.parameters) parameters.push_back({tensor.name, tensor.values});
  for (std::size_t i = 0; i < std::size(kMomentPrefixes); ++i) {
    for (const WholeTensor& tensor : tensors.moments[i]) moments.push_back({kMomentPrefixes[i] + tensor.name, tensor.values});
  }
  write_safetensors(folder / "model.safetensors", parameters, {{"format", "pt"}});
  if (!moments.empty()) write_safetensors(folder / "optimizer.safetensors", moments);
}

// This rank's part of the whole tensor in the file.
std::vector<double> read_part(const SafetensorsFile& file, const std::string& name, const ShardSpec& shard) {
  const SafetensorsEntry& entry = file.entry(name);
  if (entry.shape != shard.global_shape) {
    throw InputError(fmt::format("{}: {} is {}, the model needs {}", file.path().string(), name, to_string(entry.shape),
                                 to_string(shard.global_shape)));
  }
  std::vector<double> whole = file.read_as<double>(name);
  return shard.is_whole() ? whole : gather_from(shard, whole);
}

template <class T>
T field(const nlohmann::json& json, const char* key, const fs::path& file) {
  try {
    return json.at(key).get<T>();
  } catch (const nlohmann::json::exception&) {
    throw InputError(fmt::format("{}: field '{}' is missing or has the wrong type", file.string(), key));
  }
}

nlohmann::json to_json(const LossScalerState& state) {
  return {{"scale", state.scale}, {"growth_tracker", state.growth_tracker}, {"skipped_steps", state.skipped_steps}};
}

nlohmann::json to_json(const Fp8ScalingState& state) { return {{"histories", state.histories}, {"position", state.position}}; }

Fp8ScalingState fp8_state(const nlohmann::json& json, const fs::path& file) {
  if (!json.contains("fp8")) return {};
  const auto& saved = json.at("fp8");
  return {field<std::vector<double>>(saved, "histories", file), field<std::int64_t>(saved, "position", file)};
}

// Checkpoints of runs without a scale may lack it.
LossScalerState scaler_state(const nlohmann::json& json, const fs::path& file) {
  if (!json.contains("loss_scale")) return {};
  const auto& saved = json.at("loss_scale");
  const auto at_least = [&](const char* key, double low, bool including) {
    const auto value = field<double>(saved, key, file);
    if (std::isfinite(value) && (including ? value >= low : value > low)) return;
    throw InputError(fmt::format("{}: field 'loss_scale.{}' is {}, which no run can have saved", file.string(), key, value));
  };
  at_least("scale", 0, false);
  at_least("growth_tracker", 0, true);
  at_least("skipped_steps", 0, true);
  return {field<double>(saved, "scale", file), field<std::int64_t>(saved, "growth_tracker", file),
          field<std::int64_t>(saved, "skipped_steps", file)};
}

}  // namespace

fs::path save_checkpoint(const fs::path& folder, const Engine& engine, const CheckpointInfo& info) {
  const Tensors tensors = gather(engine);
  if (engine.groups().rank() != 0) {
    send_residuals(engine);
    return {};
  }
  const std::string name = fmt::format("step-{:08}", info.next_step);
  const fs::path complete = folder / name;
  const fs::path unfinished = folder / (name + ".unfinished");
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw IoError(fmt::format("{}: cannot make this folder: {}", folder.string(), error.message()));
  fs::remove_all(unfinished, error);
  if (!fs::create_directory(unfinished, error))
    throw IoError(fmt::format("{}: cannot make this folder: {}", unfinished.string(), error.message()));
  try {
    write_tensors(unfinished, tensors);
    write_residuals(unfinished, engine);
    const nlohmann::json state = {
        {"format", kFormat},
        {"next_step", info.next_step},
        {"updates", engine.updates()},
        {"data", info.data},
        {"loss_scale", to_json(engine.loss_scaler().state())},
        {"fp8", to_json(engine.fp8_scaling() != nullptr ? engine.fp8_scaling()->state() : Fp8ScalingState())},
        {"config", nlohmann::json::parse(to_json(info.config))}};
    write_file_atomically(unfinished / "state.json", state.dump(2) + "\n");
    fs::remove_all(complete, error);
    fs::rename(unfinished, complete);
    write_file_atomically(folder / "latest", name + "\n");
  } catch (const fs::filesystem_error& failure) {
    throw IoError(fmt::format("{}: {}", complete.string(), failure.code().message()));
  } catch (...) {
    fs::remove_all(unfinished, error);
    throw;
  }
  return complete;
}

fs::path find_checkpoint(const fs::path& folder) {
  std::error_code error;
  if (fs::exists(folder / "state.json", error)) return folder;
  if (!fs::exists(folder / "latest", error)) {
    throw InputError(fmt::format(
        "{}: no checkpoint here (neither 'latest' nor 'state.json'); name the --out folder of a training run", folder.string()));
  }
  std::string name = read_text_file(folder / "latest");
  while (!name.empty() && (name.back() == '\n' || name.back() == '\r')) name.pop_back();
  if (name.empty() || name.find('/') != std::string::npos || !fs::exists(folder / name / "state.json", error)) {
    throw InputError(fmt::format("{}: 'latest' names '{}', which is no checkpoint in this folder", folder.string(), name));
  }
  return folder / name;
}

CheckpointInfo read_checkpoint_info(const fs::path& step_folder) {
  const fs::path file = step_folder / "state.json";
  nlohmann::json json;
  try {
    json = nlohmann::json::parse(read_text_file(file));
  } catch (const nlohmann::json::parse_error& failure) {
    throw InputError(fmt::format("{}: not JSON at byte {}", file.string(), failure.byte));
  }
  if (!json.is_object() || field<std::string>(json, "format", file) != kFormat) {
    throw InputError(fmt::format("{}: field 'format' is not '{}'", file.string(), kFormat));
  }
  CheckpointInfo info;
  info.next_step = field<std::int64_t>(json, "next_step", file);
  info.updates = field<std::int64_t>(json, "updates", file);
  info.data = field<std::string>(json, "data", file);
  info.loss_scaler = scaler_state(json, file);
  info.fp8 = fp8_state(json, file);
  info.config = config_from_json(field<nlohmann::json>(json, "config", file).dump(), file.string());
  return info;
}

void load_checkpoint(const fs::path& step_folder, const CheckpointInfo& info, Engine& engine) {
  ParameterStore& store = engine.store();
  const SafetensorsFile parameters(step_folder / "model.safetensors");
  for (std::size_t i = 0; i < store.size(); ++i) {
    const std::vector<double> values = read_part(parameters, store.spec(i).name, store.shard(i));
    // The optimizer goes on from the master copy: one that was left as it was brings the old weights back at the first update.
    if (engine.context().pitfalls.on(Pitfall::master_not_refreshed_on_load)) {
      store.set_stored(i, values);
    } else {
      store.set_parameter(i, values);
    }
  }
  engine.set_updates(info.updates);
  LossScalerState scaler = info.loss_scaler;
  // A run without a dynamic scale has none to hand on: this one begins with its plan's.
  if (!scales_loss_dynamically(info.config.plan)) scaler.scale = engine.loss_scaler().scale();
  // A counter that starts again lets the scale grow at other steps than the uninterrupted run.
  if (engine.context().pitfalls.on(Pitfall::scaler_count_not_saved)) scaler.growth_tracker = 0;
  engine.loss_scaler().set_state(scaler);
  // Of a run in another precision there is no history: scales begin at 1.
  const bool forgets_scales = engine.context().pitfalls.on(Pitfall::fp8_history_not_saved);
  if (engine.fp8_scaling() != nullptr && !info.fp8.histories.empty() && !forgets_scales)
    engine.fp8_scaling()->set_state(info.fp8);
  load_residuals(step_folder, info, engine);
  if (engine.options().optimizer.kind != OptimizerKind::adamw) return;
  const SafetensorsFile moments(step_folder / "optimizer.safetensors");
  // Parameters alone continue the loss curve for a while; moments that start again from zero bend it.
  const bool forgets = engine.context().pitfalls.on(Pitfall::resume_forgets_moments);
  for (std::size_t i = 0; i < store.size() && !forgets; ++i) {
    const auto moment = [&](const char* prefix) { return read_part(moments, prefix + store.spec(i).name, store.shard(i)); };
    store.set_moments(i, moment(kMomentPrefixes[0]), moment(kMomentPrefixes[1]));
  }
  if (forgets) store.zero_moments();
}

}  // namespace tandem
