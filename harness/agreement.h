// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>

#include "harness/runner.h"

namespace tandem {

/// What one of several processes that ran the same case says of it.
struct Opinion {
  Status status = Status::pass;
  std::string check, reason;
};

/// For core/io/binary.h.
template <class Archive>
void serialize(Archive& archive, Opinion& opinion) {
  archive(opinion.status, opinion.check, opinion.reason);
}

[[nodiscard]] Opinion opinion_of(const CaseResult& result);

/// The worst that any process says (fail, invalid, skip, pass), by the first that says so, becomes the verdict, with "process N:
/// " before its reason where they do not all say the same. A result that is no pass any more loses its measurements.
void take_worst(CaseResult& result, std::span<const Opinion> opinions);

}  // namespace tandem
