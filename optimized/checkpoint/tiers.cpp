// SPDX-License-Identifier: Apache-2.0
#include "optimized/checkpoint/tiers.h"

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "core/io/file_operations.h"
#include "core/io/mapped_file.h"
#include "optimized/checkpoint/catalogue.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLatest = "latest";
constexpr const char* kStepPrefix = "step-";

// "step-00000120" of a path that may end with '/'.
std::string name_of(const fs::path& step_folder) {
  const fs::path plain = step_folder.has_filename() ? step_folder : step_folder.parent_path();
  std::string name = plain.filename().string();
  TANDEM_CHECK(parse_step_folder_name(name), fmt::format("{} is no folder of a step", step_folder.string()));
  return name;
}

std::string key_of(const std::string& name, const std::string& file) { return name + "/" + file; }

std::string text_of(std::span<const std::byte> bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

// What the store has under `key`; nothing where that does not exist.
std::optional<std::string> find_text(const ObjectStore& store, const std::string& key) {
  if (!store.find(key)) return {};
  try {
    return text_of(store.get(key));
  } catch (const InputError&) {
    return {};  // removed since
  }
}

std::string read_text(const fs::path& file) { return text_of(MappedFile(file).bytes()); }

std::optional<std::int64_t> step_of_key(const std::string& key) { return parse_step_folder_name(key.substr(0, key.find('/'))); }

std::map<std::string, std::int64_t> sizes_in(const ObjectStore& store, const std::string& name) {
  std::map<std::string, std::int64_t> sizes;
  for (const ObjectInfo& info : store.list(name + "/")) sizes[info.key.substr(name.size() + 1)] = info.bytes;
  return sizes;
}

void require_files(const ObjectStore& store, const std::string& name, const CheckpointManifest& manifest,
                   const std::map<std::string, std::int64_t>& sizes) {
  for (const CheckpointFile& file : manifest.files) {
    const auto found = sizes.find(file.name);
    if (found != sizes.end() && found->second == file.bytes) continue;
    const std::string has = found == sizes.end() ? "is missing" : fmt::format("has {} bytes, not {}", found->second, file.bytes);
    throw StoreError(fmt::format("{}: cannot publish {}: {} {}; upload it first", store.describe(), name, file.name, has));
  }
}

// `latest` never goes back to an older step that is published too.
void move_latest(ObjectStore& store, const std::string& name) {
  const std::string line = name + "\n";
  const std::optional<std::string> old = find_text(store, kLatest);
  if (old == line) return;
  if (old && old->ends_with('\n')) {
    const std::string old_name = old->substr(0, old->size() - 1);
    const std::optional<std::int64_t> old_step = parse_step_folder_name(old_name);
    if (old_step && *old_step > *parse_step_folder_name(name) && store.find(key_of(old_name, kManifestName))) return;
  }
  store.put(kLatest, std::as_bytes(std::span(line)));
}

void copy_step(const ObjectStore& store, std::int64_t step, const fs::path& to) {
  const std::string name = step_folder_name(step);
  const std::optional<std::string> text = find_text(store, key_of(name, kManifestName));
  if (!text) throw InputError(fmt::format("{}: {} has no {}: it is no checkpoint", store.describe(), name, kManifestName));
  const CheckpointManifest manifest = parse_manifest(*text, fmt::format("{}: {}/{}", store.describe(), name, kManifestName));
  if (manifest.info.next_step != step) {
    throw InputError(fmt::format("{}: {} is step {} by its {}", store.describe(), name, manifest.info.next_step, kManifestName));
  }
  for (const CheckpointFile& file : manifest.files) store.get_file(key_of(name, file.name), to / file.name);
  replace_file(system_files(), to / kManifestName, std::as_bytes(std::span(*text)));
  if (const std::optional<std::string> damage = find_damage(to, VerifyDepth::contents)) {
    throw InputError(fmt::format("{}: the copy of {} does not verify: {}", store.describe(), name, *damage));
  }
}

}  // namespace

