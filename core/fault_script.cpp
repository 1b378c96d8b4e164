// SPDX-License-Identifier: Apache-2.0
#include "core/fault_script.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/error.h"
#include "core/nearest_name.h"

namespace tandem {
namespace {

enum Key : unsigned {
  kStep = 1U << 0U,
  kRank = 1U << 1U,
  kDuring = 1U << 2U,
  kTarget = 1U << 3U,
  kMilliseconds = 1U << 4U,
  kCount = 1U << 5U,
  kFactor = 1U << 6U,
  kBatch = 1U << 7U,
};

struct NamedKey {
  Key key;
  std::string_view name;
};
constexpr std::array kKeys = {NamedKey{kStep, "step"},     NamedKey{kRank, "rank"},       NamedKey{kDuring, "during"},
                              NamedKey{kTarget, "target"}, NamedKey{kMilliseconds, "ms"}, NamedKey{kCount, "count"},
                              NamedKey{kFactor, "factor"}, NamedKey{kBatch, "batch"}};

// What each kind is called, which keys it reads, and what it does.
struct KindEntry {
  FaultKind kind;
  std::string_view name;
  unsigned keys;
  std::string_view meaning;
};
constexpr std::array kKinds = {
    KindEntry{FaultKind::kill, "kill", kStep | kRank | kDuring, "the process of the rank is gone at once (SIGKILL)"},
    KindEntry{FaultKind::lose, "lose", kStep | kRank | kDuring, "the same, and its place does not come back (--elastic)"},
    KindEntry{FaultKind::hang, "hang", kStep | kRank | kDuring, "the rank does nothing any more"},
    KindEntry{FaultKind::slow, "slow", kStep | kRank | kMilliseconds | kCount, "`count` steps of the rank take `ms` longer"},
    KindEntry{FaultKind::nan, "nan", kStep | kRank | kTarget, "NaN in the target"},
    KindEntry{FaultKind::flip, "flip", kStep | kRank | kTarget, "a bit of the target is turned"},
    KindEntry{FaultKind::spike, "spike", kStep | kFactor | kCount,
              "the learning rate is `factor` times too high for `count` steps"},
    KindEntry{FaultKind::poison, "poison", kBatch, "the global batch `batch` (from 0) is garbage"},
    KindEntry{FaultKind::disk_full, "disk_full", kStep | kCount, "checkpoints cannot be written for `count` steps"},
    KindEntry{FaultKind::corrupt, "corrupt", kStep, "a bit of the newest checkpoint is turned"},
    KindEntry{FaultKind::message, "message", kStep | kRank, "a bit of what the rank receives next is turned"},
    KindEntry{FaultKind::heartbeat, "heartbeat", kStep | kRank | kCount, "the next `count` beats of the rank are lost"},
    KindEntry{FaultKind::jitter, "jitter", kStep | kRank | kMilliseconds | kCount,
              "communication of the rank is up to `ms` late for `count` steps"},
    KindEntry{FaultKind::supervisor, "supervisor", kStep | kDuring, "the supervisor is gone at once (SIGKILL)"},
    KindEntry{FaultKind::preempt, "preempt", kStep | kRank | kDuring, "SIGTERM, as a scheduler sends it"},
};

constexpr std::array kTargets = {FaultTarget::weights, FaultTarget::moments, FaultTarget::activations, FaultTarget::gradients};
constexpr std::array kMoments = {FaultMoment::step, FaultMoment::save, FaultMoment::restore};

const KindEntry& entry_of(FaultKind kind) {
  return *std::find_if(kKinds.begin(), kKinds.end(), [&](const KindEntry& entry) { return entry.kind == kind; });
}

std::vector<std::string> names_of(unsigned keys) {
  std::vector<std::string> names;
  for (const NamedKey& key : kKeys) {
    if ((keys & key.key) != 0) names.emplace_back(key.name);
  }
  return names;
}

template <class Value, std::size_t n>
std::vector<std::string> names_of(const std::array<Value, n>& values) {
  std::vector<std::string> names;
  for (const Value value : values) names.emplace_back(name(value));
  return names;
}

// Reads one script line; every complaint begins with it.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  Fault read() {
    const std::size_t at = text_.find('@');
    entry_ = &find_kind(text_.substr(0, at));
    fault_.kind = entry_->kind;
    std::string_view rest = at == std::string_view::npos ? std::string_view() : text_.substr(at + 1);
    if (at != std::string_view::npos && rest.empty()) refuse("nothing stands behind '@'");
    while (!rest.empty()) {
      const std::size_t comma = rest.find(',');
      assign(rest.substr(0, comma));
      rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
      if (comma != std::string_view::npos && rest.empty()) refuse("nothing stands behind the last ','");
    }
    const Key needed = (entry_->keys & kBatch) != 0 ? kBatch : kStep;
    if ((seen_ & needed) == 0) refuse(fmt::format("it does not say when; write {}@{}=N", entry_->name, names_of(needed)[0]));
    if ((entry_->keys & kStep) == 0) fault_.step = 0;
    return fault_;
  }

