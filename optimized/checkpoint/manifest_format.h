// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "core/io/hash.h"

/// Words that the writer and the reader of a manifest share.
namespace tandem {

inline constexpr const char* kCheckpointFormat = "tandem-checkpoint";
inline constexpr int kCheckpointVersion = 2;
inline constexpr const char* kManifestHashField = "manifest_xxh128";

/// The end of the file: the hash of the text before it, as the last field.
[[nodiscard]] std::string manifest_ending(const Hash128& hash);

}  // namespace tandem
