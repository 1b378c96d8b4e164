// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <string>

#include "core/io/atomic_file.h"
#include "core/io/test_folder.h"
#include "core/synthetic_corpus.h"
#include "optimized/checkpoint/checkpoint.h"
#include "optimized/comm/world.h"

namespace tandem {

/// One layer, a vocabulary that no number of tensor ranks divides.
inline RunConfig tiny_config(const ParallelDegrees& degrees = {}) {
  RunConfig config;
  config.model.vocabulary = 13;
  config.model.sequence = 7;
  config.model.layers = 1;
  config.model.hidden = 8;
  config.model.heads = 2;
  config.plan.parallel = degrees;
  config.plan.batch = {4, 1};
  config.steps = 10;
  return config;
}

inline RunConfig in_precision(RunConfig config, const std::string& precision) {
  config.plan.precision = precision;
  config.plan.numerics = numerics_from_precision(precision);
  return config;
}

/// On every rank of the configuration; parameters are initialised.
inline void with_engines(const RunConfig& config, const std::function<void(Engine&)>& use, const PitfallSet& pitfalls = {}) {
  run_world({.ranks = config.plan.parallel.world_size(), .deadline = std::chrono::milliseconds(20000)}, [&](Communicator& comm) {
    Arena arena({.poison = true, .huge_pages = false});
    const auto kernels = make_cpu_kernels({});
    Engine engine({&comm, kernels.get(), &arena, nullptr, pitfalls, {}},
                  {config.model, config.plan, config.optimizer, config.schedule, config.steps, 1});
    engine.store().initialise(config.model, Initialization::scattered, 1);
    use(engine);
  });
}

/// Trains `steps` steps and saves.
inline void save_trained(const RunConfig& config, const std::filesystem::path& folder, std::int64_t steps = 2) {
  const SyntheticCorpus corpus({.vocabulary = config.model.vocabulary, .sequence = config.model.sequence});
  with_engines(config, [&](Engine& engine) {
    for (std::int64_t step = 0; step < steps; ++step)
      engine.train_step(corpus.training_batch(step, config.plan.batch.rows), step);
    static_cast<void>(save_checkpoint(folder, engine, {config, steps, "synthetic", corpus.identity()}));
  });
}

/// The manifest of a step folder, changed and sealed again.
inline void change_manifest(const std::filesystem::path& step_folder, const std::function<void(CheckpointManifest&)>& change) {
  CheckpointManifest manifest = read_manifest_of(step_folder);
  change(manifest);
  write_file_atomically(step_folder / kManifestName, to_json(manifest));
}

/// As it is now.
inline void seal_again(const std::filesystem::path& step_folder, const std::string& file) {
  change_manifest(step_folder, [&](CheckpointManifest& manifest) {
    for (CheckpointFile& known : manifest.files) {
      if (known.name != file) continue;
      const std::string bytes = TestFolder::read(step_folder / file);
      known.bytes = std::ssize(bytes);
      known.hash = hash128(std::as_bytes(std::span(bytes)));
    }
  });
}

}  // namespace tandem
