// SPDX-License-Identifier: Apache-2.0
#include "optimized/checkpoint/catalogue.h"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <system_error>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"
#include "core/io/safetensors.h"
#include "optimized/storage/file_copy.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kStepPrefix = "step-";
constexpr std::size_t kBlockBytes = std::size_t{4} << 20;

// Read, not mapped: memory stays that of one block, and pages that are used once need no mapping.
Hash128 hash_of_file(const fs::path& path, std::vector<std::byte>& block) {
  const FileReader file(path);
  block.resize(kBlockBytes);
  Hasher128 hasher;
  for (std::int64_t at = 0; at < file.size_bytes();) {
    const std::int64_t count = std::min(std::ssize(block), file.size_bytes() - at);
    const std::span<std::byte> piece = std::span(block).first(static_cast<std::size_t>(count));
    file.read(at, piece);
    hasher.update(piece);
    at += count;
  }
  return hasher.digest();
}

// A step folder against its manifest. Each check gives the first thing that is wrong, or nothing.
class Inspection {
 public:
  Inspection(const fs::path& folder, const CheckpointManifest& manifest) : folder_(folder), manifest_(manifest) {
    for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
      const std::string name = entry.path().filename().string();
      if (name != kManifestName && !is_known(name)) strangers_.push_back(name);
    }
    std::ranges::sort(strangers_);
  }

  [[nodiscard]] std::optional<std::string> step() const {
    const auto named = parse_step_folder_name(folder_.filename().string());
    if (!named || *named == manifest_.info.next_step) return std::nullopt;
    return fmt::format("{}: the manifest is of step {}: the folder was renamed, or another's manifest put into it",
                       folder_.string(), manifest_.info.next_step);
  }

  [[nodiscard]] std::optional<std::string> sizes() const {
    for (const CheckpointFile& file : manifest_.files) {
      std::error_code error;
      const fs::path path = folder_ / file.name;
      if (!fs::is_regular_file(path, error)) return missing(file);
      const auto bytes = static_cast<std::int64_t>(fs::file_size(path, error));
      if (error) return fmt::format("{}: {}", path.string(), error.message());
      if (bytes == file.bytes) continue;
      return fmt::format("{}: has {} bytes, the manifest says {}: {}", path.string(), bytes, file.bytes,
                         bytes < file.bytes ? "truncated" : "something was appended");
    }
    return std::nullopt;
  }

  [[nodiscard]] std::optional<std::string> strangers() const {
    if (strangers_.empty()) return std::nullopt;
    return fmt::format("{}: an extra file, which the manifest does not know", (folder_ / strangers_.front()).string());
  }

  [[nodiscard]] std::optional<std::string> hashes(MissingHash missing_hash) const {
    std::vector<std::byte> block;
    for (const CheckpointFile& file : manifest_.files) {
      if (missing_hash == MissingHash::accept && file.hash == Hash128{}) continue;
      const Hash128 found = hash_of_file(folder_ / file.name, block);
      if (found == file.hash) continue;
      return fmt::format("{}: damaged: its bytes hash to {}, the manifest says {}", (folder_ / file.name).string(), to_hex(found),
                         to_hex(file.hash));
    }
    return std::nullopt;
  }

  [[nodiscard]] std::optional<std::string> tensors() const {
    std::vector<SafetensorsFile> files;
    files.reserve(manifest_.files.size());
    for (const CheckpointFile& file : manifest_.files) files.emplace_back(folder_ / file.name);
    for (const CheckpointTensor& tensor : manifest_.tensors) {
      for (const CheckpointPiece& piece : tensor.pieces) {
        const SafetensorsFile& file = files[piece.file];
        if (!file.contains(tensor.name)) {
          return fmt::format("{}: has no tensor '{}', the manifest says it has", file.path().string(), tensor.name);
        }
        const SafetensorsEntry& entry = file.entry(tensor.name);
        const Shape shape = stored_shape(piece.shard);
        if (entry.dtype == tensor.dtype && entry.shape == shape) continue;
        return fmt::format("{}: tensor '{}' is {} {}, the manifest says {} {}", file.path().string(), tensor.name,
                           name(entry.dtype), to_string(entry.shape), name(tensor.dtype), to_string(shape));
      }
    }
    return std::nullopt;
  }

 private:
  [[nodiscard]] bool is_known(const std::string& name) const {
    return std::ranges::find(manifest_.files, name, &CheckpointFile::name) != manifest_.files.end();
  }

  [[nodiscard]] std::string missing(const CheckpointFile& file) const {
    for (const std::string& stranger : strangers_) {
      std::error_code error;
      if (static_cast<std::int64_t>(fs::file_size(folder_ / stranger, error)) != file.bytes || error) continue;
      return fmt::format("{}: is missing; renamed to '{}', which has its size?", (folder_ / file.name).string(), stranger);
    }
    return fmt::format("{}: is missing", (folder_ / file.name).string());
  }

  const fs::path& folder_;
  const CheckpointManifest& manifest_;
  std::vector<std::string> strangers_;
};

