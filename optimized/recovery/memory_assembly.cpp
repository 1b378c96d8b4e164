// SPDX-License-Identifier: Apache-2.0
#include "optimized/recovery/memory_assembly.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/io/atomic_file.h"
#include "core/io/binary.h"
#include "core/io/file_operations.h"
#include "optimized/checkpoint/catalogue.h"
#include "optimized/comm/exchange.h"
#include "optimized/comm/world.h"
#include "optimized/storage/file_copy.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;
using Note = std::function<void(const std::string&)>;

constexpr std::int64_t kPieceBytes = std::int64_t{64} << 20;
constexpr std::string_view kNodePrefix = "node-";
constexpr const char* kRestored = "restored";

// All of a file, a piece at a time; nothing where its size is another one.
std::optional<Hash128> hash_of(const fs::path& path, std::int64_t bytes) {
  std::error_code error;
  if (!fs::is_regular_file(path, error) || static_cast<std::int64_t>(fs::file_size(path, error)) != bytes) return std::nullopt;
  const FileReader file(path);
  std::vector<std::byte> piece;
  Hasher128 hasher;
  for (std::int64_t at = 0; at < bytes; at += std::ssize(piece)) {
    piece.resize(static_cast<std::size_t>(std::min(std::int64_t{4} << 20, bytes - at)));
    file.read(at, piece);
    hasher.update(piece);
  }
  return hasher.digest();
}

bool is_node_name(std::string_view name) {
  if (!name.starts_with(kNodePrefix) || name.size() == kNodePrefix.size()) return false;
  return name.find_first_not_of("0123456789", kNodePrefix.size()) == std::string_view::npos;
}

// The folders of steps that can be read from here, newest step first; of each with a manifest.
std::map<std::int64_t, std::vector<fs::path>, std::greater<>> readable_steps(const MemoryTierPlace& place) {
  std::map<std::int64_t, std::vector<fs::path>, std::greater<>> steps;
  std::error_code error;
  if (!fs::is_directory(place.folder, error)) return steps;
  for (const fs::directory_entry& node : fs::directory_iterator(place.folder)) {
    if (!is_node_name(node.path().filename().string()) || !node.is_directory(error)) continue;
    for (const fs::path& folder : {node.path(), node.path() / kRestored}) {
      if (!fs::is_directory(folder, error)) continue;
      for (const CheckpointEntry& entry : list_checkpoints(folder)) {
        if (fs::exists(entry.folder / kManifestName, error)) steps[entry.step].push_back(entry.folder);
      }
    }
  }
  for (auto& [step, folders] : steps) std::ranges::sort(folders);
  return steps;
}

CheckpointManifest parse(const std::string& text) { return parse_manifest(text, kManifestName); }

// Everything that reads what another process may be changing, or what may be damaged.
template <class Result, class Call>
Result or_nothing(const Call& call) {
  try {
    return call();
  } catch (const InputError&) {
  } catch (const IoError&) {
  } catch (const fs::filesystem_error&) {
  }
  return Result{};
}

// Where each file of `manifest` lies whole; empty: nowhere in these folders.
std::vector<fs::path> find_files(const CheckpointManifest& manifest, const std::vector<fs::path>& folders) {
  std::vector<fs::path> places(manifest.files.size());
  for (std::size_t i = 0; i < places.size(); ++i) {
    const CheckpointFile& file = manifest.files[i];
    for (const fs::path& folder : folders) {
      const auto look = [&] { return hash_of(folder / file.name, file.bytes); };
      if (or_nothing<std::optional<Hash128>>(look) != file.hash) continue;
      places[i] = folder / file.name;
      break;
    }
  }
  return places;
}

std::string read_piece(const fs::path& file, std::int64_t at, std::int64_t bytes) {
  std::string piece(static_cast<std::size_t>(bytes), 0);
  FileReader(file).read(at, std::as_writable_bytes(std::span(piece)));
  return piece;
}

// The first manifest of these folders that is sound; empty: none is.
std::string sound_manifest(const std::vector<fs::path>& folders, std::int64_t step) {
  for (const fs::path& folder : folders) {
    try {
      std::string text = read_text_file(folder / kManifestName);
      if (parse(text).info.next_step == step) return text;
    } catch (const InputError&) {
      // The next folder may have a whole one.
    }
  }
  return {};
}

// One process's part in putting a step together. All processes make the same calls, and decide by what all have said.
class Assembly {
 public:
  Assembly(const MemoryTierPlace& place, int process, const ProcessExchange& exchange, const Note& note)
      : place_(place),
        process_(process),
        exchange_(exchange),
        note_(note),
        node_(memory_node_of(place, process)),
        leader_(node_ * place.ranks_per_node) {}

