// SPDX-License-Identifier: Apache-2.0
#include "suites/crash_states.h"

#include <fstream>
#include <memory>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

std::string name_of(const std::string& path) { return path.substr(path.rfind('/') + 1); }

}  // namespace

void FileLog::record(const FileCall& call) {
  const auto relative = [&](const fs::path& path) {
    const std::string text = path.lexically_relative(root_).string();
    return text == "." ? std::string() : text;
  };
  const std::scoped_lock lock(mutex_);
  events_.push_back({call.action,
                     relative(call.path),
                     call.other.empty() ? std::string() : relative(call.other),
                     {call.bytes.begin(), call.bytes.end()},
                     promised_});
}

void FileLog::promise(std::int64_t step) {
  const std::scoped_lock lock(mutex_);
  promised_ = step;
}

std::vector<CrashVariant> crash_variants() {
  std::vector<CrashVariant> variants;
  for (const LostData data : {LostData::none, LostData::unsynced, LostData::half_of_unsynced}) {
    for (const LostNames names : {LostNames::none, LostNames::unsynced}) variants.push_back({data, names});
  }
  return variants;
}

std::string describe(const CrashVariant& variant) {
  constexpr std::string_view kData[] = {"all written bytes", "synced bytes only", "synced bytes and half of the rest"};
  constexpr std::string_view kNames[] = {"all names", "synced names only"};
  return fmt::format("{}, {}", kData[static_cast<std::size_t>(variant.data)], kNames[static_cast<std::size_t>(variant.names)]);
}

// A file, or a folder: its entries now, and when it was last synced.
struct CrashModel::Node {
  bool folder = false;
  std::string bytes;
  std::size_t synced_bytes = 0;
  using Entries = std::map<std::string, std::shared_ptr<Node>>;
  Entries entries, synced_entries;
};

CrashModel::CrashModel() : root_(std::make_shared<Node>()) { root_->folder = true; }
CrashModel::~CrashModel() = default;

// The folder that `path` lies in.
CrashModel::Node& CrashModel::parent_of(const std::string& path) const {
  Node* node = root_.get();
  std::size_t begin = 0;
  for (std::size_t slash = path.find('/'); slash != std::string::npos; slash = path.find('/', begin)) {
    node = node->entries.at(path.substr(begin, slash - begin)).get();
    begin = slash + 1;
  }
  return *node;
}

void CrashModel::apply(const FileLog::Event& event) {
  if (event.path.empty()) {
    if (event.action == FileAction::sync_folder) root_->synced_entries = root_->entries;
    return;
  }
  Node& parent = parent_of(event.path);
  const std::string name = name_of(event.path);
  const auto make = [&](bool folder) {
    std::shared_ptr<Node>& node = parent.entries[name];
    if (folder && node != nullptr) return;
    node = std::make_shared<Node>();
    node->folder = folder;
  };
  switch (event.action) {
    case FileAction::create: make(false); break;
    case FileAction::make_folder: make(true); break;
    case FileAction::write:
      parent.entries.at(name)->bytes.append(reinterpret_cast<const char*>(event.bytes.data()), event.bytes.size());
      break;
    case FileAction::sync: parent.entries.at(name)->synced_bytes = parent.entries.at(name)->bytes.size(); break;
    case FileAction::close: break;
    case FileAction::sync_folder: parent.entries.at(name)->synced_entries = parent.entries.at(name)->entries; break;
    case FileAction::remove: parent.entries.erase(name); break;
    case FileAction::rename: {
      std::shared_ptr<Node> node = parent.entries.at(name);
      parent.entries.erase(name);
      parent_of(event.other).entries[name_of(event.other)] = std::move(node);
      break;
    }
    case FileAction::exchange: std::swap(parent.entries.at(name), parent_of(event.other).entries.at(name_of(event.other))); break;
  }
}

CrashedTree CrashModel::after_crash(const CrashVariant& variant) const {
  CrashedTree tree;
  const std::function<void(const Node&, const std::string&)> add = [&](const Node& folder, const std::string& prefix) {
    const auto& entries = variant.names == LostNames::none ? folder.entries : folder.synced_entries;
    for (const auto& [name, node] : entries) {
      if (node->folder) {
        tree[prefix + name + "/"] = "";
        add(*node, prefix + name + "/");
        continue;
      }
      std::size_t size = node->bytes.size();
      if (variant.data == LostData::unsynced) size = node->synced_bytes;
      if (variant.data == LostData::half_of_unsynced) size = node->synced_bytes + (size - node->synced_bytes) / 2;
      tree[prefix + name] = node->bytes.substr(0, size);
    }
  };
  add(*root_, "");
  return tree;
}

void write_tree(const CrashedTree& tree, const fs::path& folder) {
  for (const auto& [name, bytes] : tree) {
    if (name.ends_with('/')) {
      fs::create_directory(folder / name.substr(0, name.size() - 1));
      continue;
    }
    std::ofstream file(folder / name, std::ios::binary);
    file << bytes;
    if (!file.flush()) throw IoError(fmt::format("{}: cannot be written", (folder / name).string()));
  }
}

}  // namespace tandem
