// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "optimized/storage/object_store.h"

namespace tandem {

/// A bucket of a service that speaks S3, its objects under PREFIX/ (empty: the whole bucket). docs/storage.md says what is
/// checked and what is made again. Throws InputError in a build without libcurl.
[[nodiscard]] std::shared_ptr<ObjectStore> open_s3_store(const std::string& bucket, const std::string& prefix,
                                                         const StoreAccess& access);

}  // namespace tandem
