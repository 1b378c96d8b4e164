// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "suites/composition.h"

namespace tandem {

/// How a composition is judged: each is a case of its own, "compositions/NAME/CHECK" (docs/compositions.md).
///   reference    gradients, an SGD step, the steps of its own optimizer: rounding against the double reference. Of a lossy
///   codec,
///                the same plan without it
///   bits         the same bits as without what changes none: overlap, recomputation, offload, an adversary, where it deals alone
///                also ZeRO
///   compression  sums, residuals, copies and bytes of the codec's definition
///   overflow     the steps that overflow are as if they had not been, on every rank
///   evaluation   the loss of held-out rows, again the same after other rows
/// Those that say something of the composition, in this order. `name` identifies it: "seed5/12". The composition is legal.
[[nodiscard]] CaseList composition_cases(const Composition& composition, const std::string& name);

/// The check of a case: the last part of its name.
[[nodiscard]] std::string check_of(const std::string& case_name);

}  // namespace tandem
