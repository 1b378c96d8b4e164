// SPDX-License-Identifier: Apache-2.0
// To the folders of another library and back: the same parameters, bit for bit, and the same model.
#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "core/io/safetensors.h"
#include "optimized/checkpoint/hugging_face.h"
#include "optimized/checkpoint/manifest.h"
#include "suites/checkpoint_cases.h"
#include "suites/scratch_folder.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

bool is_moment(const std::string& name) { return name.starts_with("m.") || name.starts_with("v."); }

// Parameters of the state that the folder's files do not hold, as they are, under their names there.
double exported_wrongly(const fs::path& folder, const reference::State& state) {
  std::map<std::string, std::vector<float>> exported;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    const SafetensorsFile file(entry.path());
    for (const SafetensorsEntry& tensor : file.entries()) exported[tensor.name] = file.read_as<float>(tensor.name);
  }
  double wrong = 0, parameters = 0;
  for (const auto& [name, tensor] : state.tensors) {
    if (is_moment(name)) continue;
    ++parameters;
    const auto found = exported.find(name == "lm_head.weight" ? name : "transformer." + name);
    const bool same = found != exported.end() && found->second.size() * sizeof(float) == tensor.bytes.size() &&
                      std::memcmp(found->second.data(), tensor.bytes.data(), tensor.bytes.size()) == 0;
    wrong += same ? 0 : 1;
  }
  return wrong + std::abs(parameters - static_cast<double>(exported.size()));
}

// Parameters that are others than before, and moments that are not zero.
double imported_wrongly(const reference::State& imported, const reference::State& state) {
  double wrong = imported.tensors.size() == state.tensors.size() ? 0 : 1;
  for (const auto& [name, tensor] : state.tensors) {
    const auto found = imported.tensors.find(name);
    if (found == imported.tensors.end()) {
      ++wrong;
    } else if (is_moment(name)) {
      wrong += std::ranges::all_of(found->second.bytes, [](std::byte byte) { return byte == std::byte{0}; }) ? 0 : 1;
    } else {
      wrong += found->second == tensor ? 0 : 1;
    }
  }
  return wrong;
}

Case round_trip_case(const std::string& name, const ParallelVariant& variant, std::int64_t max_file_bytes) {
  Case result = checkpoint_case("hugging_face/" + name,
                                "a checkpoint of several ranks exported and imported again: the same model", variant);
  result.execute = [variant, max_file_bytes](const RunContext& context) {
    const ScratchFolder scratch("checkpoint-hugging-face");
    PairInputs inputs = inputs_of(variant, context);
    const CheckpointRun run = run_checkpoints(saving_script(inputs, scratch.path() / "run", 1, {1}), context);
    const reference::State& state = run.states.at(1);
    const HuggingFaceSummary summary = export_hugging_face(step_folder(scratch.path() / "run", 1), scratch.path() / "exported",
                                                           {.max_file_bytes = max_file_bytes});
    const fs::path folder = import_hugging_face(scratch.path() / "exported", scratch.path() / "imported");
    const GptConfig model = read_manifest_of(folder).info.config.model;
    double fields = model.vocabulary == inputs.model.vocabulary && model.sequence == inputs.model.sequence ? 0 : 1;
    fields += model.layers == inputs.model.layers && model.hidden == inputs.model.hidden ? 0 : 1;
    fields += model.heads == inputs.model.heads && model.tied == inputs.model.tied ? 0 : 1;
    fields += model.mlp_width() == inputs.model.mlp_width() ? 0 : 1;
    CaseEvidence evidence;
    evidence.properties = {
        exactly("parameters_exported_wrongly", exported_wrongly(scratch.path() / "exported", state), 0,
                "master values, as they are"),
        exactly("tensors_imported_wrongly", imported_wrongly(reference::assemble(folder), state), 0, "the moments begin at zero"),
        exactly("fields_of_the_model_that_differ", fields, 0, "config.json says what the model is"),
        {"files", static_cast<double>(summary.files), Relation::at_least, max_file_bytes < (1 << 20) ? 2.0 : 1.0,
         "no more than was asked for into one", -1, ""}};
    return evidence;
  };
  return result;
}

}  // namespace

void add_checkpoint_hugging_face_cases(CaseList& cases) {
  cases.push_back(round_trip_case("tensor2-pipeline2", {.degrees = {.tensor = 2, .pipeline = 2}, .micro_batches = 2}, 1 << 30));
  cases.push_back(round_trip_case("data2-zero3/files", {.degrees = {.data = 2}, .zero_stage = 3}, 4096));
}

}  // namespace tandem