  std::optional<fs::path> run() {
    // The processes of a node share its memory: the first of them speaks for all.
    if (leads()) readable_ = or_nothing<decltype(readable_)>([&] { return readable_steps(place_); });
    std::vector<std::int64_t> own;
    for (const auto& [step, folders] : readable_) own.push_back(step);
    std::set<std::int64_t, std::greater<>> steps;
    for (const std::string& bytes : exchange_(to_bytes(own))) {
      for (const std::int64_t step : from_bytes<std::vector<std::int64_t>>(bytes)) steps.insert(step);
    }
    for (const std::int64_t step : steps) {
      if (std::optional<fs::path> folder = assemble(step)) return folder;
    }
    return std::nullopt;
  }

 private:
  [[nodiscard]] bool leads() const { return process_ == leader_; }

  void say(std::int64_t step, const std::string& why) const {
    if (note_) note_(fmt::format("the copy of step {} in memory is passed over: {}", step, why));
  }

  std::optional<fs::path> assemble(std::int64_t step) {
    const std::vector<fs::path> folders = readable_.contains(step) ? readable_.at(step) : std::vector<fs::path>();
    std::string text;
    for (const std::string& theirs : exchange_(sound_manifest(folders, step))) {
      if (text.empty()) text = theirs;
    }
    if (text.empty()) {
      say(step, "no manifest of it is whole");
      return std::nullopt;
    }
    const CheckpointManifest manifest = parse(text);
    const std::vector<fs::path> places = find_files(manifest, folders);
    const std::vector<Held> held = tell_what_is_here(places);
    for (std::size_t file = 0; file < places.size(); ++file) {
      if (std::ranges::any_of(held, [&](const Held& one) { return one.files[file] != 0; })) continue;
      say(step, manifest.files[file].name + " is in no node's memory, or damaged there");
      return std::nullopt;
    }
    const std::string result = or_reason([&] { return put_together(step, text, manifest, folders, places, held); });
    return agree(step, result);
  }

  struct Held {
    bool leads = false;
    std::vector<char> files;  // 1: here, and whole
    template <class Archive>
    void serialize(Archive& archive) {
      archive(leads, files);
    }
  };

  std::vector<Held> tell_what_is_here(const std::vector<fs::path>& places) {
    Held own{leads(), {}};
    for (const fs::path& path : places) own.files.push_back(path.empty() ? 0 : 1);
    std::vector<Held> all;
    for (const std::string& bytes : exchange_(to_bytes(own))) all.push_back(from_bytes<Held>(bytes));
    return all;
  }

  // "F<folder>", or "E<reason>".
  static std::string or_reason(const std::function<fs::path()>& work) {
    try {
      return "F" + work().string();
    } catch (const IoError& error) {
      return fmt::format("E{}", error.what());
    } catch (const InputError& error) {
      return fmt::format("E{}", error.what());
    } catch (const fs::filesystem_error& error) {
      return fmt::format("E{}", error.what());
    }
  }

  // The folder that the first process of this node has made; nothing where one of them could not.
  std::optional<fs::path> agree(std::int64_t step, const std::string& own) {
    const std::vector<std::string> all = exchange_(own);
    for (const std::string& result : all) {
      if (result.front() != 'E') continue;
      say(step, result.substr(1));
      return std::nullopt;
    }
    return all[static_cast<std::size_t>(leader_)].substr(1);
  }

  // A file that is here is linked, not copied; nothing is written to it while the folder is in use. The exchanges go on where
  // something fails here, for the others' sake.
  fs::path put_together(std::int64_t step, const std::string& text, const CheckpointManifest& manifest,
                        const std::vector<fs::path>& folders, const std::vector<fs::path>& places,
                        const std::vector<Held>& held) {
    fs::path whole;
    for (const fs::path& folder : folders) {
      if (whole.empty() && !find_damage(folder, VerifyDepth::manifest) && !find_damage(folder, VerifyDepth::contents))
        whole = folder;
    }
    const fs::path restored = memory_restored_folder(place_, node_);
    const fs::path unfinished = restored.string() + ".unfinished";
    const fs::path target = unfinished / step_folder_name(step);
    const bool makes = leads() && whole.empty();
    std::string error;
    const auto attempt = [&](const std::function<void()>& work) {
      if (!makes || !error.empty()) return;
      const std::string result = or_reason([&] {
        work();
        return fs::path();
      });
      if (result.front() == 'E') error = result.substr(1);
    };
    attempt([&] {
      system_files().remove(unfinished);
      make_folders(system_files(), target);
    });
    for (std::size_t file = 0; file < places.size(); ++file) {
      const fs::path to = target / manifest.files[file].name;
      const bool is_wanted = std::ranges::any_of(held, [&](const Held& one) { return one.leads && one.files[file] == 0; });
      if (!places[file].empty()) attempt([&] { link_or_copy(places[file], to); });
      if (is_wanted) pass_on(manifest.files[file], places[file], held, file, places[file].empty() ? to : fs::path(), attempt);
    }
    attempt([&] {
      write_new_file(system_files(), target / kManifestName, std::as_bytes(std::span(text)));
      if (const std::optional<std::string> damage = find_damage(target, VerifyDepth::contents)) throw IoError(*damage);
      system_files().remove(restored);
      system_files().rename(unfinished, restored);
    });
    if (!error.empty()) throw IoError(error);
    return whole.empty() ? restored / step_folder_name(step) : whole;
  }

