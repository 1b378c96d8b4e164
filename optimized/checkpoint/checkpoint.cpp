// SPDX-License-Identifier: Apache-2.0
#include "optimized/checkpoint/checkpoint.h"

#include <system_error>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/io/atomic_file.h"
#include "core/io/safetensors.h"
#include "optimized/hybrid_parallel/whole_tensors.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
constexpr const char* kFormat = "tandem-checkpoint-1";

struct Moment {
  const char* prefix;
  TensorView (ParameterStore::*view)(std::size_t) const;
};
constexpr Moment kMoments[] = {{"m.", &ParameterStore::first_moment}, {"v.", &ParameterStore::second_moment}};

struct Tensors {
  std::vector<WholeTensor> parameters;
  std::vector<WholeTensor> moments[2];
};

// On rank 0, whatever the layout.
Tensors gather(const Engine& engine) {
  const auto whole = [&](TensorView (ParameterStore::*view)(std::size_t) const) {
    return gather_whole_tensors(engine.groups().world(), engine.options().model, engine.options().plan, engine.store(), view);
  };
  Tensors tensors;
  tensors.parameters = whole(&ParameterStore::parameter);
  if (!engine.store().first_moment(0)) return tensors;
  for (std::size_t i = 0; i < std::size(kMoments); ++i) tensors.moments[i] = whole(kMoments[i].view);
  return tensors;
}

void write_tensors(const fs::path& folder, const Tensors& tensors) {
  std::vector<NamedTensor> parameters;
  std::vector<NamedTensor> moments;
  for (const WholeTensor& tensor : tensors.parameters) parameters.push_back({tensor.name, tensor.values});
  for (std::size_t i = 0; i < std::size(kMoments); ++i) {
    for (const WholeTensor& tensor : tensors.moments[i]) moments.push_back({kMoments[i].prefix + tensor.name, tensor.values});
  }
  write_safetensors(folder / "model.safetensors", parameters, {{"format", "pt"}});
  if (!moments.empty()) write_safetensors(folder / "optimizer.safetensors", moments);
}

// This rank's part of the whole tensor in the file.
void assign_from(const SafetensorsFile& file, const std::string& name, const ShardSpec& shard, TensorView target) {
  const SafetensorsEntry& entry = file.entry(name);
  if (entry.shape != shard.global_shape) {
    throw InputError(fmt::format("{}: {} is {}, the model needs {}", file.path().string(), name, to_string(entry.shape),
                                 to_string(shard.global_shape)));
  }
  const std::vector<double> whole = file.read_as<double>(name);
  ParameterStore::assign(target, shard.is_whole() ? whole : gather_from(shard, whole));
}

template <class T>
T field(const nlohmann::json& json, const char* key, const fs::path& file) {
  try {
    return json.at(key).get<T>();
  } catch (const nlohmann::json::exception&) {
    throw InputError(fmt::format("{}: field '{}' is missing or has the wrong type", file.string(), key));
  }
}

}  // namespace

fs::path save_checkpoint(const fs::path& folder, const Engine& engine, const CheckpointInfo& info) {
  const Tensors tensors = gather(engine);
  if (engine.groups().rank() != 0) return {};
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
    const nlohmann::json state = {{"format", kFormat},
                                  {"next_step", info.next_step},
                                  {"updates", info.updates},
                                  {"data", info.data},
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
  info.config = config_from_json(field<nlohmann::json>(json, "config", file).dump(), file.string());
  return info;
}

void load_checkpoint(const fs::path& step_folder, const CheckpointInfo& info, Engine& engine) {
  ParameterStore& store = engine.store();
  const SafetensorsFile parameters(step_folder / "model.safetensors");
  for (std::size_t i = 0; i < store.size(); ++i) {
    assign_from(parameters, store.spec(i).name, store.shard(i), store.parameter(i));
  }
  engine.set_updates(info.updates);
  if (!store.first_moment(0)) return;
  const SafetensorsFile moments(step_folder / "optimizer.safetensors");
  for (std::size_t i = 0; i < store.size(); ++i) {
    for (const Moment& moment : kMoments) {
      assign_from(moments, moment.prefix + store.spec(i).name, store.shard(i), (store.*moment.view)(i));
    }
  }
  // Parameters alone continue the loss curve for a while; moments that start again from zero bend it.
  if (engine.context().pitfalls.on(Pitfall::resume_forgets_moments)) {
    for (std::size_t i = 0; i < store.size(); ++i) {
      for (const Moment& moment : kMoments) engine.context().kernels->fill((store.*moment.view)(i), 0.0);
    }
  }
}

}  // namespace tandem
