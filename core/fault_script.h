// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

/// Ways in which a run can be disturbed on purpose: `--fault KIND@key=value,...`.
enum class FaultKind : std::uint8_t {
  kill,        ///< the process of the rank is gone at once (SIGKILL)
  lose,        ///< the same, and its place does not come back: the next attempt has one rank less
  hang,        ///< the rank does nothing any more
  slow,        ///< each step of the rank takes `ms` longer, for `count` steps
  nan,         ///< NaN in the target
  flip,        ///< one bit of one element of the target is turned: of its exponent, so that it matters
  spike,       ///< the learning rate is `factor` times too high, for `count` steps
  poison,      ///< the batch `batch` is garbage, whenever it is read
  disk_full,   ///< writes of checkpoints fail, for `count` steps
  corrupt,     ///< one bit of the newest checkpoint in the folder is turned
  message,     ///< one bit of what the rank receives next is turned
  heartbeat,   ///< the next `count` beats of the rank's process are lost
  jitter,      ///< each operation of the rank's communicators is late by up to `ms`, for `count` steps
  supervisor,  ///< the supervisor is gone at once (SIGKILL)
  preempt,     ///< SIGTERM, as a scheduler sends it
};
[[nodiscard]] std::string_view name(FaultKind kind);
[[nodiscard]] std::span<const FaultKind> all_fault_kinds();

/// Where nan and flip strike.
enum class FaultTarget : std::uint8_t { weights, moments, activations, gradients };
[[nodiscard]] std::string_view name(FaultTarget target);

/// Within its step, or within the first save or restore from that step on.
enum class FaultMoment : std::uint8_t { step, save, restore };
[[nodiscard]] std::string_view name(FaultMoment moment);

struct Fault {
  FaultKind kind = FaultKind::kill;
  std::int64_t step = 1;  ///< as steps are printed: from 1; it strikes while this step is under way. poison: 0, not used
  int rank = 0;
  FaultMoment moment = FaultMoment::step;       ///< `during=save`
  FaultTarget target = FaultTarget::gradients;  ///< `target=weights`
  double milliseconds = 100;                    ///< `ms=`
  std::int64_t count = 1;                       ///< `count=`
  double factor = 100;                          ///< `factor=`
  std::int64_t batch = 0;                       ///< `batch=`: index of the global batch, from 0
  std::uint64_t id = 0;                         ///< place in the script: a fault strikes once in a run, restarts included
  friend bool operator==(const Fault&, const Fault&) = default;
};

/// "nan@step=20,rank=1,target=activations". Throws InputError naming what is wrong, with the nearest known word. Keys that mean
/// nothing for the kind are refused.
[[nodiscard]] Fault parse_fault(std::string_view text);
/// Numbered in their order.
[[nodiscard]] std::vector<Fault> parse_faults(std::span<const std::string> texts);
/// As parse_fault() reads it.
[[nodiscard]] std::string to_string(const Fault& fault);
/// For --help: one line per kind.
[[nodiscard]] std::vector<std::string> describe_fault_kinds();

}  // namespace tandem
