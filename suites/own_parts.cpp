// SPDX-License-Identifier: Apache-2.0
#include "suites/own_parts.h"

#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {

CaseList with_own_parts(CaseList cases, std::shared_ptr<const OwnParts> parts) {
  TANDEM_CHECK(parts != nullptr, "no own parts");
  for (Case& entry : cases) {
    const auto there = [parts](RunContext context) {
      context.world.own_parts = parts;
      return context;
    };
    entry.execute = [execute = std::move(entry.execute), parts, there](const RunContext& context) {
      const std::int64_t before = parts->calls ? parts->calls() : 0;
      CaseEvidence evidence = execute(there(context));
      if (parts->calls) {
        evidence.properties.push_back({"calls_of_own_part", static_cast<double>(parts->calls() - before), Relation::at_least, 1.0,
                                       fmt::format("a case that never calls '{}' proves nothing about it", parts->name), -1, ""});
      }
      return evidence;
    };
    if (entry.localise) {
      entry.localise = [localise = std::move(entry.localise), there](const RunContext& context) {
        return localise(there(context));
      };
    }
  }
  return cases;
}

}  // namespace tandem