std::optional<std::string> inspect(const fs::path& step_folder, VerifyDepth depth, MissingHash missing_hash) {
  std::error_code error;
  if (!fs::is_directory(step_folder, error)) return fmt::format("{}: no such folder", step_folder.string());
  const bool has_any = fs::exists(step_folder / kManifestName, error) || fs::exists(step_folder / "state.json", error);
  if (!has_any) return fmt::format("{}: has no {}: it was never completed", step_folder.string(), kManifestName);
  const CheckpointManifest manifest = read_manifest_of(step_folder, missing_hash);
  const Inspection inspection(step_folder, manifest);
  std::optional<std::string> damage = inspection.step();
  if (!damage) damage = inspection.sizes();
  if (damage || depth == VerifyDepth::manifest) return damage;
  damage = inspection.strangers();
  if (!damage) damage = inspection.hashes(missing_hash);
  if (!damage) damage = inspection.tensors();
  return damage;
}

// "a/step-00000120/" names what "a/step-00000120" names.
fs::path without_trailing_separator(const fs::path& path) { return path.has_filename() ? path : path.parent_path(); }

}  // namespace

std::string step_folder_name(std::int64_t step) { return fmt::format("{}{:08}", kStepPrefix, step); }

std::optional<std::int64_t> parse_step_folder_name(const std::string& name) {
  if (!name.starts_with(kStepPrefix)) return std::nullopt;
  std::int64_t step = 0;
  const char* const end = name.data() + name.size();
  const auto parsed = std::from_chars(name.data() + kStepPrefix.size(), end, step);
  if (parsed.ec != std::errc() || parsed.ptr != end || step < 0 || step_folder_name(step) != name) return std::nullopt;
  return step;
}

std::vector<CheckpointEntry> list_checkpoints(const fs::path& folder) {
  std::error_code error;
  if (!fs::is_directory(folder, error)) {
    throw InputError(fmt::format("{}: no such folder; name the --out folder of a training run", folder.string()));
  }
  std::vector<CheckpointEntry> entries;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const auto step = parse_step_folder_name(entry.path().filename().string());
    if (step && entry.is_directory(error)) entries.push_back({*step, entry.path()});
  }
  std::ranges::sort(entries, std::ranges::greater(), &CheckpointEntry::step);
  return entries;
}

std::optional<std::string> find_damage(const fs::path& step_folder, VerifyDepth depth, const PitfallSet& pitfalls) {
  // A missing hash is no evidence that there is nothing to find.
  const MissingHash missing_hash = pitfalls.on(Pitfall::missing_hash_accepted) ? MissingHash::accept : MissingHash::refuse;
  try {
    return inspect(step_folder, depth, missing_hash);
  } catch (const InputError& error) {
    return error.what();
  } catch (const IoError& error) {
    return error.what();
  } catch (const fs::filesystem_error& error) {
    return fmt::format("{}: {}", step_folder.string(), error.code().message());
  }
}

fs::path find_checkpoint(const fs::path& folder, const std::function<void(const std::string&)>& note,
                         const PitfallSet& pitfalls) {
  fs::path named = without_trailing_separator(folder);
  std::error_code error;
  const bool is_step = parse_step_folder_name(named.filename().string()) || fs::exists(named / kManifestName, error) ||
                       fs::exists(named / "state.json", error);
  if (is_step) {
    const std::optional<std::string> damage = find_damage(named, VerifyDepth::contents, pitfalls);
    if (damage) throw InputError(*damage);
    return named;
  }
  std::vector<std::string> passed_over, notes;
  for (const CheckpointEntry& entry : list_checkpoints(named)) {
    const std::optional<std::string> damage = find_damage(entry.folder, VerifyDepth::contents, pitfalls);
    if (!damage) {
      if (note) std::ranges::for_each(notes, note);
      return entry.folder;
    }
    passed_over.push_back(*damage);
    notes.push_back(fmt::format("{} is passed over: {}", entry.folder.filename().string(), *damage));
  }
  if (passed_over.empty()) {
    throw InputError(
        fmt::format("{}: no checkpoint here (no folder step-...); name the --out folder of a training run", folder.string()));
  }
  throw InputError(fmt::format("{}: none of its {} checkpoints is whole: {}; bring a copy of one back, or start again",
                               folder.string(), passed_over.size(), fmt::join(passed_over, "; ")));
}

void prune_checkpoints(const fs::path& folder, std::int64_t keep, FileOperations& files, const std::set<std::int64_t>& protect) {
  if (keep == 0) return;
  TANDEM_CHECK(keep > 0, fmt::format("{} checkpoints are to be kept", keep));
  std::vector<fs::path> doomed;
  std::int64_t kept = 0;  // whole ones
  for (const CheckpointEntry& entry : list_checkpoints(folder)) {
    std::error_code error;
    if (fs::exists(entry.folder / "state.json", error)) continue;  // whole to the version that wrote it
    const bool whole = !find_damage(entry.folder, VerifyDepth::manifest);
    if (whole && kept < keep) {
      ++kept;
    } else if (kept > 0 && !protect.contains(entry.step)) {
      doomed.push_back(entry.folder);
    }
  }
  // Renamed first: half of one that is removed, should the program end there, is no damaged checkpoint. The next one that is
  // published takes away what is left of it.
  for (const fs::path& old : doomed) {
    const fs::path aside = old.string() + ".replaced";
    files.remove(aside);
    files.rename(old, aside);
    files.remove(aside);
  }
  if (!doomed.empty()) files.sync_folder(folder);
}

}  // namespace tandem
