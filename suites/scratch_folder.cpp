// SPDX-License-Identifier: Apache-2.0
#include "suites/scratch_folder.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {

ScratchFolder::ScratchFolder(const std::string& purpose) {
  std::string name = (std::filesystem::temp_directory_path() / ("tandem-" + purpose + "-XXXXXX")).string();
  if (mkdtemp(name.data()) == nullptr) throw IoError(fmt::format("{}: cannot make this folder: {}", name, std::strerror(errno)));
  path_ = name;
}

ScratchFolder::~ScratchFolder() {
  std::error_code ignored;  // what is left lies in a temporary folder
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace tandem
