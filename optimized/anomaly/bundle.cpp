// SPDX-License-Identifier: Apache-2.0
#include "optimized/anomaly/bundle.h"

#include <algorithm>
#include <charconv>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/io/atomic_file.h"
#include "core/io/json_field.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFormat = "tandem-incident";
constexpr std::int64_t kVersion = 1;
constexpr const char* kFileName = "bundle.json";
constexpr const char* kUnfinished = ".unfinished";

nlohmann::ordered_json numbers_to_json(const std::vector<double>& values) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const double value : values) list.push_back(number_to_json(value));
  return list;
}

std::vector<double> numbers_from(const JsonField& list) {
  std::vector<double> values;
  for (const JsonField& element : list.elements()) values.push_back(element.number());
  return values;
}

std::string to_json(const IncidentBundle& bundle) {
  const nlohmann::ordered_json root = {{"format", kFormat},
                                       {"version", kVersion},
                                       {"step", bundle.step},
                                       {"batch", bundle.batch},
                                       {"batch_xxh3_128", to_hex(bundle.batch_hash)},
                                       {"findings", bundle.findings},
                                       {"start_step", bundle.start_step},
                                       {"checkpoint", bundle.checkpoint},
                                       {"skipped_batches", bundle.skipped_batches},
                                       {"losses", numbers_to_json(bundle.losses)},
                                       {"gradient_norms", numbers_to_json(bundle.gradient_norms)},
                                       {"data", bundle.data},
                                       {"data_identity", bundle.data_identity},
                                       {"config", nlohmann::ordered_json::parse(to_json(bundle.config))}};
  return root.dump(2) + "\n";
}

// Files of the same file system are linked, others copied.
void link_files(const fs::path& from, const fs::path& to, FileOperations& files) {
  files.make_folder(to);
  for (const fs::directory_entry& entry : fs::directory_iterator(from)) {
    if (!entry.is_regular_file()) continue;
    std::error_code refused;
    fs::create_hard_link(entry.path(), to / entry.path().filename(), refused);
    if (refused) fs::copy_file(entry.path(), to / entry.path().filename());
  }
  files.sync_folder(to);
}

// 12 of "incident-012".
std::optional<std::int64_t> number_of(const std::string& name) {
  constexpr std::string_view kPrefix = "incident-";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  std::int64_t number = 0;
  const char* const end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kPrefix.size(), end, number);
  return error == std::errc() && stop == end ? std::optional(number) : std::nullopt;
}

// All but the newest, never the one that was just written: where a run's ledger is lost its numbers begin again. What is to go is
// renamed first, so that a half of a bundle is never taken for one.
void prune(const fs::path& run_folder, const fs::path& written, FileOperations& files) {
  std::vector<std::pair<std::int64_t, fs::path>> bundles;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(run_folder, ignored)) {
    if (entry.path() == written) continue;
    if (const auto number = number_of(entry.path().filename().string())) bundles.emplace_back(*number, entry.path());
  }
  std::sort(bundles.begin(), bundles.end(), std::greater<>());
  try {
    for (std::size_t i = kKeptBundles - 1; i < bundles.size(); ++i) {
      const fs::path aside = bundles[i].second.string() + kUnfinished;
      files.remove(aside);
      files.rename(bundles[i].second, aside);
      files.remove(aside);
    }
  } catch (const IoError&) {  // the next one tries again
  }
}

}  // namespace

Hash128 hash_of(const Batch& batch) {
  Hasher128 hasher;
  hasher.update(std::as_bytes(std::span(batch.ids)));
  hasher.update(std::as_bytes(std::span(batch.targets)));
  return hasher.digest();
}

fs::path write_bundle(const fs::path& run_folder, std::int64_t number, const IncidentBundle& bundle, FileOperations& files) {
  fs::path target = run_folder / fmt::format("incident-{:03}", number);
  const fs::path unfinished = target.string() + kUnfinished;
  try {
    make_folders(files, run_folder);
    files.remove(unfinished);
    files.make_folder(unfinished);
    if (!bundle.checkpoint.empty()) link_files(run_folder / bundle.checkpoint, unfinished / bundle.checkpoint, files);
    const std::string text = to_json(bundle);
    write_new_file(files, unfinished / kFileName, std::as_bytes(std::span(text)));
    files.sync_folder(unfinished);
    const fs::path older = replace_folder(files, unfinished, target);
    if (!older.empty()) files.remove(older);
    prune(run_folder, target, files);
  } catch (const fs::filesystem_error& failure) {
    throw IoError(fmt::format("{}: {}", target.string(), failure.what()));
  }
  return target;
}

IncidentBundle read_bundle(const fs::path& bundle_folder) {
  const fs::path path = bundle_folder / kFileName;
  const std::string file = path.string();
  std::error_code error;
  if (!fs::is_regular_file(path, error))
    throw InputError(fmt::format("{}: there is no such file; name a folder OUT/incident-N that a run has written", file));
  const nlohmann::json parsed = parse_json_object(read_text_file(path), file);
  const JsonField root(file, parsed);
  root.require_format(kFormat, kVersion);
  IncidentBundle bundle;
  bundle.step = root["step"].count();
  bundle.batch = root["batch"].count();
  bundle.batch_hash = root["batch_xxh3_128"].hash();
  for (const JsonField& finding : root["findings"].elements()) bundle.findings.push_back(finding.text());
  bundle.start_step = root["start_step"].count();
  if (bundle.start_step > bundle.step)
    root["start_step"].refuse(fmt::format("is {}, after step {} of the incident", bundle.start_step, bundle.step));
  bundle.checkpoint = root["checkpoint"].text();
  if (!bundle.checkpoint.empty() && !fs::is_directory(bundle_folder / bundle.checkpoint, error))
    root["checkpoint"].refuse(fmt::format("is '{}', and no such folder is beside it", bundle.checkpoint));
  for (const JsonField& batch : root["skipped_batches"].elements()) bundle.skipped_batches.push_back(batch.count());
  bundle.losses = numbers_from(root["losses"]);
  bundle.gradient_norms = numbers_from(root["gradient_norms"]);
  bundle.data = root["data"].text();
  bundle.data_identity = root["data_identity"].text();
  bundle.config = config_from_json(root["config"].value().dump(), file);
  return bundle;
}

}  // namespace tandem
