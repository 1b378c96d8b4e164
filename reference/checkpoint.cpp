// SPDX-License-Identifier: Apache-2.0
#include "reference/checkpoint.h"

#include <set>
#include <system_error>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/io/atomic_file.h"
#include "core/io/safetensors.h"

namespace tandem::reference {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFormat = "tandem-reference-state-1";

}  // namespace

std::vector<std::string> differences(const State& one, const State& other) {
  std::vector<std::string> names;
  const auto compare = [&](const char* name, const auto& a, const auto& b) {
    if (!(a == b)) names.emplace_back(name);
  };
  compare("next_step", one.next_step, other.next_step);
  compare("updates", one.updates, other.updates);
  compare("seed", one.seed, other.seed);
  compare("data_identity", one.data_identity, other.data_identity);
  compare("learning_rate", one.learning_rate, other.learning_rate);
  compare("loss_scale", one.loss_scale, other.loss_scale);
  compare("growth_tracker", one.growth_tracker, other.growth_tracker);
  compare("skipped_steps", one.skipped_steps, other.skipped_steps);
  compare("fp8_histories", one.fp8_histories, other.fp8_histories);
  compare("fp8_position", one.fp8_position, other.fp8_position);
  std::set<std::string> all;
  for (const State* side : {&one, &other}) {
    for (const auto& [name, tensor] : side->tensors) all.insert(name);
  }
  for (const std::string& name : all) {
    const auto a = one.tensors.find(name);
    const auto b = other.tensors.find(name);
    if (a == one.tensors.end() || b == other.tensors.end() || !(a->second == b->second)) names.push_back(name);
  }
  return names;
}

void save(const fs::path& folder, const State& state) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw IoError(fmt::format("{}: cannot make this folder: {}", folder.string(), error.message()));
  std::vector<NamedTensor> tensors;
  for (const auto& [name, tensor] : state.tensors) {
    // A view is for reading and writing, a file's source is read alone.
    tensors.push_back({name, TensorView(const_cast<std::byte*>(tensor.bytes.data()), tensor.dtype, tensor.shape)});
  }
  write_safetensors(folder / "tensors.safetensors", tensors);
  const nlohmann::json json = {{"format", kFormat},
                               {"next_step", state.next_step},
                               {"updates", state.updates},
                               {"seed", state.seed},
                               {"data_identity", state.data_identity},
                               {"learning_rate", state.learning_rate},
                               {"loss_scale", state.loss_scale},
                               {"growth_tracker", state.growth_tracker},
                               {"skipped_steps", state.skipped_steps},
                               {"fp8_histories", state.fp8_histories},
                               {"fp8_position", state.fp8_position}};
  write_file_atomically(folder / "state.json", json.dump(1) + "\n");
}

State load(const fs::path& folder) {
  const fs::path file = folder / "state.json";
  const std::string text = read_text_file(file);
  State state;
  try {
    const nlohmann::json json = nlohmann::json::parse(text);
    if (json.at("format") != kFormat) throw InputError(fmt::format("{}: field 'format' is not '{}'", file.string(), kFormat));
    json.at("next_step").get_to(state.next_step);
    json.at("updates").get_to(state.updates);
    json.at("seed").get_to(state.seed);
    json.at("data_identity").get_to(state.data_identity);
    json.at("learning_rate").get_to(state.learning_rate);
    json.at("loss_scale").get_to(state.loss_scale);
    json.at("growth_tracker").get_to(state.growth_tracker);
    json.at("skipped_steps").get_to(state.skipped_steps);
    json.at("fp8_histories").get_to(state.fp8_histories);
    json.at("fp8_position").get_to(state.fp8_position);
  } catch (const nlohmann::json::exception& failure) {
    throw InputError(fmt::format("{}: no state of the reference: {}", file.string(), failure.what()));
  }
  const SafetensorsFile tensors(folder / "tensors.safetensors");
  for (const SafetensorsEntry& entry : tensors.entries()) {
    const auto bytes = tensors.bytes(entry.name);
    state.tensors.emplace(entry.name, StateTensor{entry.shape, entry.dtype, {bytes.begin(), bytes.end()}});
  }
  return state;
}

}  // namespace tandem::reference
