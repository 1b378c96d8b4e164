// SPDX-License-Identifier: Apache-2.0
#include "optimized/checkpoint/publish.h"

#include <map>
#include <set>
#include <system_error>

#include <fmt/format.h>

#include "core/error.h"
#include "optimized/checkpoint/catalogue.h"
#include "optimized/checkpoint/snapshot.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

void require_files(const fs::path& unfinished, const CheckpointManifest& manifest) {
  for (const CheckpointFile& file : manifest.files) {
    std::error_code error;
    const auto size = fs::file_size(unfinished / file.name, error);
    if (error) {
      throw IoError(fmt::format("{}: not here, but a rank has written it; all ranks need the same file system",
                                (unfinished / file.name).string()));
    }
    if (static_cast<std::int64_t>(size) == file.bytes) continue;
    throw IoError(fmt::format("{}: has {} bytes, {} were written", (unfinished / file.name).string(), size, file.bytes));
  }
}

void remove_strangers(FileOperations& files, const fs::path& unfinished, const CheckpointManifest& manifest) {
  std::set<std::string> known;
  for (const CheckpointFile& file : manifest.files) known.insert(file.name);
  for (const fs::directory_entry& entry : fs::directory_iterator(unfinished)) {
    if (!known.contains(entry.path().filename().string())) files.remove(entry.path());
  }
}

// Of runs that ended in the middle, and of a step that was replaced.
void remove_leftovers(FileOperations& files, const fs::path& folder) {
  std::vector<fs::path> leftovers;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const std::string extension = entry.path().extension().string();
    const bool ours = parse_step_folder_name(entry.path().stem().string()).has_value();
    if (ours && (extension == ".unfinished" || extension == ".replaced")) leftovers.push_back(entry.path());
  }
  for (const fs::path& leftover : leftovers) files.remove(leftover);
}

std::map<std::string, std::string> libraries() { return {{"tandem", TANDEM_PROJECT_VERSION}, {"compiler", __VERSION__}}; }

// By name, in the order of the model.
struct Index {
  std::vector<CheckpointTensor> tensors;
  std::map<std::string, std::size_t> position;

  void add(const std::string& name, const ParameterSpec& spec, DType dtype) {
    position.emplace(name, tensors.size());
    tensors.push_back({name, spec.shape, dtype, {}});
  }
};

Index all_tensors(const RunConfig& config) {
  Index index;
  std::vector<std::string> prefixes = {""};
  if (config.optimizer.kind == OptimizerKind::adamw) prefixes = {"", "m.", "v."};
  for (const std::string& prefix : prefixes) {
    for (const ParameterSpec& spec : gpt_parameters(config.model)) {
      index.add(prefix + spec.name, spec, config.plan.numerics.master);
    }
  }
  return index;
}

}  // namespace

fs::path unfinished_folder(const fs::path& folder, std::int64_t step) {
  return folder / (step_folder_name(step) + ".unfinished");
}

fs::path make_unfinished_folder(FileOperations& files, const fs::path& folder, std::int64_t step) {
  make_folders(files, folder);
  fs::path unfinished = unfinished_folder(folder, step);
  files.make_folder(unfinished);
  return unfinished;
}

bool is_written_or_being_written(const fs::path& folder, std::int64_t step, const std::function<bool(const fs::path&)>& exists) {
  const auto is_there = [&](const fs::path& path) {
    std::error_code error;
    return exists ? exists(path) : fs::exists(path, error);
  };
  // In this order: what is renamed in between is seen all the same.
  return is_there(unfinished_folder(folder, step)) || is_there(folder / step_folder_name(step));
}

std::string shard_name(int rank) { return fmt::format("shard-{:05}.safetensors", rank); }
std::string residuals_name(int rank) { return fmt::format("residuals-{:05}.safetensors", rank); }

CheckpointManifest make_manifest(const CheckpointInfo& info, const std::vector<std::vector<CheckpointFile>>& files_by_rank,
                                 const PitfallSet& pitfalls) {
  CheckpointManifest manifest{info, libraries(), {}, {}};
  const RunConfig& config = info.config;
  Index index = all_tensors(config);
  for (int rank = 0; rank < static_cast<int>(files_by_rank.size()); ++rank) {
    const std::size_t shard = manifest.files.size();  // a rank's shard comes before its residuals
    for (const CheckpointFile& file : files_by_rank[static_cast<std::size_t>(rank)]) manifest.files.push_back(file);
    const std::vector<CheckpointPart> parts = checkpoint_parts(config.model, config.plan, config.optimizer.kind, rank, pitfalls);
    for (const CheckpointPart& part : parts) {
      CheckpointTensor& tensor = index.tensors[index.position.at(part.name)];
      const bool copy = pitfalls.on(Pitfall::every_replica_writes) && !tensor.pieces.empty() &&
                        tensor.pieces.front().shard.slices == part.shard.slices &&
                        tensor.pieces.front().shard.flat_range == part.shard.flat_range;
      if (!copy) tensor.pieces.push_back({shard, part.shard});
    }
  }
  manifest.tensors = std::move(index.tensors);
  return manifest;
}

namespace {

// Writes the manifest and gives the folder its name.
void name_checkpoint(FileOperations& files, const CheckpointManifest& manifest, const PublishOptions& options, std::int64_t step,
                     const fs::path& complete) {
  const PitfallSet& pitfalls = options.pitfalls;
  // Planted: no folder of its own, nothing made durable, the one before is gone by then.
  const bool in_place = pitfalls.on(Pitfall::checkpoint_written_in_place);
  const fs::path unfinished = in_place ? complete : unfinished_folder(options.folder, step);
  require_files(unfinished, manifest);
  if (!in_place) remove_strangers(files, unfinished, manifest);
  if (pitfalls.on(Pitfall::last_good_checkpoint_pruned)) {
    for (const CheckpointEntry& entry : list_checkpoints(options.folder)) files.remove(entry.folder);
  }
  const std::string text = to_json(manifest);
  if (in_place) {
    const int descriptor = files.create(unfinished / kManifestName);
    files.write(descriptor, unfinished / kManifestName, bytes_of(text));
    files.close(descriptor, unfinished / kManifestName);
    return;
  }
  write_new_file(files, unfinished / kManifestName, bytes_of(text));
  files.sync_folder(unfinished);
  (void)replace_folder(files, unfinished, complete);  // an older one is a leftover now
}

}  // namespace

fs::path publish_checkpoint(FileOperations& files, const CheckpointManifest& manifest, const PublishOptions& options,
                            const std::function<void(const std::string&)>& note) {
  const std::int64_t step = options.step.value_or(manifest.info.next_step);
  fs::path complete = options.folder / step_folder_name(step);
  try {
    name_checkpoint(files, manifest, options, step, complete);
  } catch (const fs::filesystem_error& failure) {
    throw IoError(fmt::format("{}: {}", complete.string(), failure.code().message()));
  }
  const auto say = [&](const char* reason) {
    if (note) note(fmt::format("step {} is complete in {}, but: {}", step, complete.string(), reason));
  };
  try {
    const std::string latest = step_folder_name(step) + "\n";
    replace_file(files, options.folder / "latest", bytes_of(latest));
    prune_checkpoints(options.folder, options.keep, files, options.protect);
    remove_leftovers(files, options.folder);
  } catch (const IoError& failure) {
    say(failure.what());
  } catch (const fs::filesystem_error& failure) {
    say(failure.what());
  }
  return complete;
}

}  // namespace tandem