void upload_checkpoint_file(ObjectStore& store, const fs::path& step_folder, const std::string& file) {
  const std::string name = name_of(step_folder);
  if (const std::optional<std::string> published = find_text(store, key_of(name, kManifestName))) {
    std::error_code missing;
    const bool same = fs::exists(step_folder / kManifestName, missing) && read_text(step_folder / kManifestName) == *published;
    const std::optional<ObjectInfo> there = same ? store.find(key_of(name, file)) : std::nullopt;
    if (there && there->bytes == static_cast<std::int64_t>(fs::file_size(step_folder / file))) return;
    // A manifest must not stand over files of another checkpoint.
    store.remove(key_of(name, kManifestName));
  }
  store.put_file(key_of(name, file), step_folder / file);
}

void publish_remote(ObjectStore& store, const fs::path& step_folder) {
  const std::string name = name_of(step_folder);
  const CheckpointManifest manifest = read_manifest_of(step_folder);
  const std::string text = read_text(step_folder / kManifestName);
  const std::map<std::string, std::int64_t> sizes = sizes_in(store, name);
  require_files(store, name, manifest, sizes);
  if (find_text(store, key_of(name, kManifestName)) != text) {
    store.put(key_of(name, kManifestName), std::as_bytes(std::span(text)));
  }
  move_latest(store, name);
  std::set<std::string> known{kManifestName};
  for (const CheckpointFile& file : manifest.files) known.insert(file.name);
  for (const auto& [file, bytes] : sizes) {
    if (!known.contains(file)) store.remove(key_of(name, file));
  }
}

void upload_checkpoint(ObjectStore& store, const fs::path& step_folder) {
  for (const CheckpointFile& file : read_manifest_of(step_folder).files) upload_checkpoint_file(store, step_folder, file.name);
  publish_remote(store, step_folder);
}

std::vector<std::int64_t> list_remote_checkpoints(const ObjectStore& store) {
  std::vector<std::int64_t> steps;
  for (const ObjectInfo& info : store.list(kStepPrefix)) {
    const std::optional<std::int64_t> step = step_of_key(info.key);
    if (step && info.key == key_of(step_folder_name(*step), kManifestName)) steps.push_back(*step);
  }
  std::ranges::sort(steps, std::greater<>());
  return steps;
}

fs::path fetch_checkpoint(const ObjectStore& store, std::int64_t step, const fs::path& folder) {
  fs::path target = folder / step_folder_name(step);
  std::error_code ignored;
  if (fs::is_directory(target, ignored) && !find_damage(target, VerifyDepth::contents)) return target;
  FileOperations& files = system_files();
  const fs::path copy = folder / (step_folder_name(step) + ".fetching");
  make_folders(files, folder);
  files.remove(copy);  // of a run that was killed
  files.make_folder(copy);
  try {
    copy_step(store, step, copy);
    files.sync_folder(copy);
    const fs::path damaged = replace_folder(files, copy, target);
    if (!damaged.empty()) files.remove(damaged);
  } catch (...) {
    fs::remove_all(copy, ignored);
    throw;
  }
  return target;
}

// Manifests first: a step is no checkpoint any more before the first of its files goes. Also what uploads that ended early have
// left.
void remove_remote(ObjectStore& store, const std::function<bool(std::int64_t step)>& doomed) {
  for (const std::int64_t step : list_remote_checkpoints(store)) {
    if (doomed(step)) store.remove(key_of(step_folder_name(step), kManifestName));
  }
  for (const ObjectInfo& info : store.list(kStepPrefix)) {
    const std::optional<std::int64_t> step = step_of_key(info.key);
    if (step && doomed(*step)) store.remove(info.key);
  }
}

void prune_remote(ObjectStore& store, std::int64_t keep, const std::set<std::int64_t>& protect) {
  TANDEM_CHECK(keep >= 0);
  const std::vector<std::int64_t> steps = list_remote_checkpoints(store);
  if (keep == 0 || std::cmp_less_equal(steps.size(), keep)) return;
  const std::int64_t oldest_kept = steps[static_cast<std::size_t>(keep) - 1];
  remove_remote(store, [&](std::int64_t step) { return step < oldest_kept && !protect.contains(step); });
}

void remove_remote_after(ObjectStore& store, std::int64_t step) {
  remove_remote(store, [step](std::int64_t other) { return other > step; });
}

}  // namespace tandem
