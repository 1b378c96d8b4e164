// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include "optimized/storage/s3_store.h"

namespace tandem {

std::shared_ptr<ObjectStore> open_s3_store(const std::string& bucket, const std::string&, const StoreAccess&) {
  throw InputError(
      fmt::format("s3://{}: this build has no client for S3; install libcurl4-openssl-dev, libpugixml-dev and "
                  "libssl-dev, and build again, or use a folder",
                  bucket));
}

}  // namespace tandem
