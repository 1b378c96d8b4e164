// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <system_error>

#include <fmt/format.h>

#include "optimized/checkpoint/catalogue.h"
#include "optimized/checkpoint/tiers.h"

namespace tandem {
namespace {

namespace fs = std::filesystem;

class NewestSearch {
 public:
  NewestSearch(const fs::path& folder, const ObjectStore* store, const std::function<void(const std::string&)>& note)
      : folder_(folder), store_(store), note_(note) {}

  fs::path run() {
    std::error_code ignored;
    if (fs::is_directory(folder_, ignored)) local_ = list_checkpoints(folder_);
    ask_store([&] { remote_ = list_remote_checkpoints(*store_); });
    auto local = local_.begin();
    auto remote = remote_.begin();
    while (local != local_.end() || remote != remote_.end()) {
      const bool take_local = remote == remote_.end() || (local != local_.end() && local->step >= *remote);
      const std::optional<fs::path> found = take_local ? try_local(*local++) : try_remote(*remote++);
      if (found) {
        for (const std::string& line : passed_over_) tell(line);
        return *found;
      }
    }
    if (store_failed_) std::rethrow_exception(store_failed_);
    throw InputError(text_of_nothing());
  }

 private:
  std::optional<fs::path> try_local(const CheckpointEntry& entry) {
    const std::optional<std::string> damage = find_damage(entry.folder, VerifyDepth::contents);
    if (!damage) return entry.folder;
    passed_over_.push_back(fmt::format("{} is passed over: {}", entry.folder.string(), *damage));
    return {};
  }

  std::optional<fs::path> try_remote(std::int64_t step) {
    std::optional<fs::path> found;
    try {
      ask_store([&] { found = fetch_checkpoint(*store_, step, folder_); });
    } catch (const InputError& error) {
      passed_over_.push_back(fmt::format("{} of the store is passed over: {}", step_folder_name(step), error.what()));
    }
    return found;
  }

  // A store that failed once, after all its retries, is not asked again.
  template <class Question>
  void ask_store(const Question& question) {
    if (store_ == nullptr || store_failed_) return;
    try {
      question();
    } catch (const StoreError& error) {
      store_failed_ = std::current_exception();
      passed_over_.push_back(fmt::format("newer checkpoints of the store are passed over: {}", error.what()));
    }
  }

  std::string text_of_nothing() const {
    std::string text = fmt::format("no checkpoint that verifies in {}", folder_.string());
    if (store_ != nullptr) text += fmt::format(" or in {}", store_->describe());
    if (passed_over_.empty()) return text + ": there is none";
    text += fmt::format(": {}", passed_over_.front());
    return passed_over_.size() == 1 ? text : text + fmt::format(" (and {} more)", passed_over_.size() - 1);
  }

  void tell(const std::string& line) const {
    if (note_) note_(line);
  }

  const fs::path& folder_;
  const ObjectStore* store_;
  const std::function<void(const std::string&)>& note_;
  std::vector<CheckpointEntry> local_;
  std::vector<std::int64_t> remote_;
  std::vector<std::string> passed_over_;
  std::exception_ptr store_failed_;
};

}  // namespace

fs::path find_newest_checkpoint(const fs::path& folder, const ObjectStore* store,
                                const std::function<void(const std::string&)>& note) {
  const fs::path plain = folder.has_filename() ? folder : folder.parent_path();
  if (parse_step_folder_name(plain.filename().string())) return find_checkpoint(plain, note);
  return NewestSearch(folder, store, note).run();
}

}  // namespace tandem
