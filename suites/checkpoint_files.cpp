// SPDX-License-Identifier: Apache-2.0
#include "suites/checkpoint_files.h"

#include <chrono>

namespace tandem {
namespace {

namespace fs = std::filesystem;

constexpr std::chrono::seconds kPatience{5};

}  // namespace

int HookedFiles::create(const fs::path& file) {
  const FileCall call{FileAction::create, file};
  if (before_) before_(call);
  const int descriptor = system_files().create(file);
  if (after_) after_(call);
  return descriptor;
}

void HookedFiles::write(int descriptor, const fs::path& file, std::span<const std::byte> bytes) {
  const FileCall call{FileAction::write, file, {}, bytes};
  if (before_) before_(call);
  system_files().write(descriptor, file, bytes);
  if (after_) after_(call);
}

void HookedFiles::sync(int descriptor, const fs::path& file) {
  const FileCall call{FileAction::sync, file};
  if (before_) before_(call);
  system_files().sync(descriptor, file);
  if (after_) after_(call);
}

// Always closed: whoever gives up a file closes it too.
void HookedFiles::close(int descriptor, const fs::path& file) {
  system_files().close(descriptor, file);
  if (after_) after_({FileAction::close, file});
}

void HookedFiles::rename(const fs::path& from, const fs::path& to) {
  const FileCall call{FileAction::rename, from, to};
  if (before_) before_(call);
  system_files().rename(from, to);
  if (after_) after_(call);
}

bool HookedFiles::exchange(const fs::path& one, const fs::path& other) {
  const FileCall call{FileAction::exchange, one, other};
  if (before_) before_(call);
  if (!system_files().exchange(one, other)) return false;
  if (after_) after_(call);
  return true;
}

void HookedFiles::sync_folder(const fs::path& folder) {
  const FileCall call{FileAction::sync_folder, folder};
  if (before_) before_(call);
  system_files().sync_folder(folder);
  if (after_) after_(call);
}

void HookedFiles::make_folder(const fs::path& folder) {
  const FileCall call{FileAction::make_folder, folder};
  if (before_) before_(call);
  system_files().make_folder(folder);
  if (after_) after_(call);
}

void HookedFiles::remove(const fs::path& path) {
  const FileCall call{FileAction::remove, path};
  if (before_) before_(call);
  system_files().remove(path);
  if (after_) after_(call);
}

void Gate::shut() {
  const std::scoped_lock lock(mutex_);
  shut_ = true;
}

void Gate::open() {
  {
    const std::scoped_lock lock(mutex_);
    shut_ = false;
  }
  changed_.notify_all();
}

void Gate::pass() {
  std::unique_lock lock(mutex_);
  if (given_up_) return;
  if (!changed_.wait_for(lock, kPatience, [this] { return !shut_ || given_up_; })) given_up_ = true;
  lock.unlock();
  changed_.notify_all();
}

bool Gate::given_up() const {
  const std::scoped_lock lock(mutex_);
  return given_up_;
}

}  // namespace tandem