 private:
  [[noreturn]] void refuse(const std::string& why) const { throw InputError(fmt::format("fault '{}': {}", text_, why)); }

  [[noreturn]] void refuse_word(std::string_view what, std::string_view word, const std::vector<std::string>& known) const {
    const std::optional<std::string> nearest = nearest_name(word, known);
    refuse(fmt::format("there is no {} '{}'{}; there are {}", what, word,
                       nearest ? fmt::format(" (did you mean '{}'?)", *nearest) : "", fmt::join(known, ", ")));
  }

  [[nodiscard]] const KindEntry& find_kind(std::string_view word) const {
    std::vector<std::string> known;
    for (const KindEntry& entry : kKinds) {
      if (entry.name == word) return entry;
      known.emplace_back(entry.name);
    }
    refuse_word("kind", word, known);
  }

  void assign(std::string_view assignment) {
    const std::size_t equals = assignment.find('=');
    if (equals == std::string_view::npos) refuse(fmt::format("'{}' is not of the form key=value", assignment));
    const std::string_view word = assignment.substr(0, equals);
    const std::string_view value = assignment.substr(equals + 1);
    const auto* const key = std::find_if(kKeys.begin(), kKeys.end(), [&](const NamedKey& one) { return one.name == word; });
    if (key == kKeys.end()) refuse_word("key", word, names_of(entry_->keys));
    if ((entry_->keys & key->key) == 0) {
      refuse(fmt::format("'{}' means nothing for {}; it takes {}", word, entry_->name, fmt::join(names_of(entry_->keys), ", ")));
    }
    if ((seen_ & key->key) != 0) refuse(fmt::format("'{}' is there twice", word));
    seen_ |= key->key;
    set(key->key, word, value);
  }

  void set(Key key, std::string_view word, std::string_view value) {
    switch (key) {
      case kStep: fault_.step = integer(word, value, 1); return;
      case kRank: fault_.rank = static_cast<int>(integer(word, value, 0, std::numeric_limits<int>::max())); return;
      case kDuring: fault_.moment = choice(word, value, kMoments); return;
      case kTarget: fault_.target = choice(word, value, kTargets); return;
      case kMilliseconds: fault_.milliseconds = number(word, value); return;
      case kCount: fault_.count = integer(word, value, 1); return;
      case kFactor: fault_.factor = number(word, value); return;
      case kBatch: fault_.batch = integer(word, value, 0); return;
    }
  }

  [[nodiscard]] std::int64_t integer(std::string_view word, std::string_view value, std::int64_t least,
                                     std::int64_t most = std::numeric_limits<std::int64_t>::max()) const {
    std::int64_t result = 0;
    const auto [end, problem] = std::from_chars(value.data(), value.data() + value.size(), result);
    if (problem != std::errc() || end != value.data() + value.size() || result < least || result > most) {
      refuse(fmt::format("{} is '{}', but must be a whole number from {} on", word, value, least));
    }
    return result;
  }

