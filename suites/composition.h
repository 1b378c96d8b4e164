// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "core/config.h"
#include "core/synthetic_corpus.h"
#include "suites/pair.h"

namespace tandem {

/// One composition of options: a training configuration, and what else a plan is tried under (docs/compositions.md). Plain data;
/// with the same composition the same is computed.
struct Composition {
  RunConfig
      config;  ///< `steps` of its own optimizer; 0: the SGD step alone. What is of text, checkpoints and anomalies is unused
  RowShape row_shape = RowShape::skewed;
  std::int64_t row_tokens = 0;         ///< of a row; 0: as many as the model has positions
  std::int64_t second_row_tokens = 0;  ///< of the rows of the second step; 0: as the others
  std::string algorithm = "direct";    ///< of the collectives (core/world_settings.h)
  std::int64_t adversary = 0;          ///< seed of scripted delays and overtaking; 0: none
  std::int64_t overflow_step = -1;     ///< step in which one rank's gradients are not finite; -1: none
  std::int64_t overflow_rank = 0;
};

/// The least of everything: one rank, one block of two heads, five symbols; every option at its default. What a composition is
/// written against, and what minimise() strives for.
[[nodiscard]] Composition simplest_composition();

/// "key=value", of `train --set`, or of the members above. Throws InputError as set_option(RunConfig&, ...) does.
void set_option(Composition& composition, std::string_view assignment);

/// "--set tensor=2 --set heads=4": what differs from simplest_composition(), in the order of the configuration.
[[nodiscard]] std::string to_settings(const Composition& composition);

/// A configuration file with one more section, "composition". Keys that are missing are those of simplest_composition().
[[nodiscard]] std::string to_json(const Composition& composition);
/// Inverse of to_json(); a configuration of `tandem train` is read as well. Throws InputError naming file and field.
[[nodiscard]] Composition composition_from_json(const std::string& text, const std::string& source_name);
[[nodiscard]] Composition read_composition(const std::filesystem::path& file);

/// Most steps over which rounding is judged: later ones amplify it beyond any bound that says something.
inline constexpr std::int64_t kMostComposedSteps = 8;

/// Why the composition cannot run (InputError's text), of its model, its plan and its own members; nothing where it can.
[[nodiscard]] std::optional<std::string> refusal(const Composition& composition);

/// What both sides are given. The composition is legal.
[[nodiscard]] PairInputs inputs_of(const Composition& composition);
/// `context` with the composition's threads, algorithm and adversary.
[[nodiscard]] RunContext context_of(const Composition& composition, const RunContext& context);

/// Why nothing can be concluded from a legal composition: parts of the batch that are equal or empty, so that a missing reduction
/// would not show, a batch without targets, or a choice of an expert so near a tie that rounding may decide it. Runs the
/// reference where there are experts.
[[nodiscard]] std::optional<std::string> undecidable(const Composition& composition);

}  // namespace tandem
