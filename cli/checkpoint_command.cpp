// SPDX-License-Identifier: Apache-2.0
#include "cli/checkpoint_command.h"

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <system_error>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/output.h"
#include "cli/store_options.h"
#include "cli/terminal.h"
#include "harness/text_table.h"
#include "optimized/checkpoint/catalogue.h"
#include "optimized/checkpoint/tiers.h"
#include "suites/pair.h"

namespace tandem {
namespace {

struct Arguments {
  std::string where;
  std::string store;
  std::string json;
};

/// A copy of a step: in a folder, or in a store.
struct Copy {
  std::int64_t step = 0;
  std::string place;  ///< for messages
  std::filesystem::path folder;
  bool remote = false;
  std::optional<CheckpointManifest> manifest = {};
  std::optional<std::string> damage = {};
};

bool is_url(const std::string& text) { return text.find("://") != std::string::npos; }

std::shared_ptr<ObjectStore> store_of(const Arguments& arguments) {
  if (is_url(arguments.where)) {
    if (!arguments.store.empty()) throw InputError("--store names a second place beside a folder; give one of the two URLs");
    return open_store_from_environment(arguments.where);
  }
  return arguments.store.empty() ? nullptr : open_store_from_environment(arguments.store);
}

// A step folder stands for itself.
std::vector<CheckpointEntry> local_entries(const std::filesystem::path& where) {
  std::filesystem::path named = where.lexically_normal();
  if (!named.has_filename()) named = named.parent_path();
  std::error_code error;
  const std::optional<std::int64_t> step = parse_step_folder_name(named.filename().string());
  if (step && std::filesystem::is_directory(named, error)) return {{*step, named}};
  return list_checkpoints(where);
}

std::vector<Copy> local_copies(const std::filesystem::path& where, VerifyDepth depth, ProgressLine& progress) {
  std::vector<Copy> copies;
  const std::vector<CheckpointEntry> entries = local_entries(where);
  for (const CheckpointEntry& entry : entries) {
    progress.show(std::ssize(copies), std::ssize(entries), entry.folder.string());
    copies.push_back({.step = entry.step, .place = entry.folder.string(), .folder = entry.folder});
    copies.back().damage = find_damage(entry.folder, depth);
    try {
      copies.back().manifest = read_manifest_of(entry.folder);
    } catch (const InputError&) {
      // `damage` says why.
    }
  }
  return copies;
}

Hash128 hash_of_object(const ObjectStore& store, const std::string& key, std::int64_t bytes) {
  constexpr std::int64_t kPieceBytes = std::int64_t{16} << 20;
  Hasher128 hasher;
  for (std::int64_t begin = 0; begin < bytes; begin += kPieceBytes) {
    hasher.update(store.get_range(key, {begin, std::min(bytes, begin + kPieceBytes)}));
  }
  return hasher.digest();
}

std::optional<std::string> remote_damage(const ObjectStore& store, const std::string& step_name,
                                         const CheckpointManifest& manifest, VerifyDepth depth) {
  std::map<std::string, std::int64_t> sizes;
  for (const ObjectInfo& object : store.list(step_name + "/")) sizes.emplace(object.key, object.bytes);
  for (const CheckpointFile& file : manifest.files) {
    const std::string key = step_name + "/" + file.name;
    const auto found = sizes.find(key);
    if (found == sizes.end()) return fmt::format("{} is missing", key);
    if (found->second != file.bytes) return fmt::format("{} has {} bytes, the manifest says {}", key, found->second, file.bytes);
    if (depth == VerifyDepth::contents && hash_of_object(store, key, file.bytes) != file.hash) {
      return fmt::format("{}: the bytes are not those that were written (hash)", key);
    }
  }
  return std::nullopt;
}

std::vector<Copy> remote_copies(const ObjectStore& store, VerifyDepth depth, ProgressLine& progress) {
  std::vector<Copy> copies;
  const std::vector<std::int64_t> steps = list_remote_checkpoints(store);
  for (const std::int64_t step : steps) {
    const std::string name = step_folder_name(step);
    progress.show(std::ssize(copies), std::ssize(steps), name);
    const std::string key = name + "/" + kManifestName;
    copies.push_back({.step = step, .place = fmt::format("{} in {}", name, store.describe()), .folder = {}, .remote = true});
    const std::vector<std::byte> text = store.get(key);
    try {
      copies.back().manifest = parse_manifest({reinterpret_cast<const char*>(text.data()), text.size()}, key);
      copies.back().damage = remote_damage(store, name, *copies.back().manifest, depth);
    } catch (const InputError& error) {
      copies.back().damage = error.what();
    }
  }
  return copies;
}

// Newest first, of a step the local one first.
std::vector<Copy> all_copies(const Arguments& arguments, VerifyDepth depth) {
  const std::shared_ptr<ObjectStore> store = store_of(arguments);
  ProgressLine progress;
  std::vector<Copy> copies;
  if (!is_url(arguments.where)) copies = local_copies(arguments.where, depth, progress);
  if (store != nullptr) {
    for (Copy& copy : remote_copies(*store, depth, progress)) copies.push_back(std::move(copy));
  }
  std::stable_sort(copies.begin(), copies.end(), [](const Copy& a, const Copy& b) { return a.step > b.step; });
  return copies;
}

std::string tier_of(const Copy& copy) { return copy.remote ? "store" : "local"; }

std::string as_json(const std::vector<Copy>& copies) {
  nlohmann::ordered_json listed = nlohmann::ordered_json::array();
  for (const Copy& copy : copies) {
    nlohmann::ordered_json item = {{"step", copy.step},
                                   {"tier", tier_of(copy)},
                                   {"place", copy.place},
                                   {"state", copy.damage ? "damaged" : "whole"},
                                   {"damage", nullptr}};
    if (copy.damage) item["damage"] = *copy.damage;
    if (copy.manifest) {
      const RunConfig& config = copy.manifest->info.config;
      item["bytes"] = copy.manifest->total_bytes();
      item["files"] = copy.manifest->files.size();
      item["ranks"] = config.plan.parallel.world_size();
      item["layout"] = describe_layout(config.plan);
      item["precision"] = config.plan.precision;
      item["zero"] = config.plan.zero_stage;
      item["updates"] = copy.manifest->info.updates;
      item["data"] = copy.manifest->info.data;
    }
    listed.push_back(item);
  }
  return nlohmann::ordered_json{{"checkpoints", listed}}.dump(2) + "\n";
}

std::string table_of(const std::vector<Copy>& copies) {
  TextTable table({"step", "tier", "size", "files", "ranks", "layout", "precision", "state"});
  for (const Copy& copy : copies) {
    std::vector<std::string> row = {fmt::format("{}", copy.step), tier_of(copy)};
    if (copy.manifest) {
      const TrainingPlan& plan = copy.manifest->info.config.plan;
      row.insert(row.end(), {human_bytes(copy.manifest->total_bytes()), fmt::format("{}", copy.manifest->files.size()),
                             fmt::format("{}", plan.parallel.world_size()), describe_layout(plan), plan.precision});
    } else {
      row.insert(row.end(), 5, "-");
    }
    row.emplace_back(copy.damage ? "damaged" : "whole");
    table.add(row);
  }
  return table.render(output_style());
}

int list_action(const Arguments& arguments) {
  require_writable(arguments.json, "--json");
  const std::vector<Copy> copies = all_copies(arguments, VerifyDepth::manifest);
  if (arguments.json != "-") {
    fmt::print("{}", copies.empty() ? fmt::format("{}: no checkpoints\n", arguments.where) : table_of(copies));
    for (const Copy& copy : copies) {
      if (copy.damage) fmt::print("{}: {}\n", copy.place, *copy.damage);
    }
  }
  if (!arguments.json.empty()) write_output(arguments.json, as_json(copies));
  return kGood;
}

int verify_action(const Arguments& arguments) {
  require_writable(arguments.json, "--json");
  const std::vector<Copy> copies = all_copies(arguments, VerifyDepth::contents);
  if (copies.empty()) throw InputError(fmt::format("{}: there is no checkpoint to verify", arguments.where));
  std::int64_t damaged = 0;
  for (const Copy& copy : copies) {
    damaged += copy.damage ? 1 : 0;
    if (arguments.json != "-") fmt::print("{}: {}\n", copy.place, copy.damage ? "damaged: " + *copy.damage : "whole");
  }
  if (arguments.json != "-") fmt::print("{} whole, {} damaged\n", std::ssize(copies) - damaged, damaged);
  if (!arguments.json.empty()) write_output(arguments.json, as_json(copies));
  return damaged == 0 ? kGood : kCheckFailed;
}

std::shared_ptr<Arguments> add_arguments(CLI::App& command) {
  auto arguments = std::make_shared<Arguments>();
  command.add_option("DIR", arguments->where, "folder that train --out wrote, one of its steps, or URL of a store")->required();
  command.add_option("--store", arguments->store, "URL of a second place that holds checkpoints (s3://BUCKET/PREFIX)");
  command.add_option("--json", arguments->json, "write the list as JSON; - is standard output");
  return arguments;
}

}  // namespace

void add_checkpoint_list(CommandLine& line, CLI::App& parent) {
  auto* command = parent.add_subcommand("list", "Checkpoints, newest first, and whether their files are there");
  const auto arguments = add_arguments(*command);
  command->footer("Example (after: tandem train --steps 20 --out run):\n  tandem checkpoint list run");
  command->callback([&line, arguments] { line.action = [arguments] { return list_action(*arguments); }; });
}

void add_checkpoint_verify(CommandLine& line, CLI::App& parent) {
  auto* command = parent.add_subcommand("verify", "Read all bytes and compare every hash; exit 1: something is damaged");
  const auto arguments = add_arguments(*command);
  command->footer("Example (after: tandem train --steps 20 --out run):\n  tandem checkpoint verify run");
  command->callback([&line, arguments] { line.action = [arguments] { return verify_action(*arguments); }; });
}

void add_checkpoint_command(CommandLine& line) {
  auto* command = line.app.add_subcommand("checkpoint", "List, verify, convert checkpoints; how often to make them");
  command->require_subcommand(1);
  add_checkpoint_list(line, *command);
  add_checkpoint_verify(line, *command);
  add_checkpoint_reshard(line, *command);
  add_checkpoint_export(line, *command);
  add_checkpoint_import(line, *command);
  add_checkpoint_advise(line, *command);
  command->footer(
      "Example:\n"
      "  tandem train --steps 20 --set checkpoint_every_steps=5 --out run\n"
      "  tandem checkpoint list run\n"
      "  tandem checkpoint advise run --mtbf-hours 6");
}

}  // namespace tandem