  [[nodiscard]] double number(std::string_view word, std::string_view value) const {
    double result = 0;
    const auto [end, problem] = std::from_chars(value.data(), value.data() + value.size(), result);
    if (problem != std::errc() || end != value.data() + value.size() || !std::isfinite(result) || result <= 0) {
      refuse(fmt::format("{} is '{}', but must be a number above 0", word, value));
    }
    return result;
  }

  template <class Value, std::size_t n>
  [[nodiscard]] Value choice(std::string_view word, std::string_view value, const std::array<Value, n>& values) const {
    for (const Value one : values) {
      if (name(one) == value) return one;
    }
    refuse_word(word, value, names_of(values));
  }

  std::string_view text_;
  const KindEntry* entry_ = nullptr;
  Fault fault_;
  unsigned seen_ = 0;
};

}  // namespace

std::string_view name(FaultKind kind) { return entry_of(kind).name; }

std::span<const FaultKind> all_fault_kinds() {
  static constexpr auto kAll = [] {
    std::array<FaultKind, kKinds.size()> kinds{};
    std::transform(kKinds.begin(), kKinds.end(), kinds.begin(), [](const KindEntry& entry) { return entry.kind; });
    return kinds;
  }();
  return kAll;
}

std::string_view name(FaultTarget target) {
  switch (target) {
    case FaultTarget::weights: return "weights";
    case FaultTarget::moments: return "moments";
    case FaultTarget::activations: return "activations";
    case FaultTarget::gradients: return "gradients";
  }
  return "?";
}

std::string_view name(FaultMoment moment) {
  switch (moment) {
    case FaultMoment::step: return "step";
    case FaultMoment::save: return "save";
    case FaultMoment::restore: return "restore";
  }
  return "?";
}

Fault parse_fault(std::string_view text) { return Reader(text).read(); }

std::vector<Fault> parse_faults(std::span<const std::string> texts) {
  std::vector<Fault> faults;
  for (const std::string& text : texts) {
    Fault fault = parse_fault(text);
    fault.id = faults.size();
    faults.push_back(fault);
  }
  return faults;
}

std::string to_string(const Fault& fault) {
  const unsigned keys = entry_of(fault.kind).keys;
  const Fault usual;
  std::vector<std::string> parts;
  if ((keys & kStep) != 0) parts.push_back(fmt::format("step={}", fault.step));
  if ((keys & kBatch) != 0) parts.push_back(fmt::format("batch={}", fault.batch));
  if ((keys & kRank) != 0 && fault.rank != usual.rank) parts.push_back(fmt::format("rank={}", fault.rank));
  if ((keys & kDuring) != 0 && fault.moment != usual.moment) parts.push_back(fmt::format("during={}", name(fault.moment)));
  if ((keys & kTarget) != 0 && fault.target != usual.target) parts.push_back(fmt::format("target={}", name(fault.target)));
  if ((keys & kMilliseconds) != 0 && fault.milliseconds != usual.milliseconds)
    parts.push_back(fmt::format("ms={}", fault.milliseconds));
  if ((keys & kFactor) != 0 && fault.factor != usual.factor) parts.push_back(fmt::format("factor={}", fault.factor));
  if ((keys & kCount) != 0 && fault.count != usual.count) parts.push_back(fmt::format("count={}", fault.count));
  return fmt::format("{}@{}", name(fault.kind), fmt::join(parts, ","));
}

std::vector<std::string> describe_fault_kinds() {
  std::vector<std::string> lines;
  for (const KindEntry& entry : kKinds) {
    lines.push_back(
        fmt::format("{:<11} {:<24} {}", entry.name, fmt::format("{}", fmt::join(names_of(entry.keys), ", ")), entry.meaning));
  }
  return lines;
}

}  // namespace tandem
