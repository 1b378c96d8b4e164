// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "core/batch_source.h"
#include "core/config.h"

namespace tandem {

/// What --data names: "synthetic", a text file, or the prefix of a prepared .bin/.idx pair. Throws InputError where it is none of
/// these or does not fit the model (vocabulary, sequence).
[[nodiscard]] std::unique_ptr<BatchSource> open_data(const std::string& data, const RunConfig& config);

}  // namespace tandem
