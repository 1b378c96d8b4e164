// SPDX-License-Identifier: Apache-2.0
#include "cli/store_options.h"

#include <cstdlib>
#include <initializer_list>

namespace tandem {
namespace {

// The first of the variables that is set and not empty.
std::string variable(std::initializer_list<const char*> names, const char* otherwise = "") {
  for (const char* name : names) {
    if (const char* value = std::getenv(name); value != nullptr && *value != '\0') return value;
  }
  return otherwise;
}

}  // namespace

std::shared_ptr<ObjectStore> open_store_from_environment(const std::string& url) {
  if (url.empty()) return nullptr;
  StoreAccess access;
  access.endpoint = variable({"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"});
  access.region = variable({"AWS_REGION", "AWS_DEFAULT_REGION"}, "us-east-1");
  access.access_key = variable({"AWS_ACCESS_KEY_ID"});
  access.secret_key = variable({"AWS_SECRET_ACCESS_KEY"});
  access.session_token = variable({"AWS_SESSION_TOKEN"});
  return open_store(url, access);
}

}  // namespace tandem
