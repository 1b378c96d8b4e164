// SPDX-License-Identifier: Apache-2.0
#include "core/error.h"

#include <fmt/format.h>

namespace tandem::detail {

void throw_contract_error(std::string_view expr, Place at, std::string_view why) {
  std::string_view file = at.file;
  if (const auto slash = file.find_last_of('/'); slash != std::string_view::npos) file.remove_prefix(slash + 1);
  throw ContractError(why.empty() ? fmt::format("{}:{}: {} does not hold", file, at.line, expr)
                                  : fmt::format("{}:{}: {} ({} does not hold)", file, at.line, why, expr));
}

}  // namespace tandem::detail
