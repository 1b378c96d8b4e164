// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace tandem {

/// True where the whole text has the form of the pattern: `*` stands for any characters (slashes and dots too, or none at all),
/// every other character for itself.
[[nodiscard]] bool has_form(std::string_view text, std::string_view pattern);

}  // namespace tandem
