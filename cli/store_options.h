// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>

#include "optimized/storage/object_store.h"

namespace tandem {

/// The store that --store names, with access as the environment says: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
/// AWS_SESSION_TOKEN, AWS_REGION (or AWS_DEFAULT_REGION), AWS_ENDPOINT_URL_S3 (or AWS_ENDPOINT_URL). Nothing for an empty `url`.
/// Does not connect. Throws as open_store().
[[nodiscard]] std::shared_ptr<ObjectStore> open_store_from_environment(const std::string& url);

}  // namespace tandem
