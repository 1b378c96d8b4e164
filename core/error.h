// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace tandem {

/// Root of everything tandem throws. The subclass says what the catcher can do about it.
class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The calling code is wrong (shapes differ, a precondition is broken): fix the call.
class ContractError : public Error {
  using Error::Error;
};

/// The command, a configuration or an input file is wrong: one line that says what, where and what to do. Exit status 2.
class InputError : public Error {
  using Error::Error;
};

/// The operating system refused (disk full, permission, short read): retry, or another place. Exit status 4.
class IoError : public Error {
  using Error::Error;
};

/// A GPU or its runtime refused or failed: the device's state is lost with the process. Exit status 4.
class GpuError : public Error {
  using Error::Error;
};

/// A deadline passed.
class TimeoutError : public Error {
  using Error::Error;
};

/// Another rank failed, hung or aborted; `rank()` names it. The communicator that threw this is finished.
class PeerError : public Error {
 public:
  PeerError(int rank, const std::string& what) : Error(what), rank_(rank) {}
  [[nodiscard]] int rank() const noexcept { return rank_; }

 private:
  int rank_;
};

namespace detail {

/// Where a check stands. Not std::source_location: clang 14, which clang-tidy is here, does not have it.
struct Place {
  std::string_view file;
  int line;
};

[[noreturn]] void throw_contract_error(std::string_view expr, Place at, std::string_view why = {});

}  // namespace detail
}  // namespace tandem

/// TANDEM_CHECK(condition) or TANDEM_CHECK(condition, "text with values"): throws ContractError with file and line.
/// The text is evaluated only when the condition is false.
#define TANDEM_CHECK(condition, ...)                                                                                             \
  do {                                                                                                                           \
    if (!(condition)) ::tandem::detail::throw_contract_error(#condition, {__FILE__, __LINE__} __VA_OPT__(, ) __VA_ARGS__);       \
  } while (false)
