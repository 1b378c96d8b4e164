// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cli/train_options.h"

namespace tandem {

/// `tandem train --replay FOLDER`: computes the steps up to an incident again from its bundle, without guard and faults, and says
/// what is as it was recorded. The same numbers again are the data's or the state's; others were the machine's. Returns an
/// ExitStatus: kCheckFailed where a step before the incident differs. Throws InputError.
[[nodiscard]] int replay_incident(const TrainArguments& arguments);

}  // namespace tandem