  static void link_or_copy(const fs::path& from, const fs::path& to) {
    std::error_code error;
    fs::create_hard_link(from, to, error);
    if (error) fs::copy_file(from, to);
  }

  // From the first process that has it, piece by piece.
  void pass_on(const CheckpointFile& file, const fs::path& from, const std::vector<Held>& held, std::size_t index,
               const fs::path& to, const std::function<void(const std::function<void()>&)>& attempt) {
    const auto giver = std::ranges::find_if(held, [&](const Held& one) { return one.files[index] != 0; }) - held.begin();
    int descriptor = -1;
    if (!to.empty()) attempt([&] { descriptor = system_files().create(to); });
    for (std::int64_t at = 0; at < file.bytes; at += kPieceBytes) {
      const std::int64_t bytes = giver == process_ ? std::min(kPieceBytes, file.bytes - at) : 0;
      // What cannot be read any more is missed where the folder is verified.
      const std::string own = or_nothing<std::string>([&] { return bytes > 0 ? read_piece(from, at, bytes) : std::string(); });
      const std::vector<std::string> all = exchange_(own);
      const std::string& piece = all[static_cast<std::size_t>(giver)];
      if (descriptor >= 0) attempt([&] { system_files().write(descriptor, to, std::as_bytes(std::span(piece))); });
    }
    if (descriptor >= 0) attempt([&] { system_files().close(descriptor, to); });
  }

  const MemoryTierPlace& place_;
  int process_;
  const ProcessExchange& exchange_;
  const Note& note_;
  int node_;
  int leader_;  // the first process of this one's node
  std::map<std::int64_t, std::vector<fs::path>, std::greater<>> readable_;
};

}  // namespace

fs::path memory_node_folder(const MemoryTierPlace& place, int node) {
  return place.folder / fmt::format("{}{}", kNodePrefix, node);
}

int memory_node_of(const MemoryTierPlace& place, int rank) { return place.ranks_per_node > 0 ? rank / place.ranks_per_node : 0; }

fs::path memory_restored_folder(const MemoryTierPlace& place, int node) { return memory_node_folder(place, node) / kRestored; }

std::optional<std::int64_t> newest_in_memory(const MemoryTierPlace& place) {
  return or_nothing<std::optional<std::int64_t>>([&]() -> std::optional<std::int64_t> {
    for (const auto& [step, folders] : readable_steps(place)) {
      const std::string text = sound_manifest(folders, step);
      if (text.empty()) continue;
      const std::vector<fs::path> places = find_files(parse(text), folders);
      if (std::ranges::none_of(places, [](const fs::path& path) { return path.empty(); })) return step;
    }
    return std::nullopt;
  });
}

std::optional<fs::path> assemble_from_memory(const MemoryTierPlace& place, int process, const ProcessExchange& exchange,
                                             const Note& note) {
  return Assembly(place, process, exchange, note).run();
}

std::optional<fs::path> assemble_from_memory(const MemoryTierPlace& place, const WorldSettings& world, const Note& note,
                                             const PitfallSet& pitfalls) {
  if (pitfalls.on(Pitfall::memory_tier_not_used)) return std::nullopt;
  const JobShape job = job_shape(world);
  return assemble_from_memory(
      place, job.rank, [&](const std::string& own) { return all_gather_bytes(world, own); }, note);
}

// Only what is the tier's own: the folder may be one that its user keeps other things in.
void clear_memory_tier(const MemoryTierPlace& place) {
  std::error_code ignored;  // of several ranks that do so at once, one has removed what another looks for
  std::vector<fs::path> nodes;
  for (fs::directory_iterator entry(place.folder, ignored), end; entry != end; entry.increment(ignored)) {
    if (is_node_name(entry->path().filename().string())) nodes.push_back(entry->path());
  }
  for (const fs::path& node : nodes) fs::remove_all(node, ignored);
  if (fs::is_directory(place.folder, ignored)) fs::remove(place.folder, ignored);  // empty, or it stays
}

}  // namespace tandem
