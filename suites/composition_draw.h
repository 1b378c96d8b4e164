// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "suites/composition.h"

namespace tandem {

/// One thing that a composition decides, and the values that are drawn. The first value is the simplest.
struct ComposedOption {
  std::string name;
  std::vector<std::string> values;  ///< each one or several settings, "schedule=interleaved chunks=2"
  int weight_of_first = 1;          ///< of the others: 1 each
};

/// Every option of a plan, of the model's shape, of the optimizer and of the rows. Settings that begin with `@` are sizes in
/// units of what must divide them: `@heads` a tensor rank, `@head_size`, `@mlp` columns a tensor rank, `@experts` an expert
/// rank, `@layers` beyond one a stage.
[[nodiscard]] const std::vector<ComposedOption>& composed_options();

/// [options] index of each one's value; kIdle: the first, without effect in this composition (a codec's block where there is no
/// codec).
using Levels = std::vector<int>;
inline constexpr int kIdle = -1;

/// What the values of all options make together: legal or not.
[[nodiscard]] Composition compose(const Levels& levels);

/// A legal composition, and the values that it was made from.
struct DrawnComposition {
  std::uint64_t seed = 0;
  std::int64_t number = 0;
  Levels levels;
  Composition composition;
};

/// What became of all draws.
struct DrawCounts {
  std::int64_t drawn = 0;
  std::int64_t repaired = 0;     ///< legal after options at fault were drawn again
  std::int64_t refused = 0;      ///< still illegal then; by conflicts(), or of too many ranks
  std::int64_t undecidable = 0;  ///< legal, but nothing could be concluded (undecidable())
};

/// Composition `number` of a seed: the same whatever was drawn before it. Values are drawn independently of each other; where
/// conflicts() objects, the options that it names are drawn again a few times, then everything. At most kMostComposedRanks ranks.
/// Decidable::yes looks at undecidable() as well, which takes milliseconds instead of microseconds.
enum class Decidable : std::uint8_t { no, yes };
[[nodiscard]] DrawnComposition draw_composition(std::uint64_t seed, std::int64_t number, DrawCounts& counts,
                                                Decidable decidable = Decidable::yes);
inline constexpr int kMostComposedRanks = 8;

/// Which values, and which pairs of values of different options, some legal compositions have.
class CompositionCoverage {
 public:
  CompositionCoverage();
  void add(const Levels& levels);

  [[nodiscard]] std::int64_t values() const;
  [[nodiscard]] std::int64_t pairs() const;
  /// Of those that `all` has.
  [[nodiscard]] std::int64_t pairs_in_common(const CompositionCoverage& all) const;
  /// "zero=3", "zero=3 + tensor=2": what `all` has and this has not. At most `most`.
  [[nodiscard]] std::vector<std::string> missing(const CompositionCoverage& all, std::size_t most) const;

 private:
  [[nodiscard]] std::string name_of(std::size_t index) const;
  std::vector<std::size_t> first_;  // [options] index of the option's first value among all values
  std::size_t num_values_ = 0;
  std::vector<bool> values_;
  std::vector<bool> pairs_;  // [values * values], first < second
};

/// Coverage of so many legal draws that what they do not have is as good as impossible. Nothing is run.
[[nodiscard]] CompositionCoverage reachable_pairs(std::int64_t draws);

}  // namespace tandem
