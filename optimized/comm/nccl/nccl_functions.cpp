// SPDX-License-Identifier: Apache-2.0
#include "optimized/comm/nccl/nccl_functions.h"

#include <dlfcn.h>

#include <type_traits>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

// Communicators that do not block, and split(): since 2.18.
constexpr int kOldestVersion = 21800;

void say(std::string* why_not, std::string text) {
  if (why_not != nullptr) *why_not = std::move(text);
}

// Calls visit(name, pointer, is_optional) for every entry of the table.
template <class Table, class Visit>
void for_each_function(Table& table, const Visit& visit) {
  visit("ncclGetVersion", table.get_version, false);
  visit("ncclGetErrorString", table.error_string, false);
  visit("ncclGetLastError", table.last_error, true);
  visit("ncclGetUniqueId", table.get_unique_id, false);
  visit("ncclCommInitRankConfig", table.init_rank, false);
  visit("ncclCommSplit", table.split, false);
  visit("ncclCommFinalize", table.finalize, false);
  visit("ncclCommDestroy", table.destroy, false);
  visit("ncclCommAbort", table.abort, false);
  visit("ncclCommGetAsyncError", table.async_error, false);
  visit("ncclCommRegister", table.register_buffer, true);
  visit("ncclCommDeregister", table.deregister_buffer, true);
  visit("ncclGroupStart", table.group_start, false);
  visit("ncclGroupEnd", table.group_end, false);
  visit("ncclAllReduce", table.all_reduce, false);
  visit("ncclReduceScatter", table.reduce_scatter, false);
  visit("ncclReduce", table.reduce, false);
  visit("ncclAllGather", table.all_gather, false);
  visit("ncclBroadcast", table.broadcast, false);
  visit("ncclSend", table.send, false);
  visit("ncclRecv", table.recv, false);
}

// The table and what it comes from.
struct OpenedNccl {
  NcclFunctions functions;
  std::shared_ptr<void> library;
};

}  // namespace

std::string find_missing(const NcclFunctions& functions) {
  std::string missing;
  for_each_function(functions, [&](const char* name, const auto& function, bool is_optional) {
    if (function == nullptr && !is_optional && missing.empty()) missing = name;
  });
  return missing;
}

void require_nccl(const NcclFunctions& functions, ncclResult_t result, const std::string& what, ncclComm_t comm) {
  if (result == ncclSuccess || result == ncclInProgress) return;
  const char* const detail = functions.last_error != nullptr ? functions.last_error(comm) : nullptr;
  const bool has_detail = detail != nullptr && *detail != '\0';
  throw GpuError(
      fmt::format("NCCL: {}: {}{}{}", what, functions.error_string(result), has_detail ? "; " : "", has_detail ? detail : ""));
}

std::string version_text(int version) { return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100); }

std::shared_ptr<const NcclFunctions> open_nccl(const std::string& library, std::string* why_not) {
  const auto opened = std::make_shared<OpenedNccl>();
  // Never closed: NCCL starts threads of its own that may outlive its communicators.
  void* const handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* const reason = ::dlerror();
    say(why_not, fmt::format("{} cannot be loaded: {}", library, reason != nullptr ? reason : "unknown reason"));
    return nullptr;
  }
  opened->library = std::shared_ptr<void>(handle, [](void* it) { ::dlclose(it); });
  for_each_function(opened->functions, [&](const char* name, auto& function, bool) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(handle, name));
  });
  if (const std::string missing = find_missing(opened->functions); !missing.empty()) {
    say(why_not, fmt::format("{} has no {}", library, missing));
    return nullptr;
  }
  int version = 0;
  if (opened->functions.get_version(&version) != ncclSuccess || version < kOldestVersion) {
    say(why_not, fmt::format("{} is NCCL {}; 2.18 or later is needed", library, version_text(version)));
    return nullptr;
  }
  return {opened, &opened->functions};
}

}  // namespace tandem
