// SPDX-License-Identifier: Apache-2.0
#include "harness/evidence.h"

namespace tandem {

std::string_view symbol(Relation relation) {
  switch (relation) {
    case Relation::at_most: return "<=";
    case Relation::at_least: return ">=";
    case Relation::equal: return "==";
  }
  return "?";
}

bool Property::holds() const noexcept {
  switch (relation) {
    case Relation::at_most: return value <= limit;
    case Relation::at_least: return value >= limit;
    case Relation::equal: return value == limit;
  }
  return false;
}

}  // namespace tandem
