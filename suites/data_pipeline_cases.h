// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "harness/case.h"
#include "optimized/data_pipeline/token_store.h"
#include "suites/properties.h"

namespace tandem {

/// Parts of the suite; docs/techniques/data_pipeline.md.
void add_data_pipeline_ledger_cases(CaseList& cases);  ///< what is seen when: resume, buckets, places beyond 32 bits
void add_data_pipeline_row_cases(CaseList& cases);     ///< what a row means to a model: padding, packing, targets
void add_data_pipeline_layout_cases(CaseList& cases);  ///< the engine on batches whose length changes, under layouts
void add_data_pipeline_stored_cases(CaseList& cases);  ///< where tokens are kept: files, subwords, stores
void add_data_pipeline_time_cases(CaseList& cases);    ///< what prefetching hides

inline constexpr std::array kBatchings = {Batching::stream, Batching::padded, Batching::bucketed, Batching::packed};

/// "data_pipeline/NAME", judged by its properties.
[[nodiscard]] Case data_pipeline_case(const std::string& name, const std::string& summary);
[[nodiscard]] CaseEvidence of_properties(std::vector<Property> properties);

/// A data set that exists as formulas only, of any size.
struct FormulaTokens final : TokenStore {
  std::int64_t documents = 0;
  std::int64_t symbols = 0;
  std::function<std::int64_t(std::int64_t index)> begin;  ///< of a document; of the last one's end too
  std::function<std::int32_t(std::int64_t place)> token_at;

  [[nodiscard]] std::int64_t num_tokens() const noexcept override { return begin(documents); }
  [[nodiscard]] std::int64_t num_documents() const noexcept override { return documents; }
  [[nodiscard]] std::int64_t document_begin(std::int64_t index) const override { return begin(index); }
  void read(std::int64_t first, std::span<std::int32_t> out) const override {
    for (std::int32_t& token : out) token = token_at(first++);
  }
  [[nodiscard]] std::int64_t vocabulary() const noexcept override { return symbols; }
  [[nodiscard]] std::string describe() const override { return "formula"; }
};

/// Documents of these numbers of tokens. Token i is i, so that an id and its target say which pair of the data they are; with
/// `symbols` > 0 it is a hash of i below that.
[[nodiscard]] std::shared_ptr<FormulaTokens> documents_of(const std::vector<std::int64_t>& lengths, std::int64_t symbols = 0);

/// `count` lengths from 2 to `longest`, mostly short: 2 + (longest - 2) u^3.
[[nodiscard]] std::vector<std::int64_t> skewed_lengths(std::int64_t count, std::int64_t longest, std::uint64_t seed);

[[nodiscard]] bool same_batch(const Batch& a, const Batch& b);
/// Tokens of the batch that are padding or otherwise without a target.
[[nodiscard]] double padding_share(const std::vector<Batch>& batches);

}  // namespace tandem
