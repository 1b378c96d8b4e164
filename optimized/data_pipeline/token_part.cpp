// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/token_part.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

// Products of two document counts pass 2^63 from 2^32 documents on.
__extension__ using Wide = unsigned __int128;

std::int64_t floor_share(double fraction, std::int64_t total) {
  return static_cast<std::int64_t>(std::floor(fraction * static_cast<double>(total)));
}

}  // namespace

std::int64_t scaled_down(std::int64_t value, std::int64_t factor, std::int64_t divisor) noexcept {
  return divisor == 0
             ? 0
             : static_cast<std::int64_t>(static_cast<Wide>(value) * static_cast<Wide>(factor) / static_cast<Wide>(divisor));
}

DocumentSplit::DocumentSplit(std::int64_t documents, double validation_fraction)
    : documents_(documents), held_out_(floor_share(validation_fraction, documents)) {}

std::int64_t DocumentSplit::held_out_document(std::int64_t number) const noexcept {
  // The least d with floor((d + 1) k / D) = number + 1, that is (d + 1) k >= (number + 1) D.
  const auto wanted = static_cast<Wide>(number + 1) * static_cast<Wide>(documents_);
  const auto count = static_cast<Wide>(held_out_);
  return static_cast<std::int64_t>((wanted + count - 1) / count) - 1;
}

TokenPart::TokenPart(std::shared_ptr<const TokenStore> store, double validation_fraction, SplitPart part)
    : store_(std::move(store)), split_(store_->num_documents(), validation_fraction), part_(part) {
  const std::int64_t total = store_->num_tokens();
  std::int64_t held_out = 0;
  if (split_.held_out() > 0) {
    held_out_tokens_.reserve(static_cast<std::size_t>(split_.held_out()) + 1);
    held_out_tokens_.push_back(0);
    for (std::int64_t j = 0; j < split_.held_out(); ++j) {
      const std::int64_t document = split_.held_out_document(j);
      held_out += store_->document_begin(document + 1) - store_->document_begin(document);
      held_out_tokens_.push_back(held_out);
    }
  } else {
    held_out = floor_share(validation_fraction, total);
    if (part_ == SplitPart::validation) first_token_ = total - held_out;
  }
  num_tokens_ = part_ == SplitPart::validation ? held_out : total - held_out;
}

bool TokenPart::contains(std::int64_t document) const noexcept {
  return held_out_tokens_.empty() || split_.is_held_out(document) == (part_ == SplitPart::validation);
}

std::int64_t TokenPart::part_begin(std::int64_t document) const {
  const std::int64_t begin = store_->document_begin(document);
  if (held_out_tokens_.empty()) return begin - first_token_;
  const std::int64_t held_out = held_out_tokens_[static_cast<std::size_t>(split_.held_out_before(document))];
  return part_ == SplitPart::validation ? held_out : begin - held_out;
}

std::int64_t TokenPart::document_at(std::int64_t position) const {
  // The last document that begins at or before the position. Those after it begin later, so it is in the part and not empty.
  std::int64_t low = 0;
  std::int64_t high = store_->num_documents();
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (part_begin(middle) <= position ? low : high) = middle;
  }
  return low;
}

void TokenPart::read(std::int64_t first, std::span<std::int32_t> tokens, std::span<std::uint8_t> begins_document) const {
  const auto count = static_cast<std::int64_t>(tokens.size());
  const bool marks = !begins_document.empty();
  TANDEM_CHECK((!marks || tokens.size() == begins_document.size()) && first >= 0 && first <= num_tokens_ - count,
               fmt::format("tokens [{}, {}) of {}", first, first + count, num_tokens_));
  // Without held-out documents between them, the tokens of a part stand in a row.
  if (!marks && held_out_tokens_.empty()) return store_->read(first_token_ + first, tokens);
  std::fill(begins_document.begin(), begins_document.end(), std::uint8_t{0});
  std::int64_t done = 0;
  for (std::int64_t document = count > 0 ? document_at(first) : 0; done < count; ++document) {
    if (!contains(document)) continue;
    const std::int64_t begin = store_->document_begin(document);
    // Only the first document is entered in the middle: every later one from its first token.
    const std::int64_t skipped = done == 0 ? first - part_begin(document) : 0;
    const std::int64_t part = std::min(count - done, store_->document_begin(document + 1) - begin - skipped);
    if (skipped < 0 || part < 0)
      throw InputError(fmt::format("document {} of {} ends before it begins", document, store_->describe()));
    if (part == 0) continue;
    store_->read(begin + skipped, tokens.subspan(static_cast<std::size_t>(done), static_cast<std::size_t>(part)));
    if (marks && skipped == 0) begins_document[static_cast<std::size_t>(done)] = 1;
    done += part;
  }
}

PartDocuments::PartDocuments(const TokenPart& part, std::int64_t first, std::int64_t last)
    : part_(&part), document_(first), last_(last), held_out_document_(last) {
  const DocumentSplit& split = part.split_;
  if (split.held_out() == 0) return;
  held_out_ = split.held_out_before(first);
  if (held_out_ < split.held_out()) held_out_document_ = split.held_out_document(held_out_);
}

bool PartDocuments::next(Interval& tokens) {
  const DocumentSplit& split = part_->split_;
  const bool by_document = split.held_out() > 0;
  const bool wants_held_out = part_->part_ == SplitPart::validation;
  if (by_document && wants_held_out && document_ < held_out_document_) {
    document_ = std::min(held_out_document_, last_);
    begin_ = -1;
  }
  while (document_ < last_) {
    const bool held_out = by_document && document_ == held_out_document_;
    if (held_out) held_out_document_ = ++held_out_ < split.held_out() ? split.held_out_document(held_out_) : last_;
    if (begin_ < 0) begin_ = part_->store_->document_begin(document_);
    tokens = {begin_, part_->store_->document_begin(++document_)};
    begin_ = tokens.end;
    if (by_document && held_out != wants_held_out) continue;
    if (!by_document) {
      const std::int64_t first = part_->first_token_;
      tokens = {std::clamp(tokens.begin, first, first + part_->num_tokens_),
                std::clamp(tokens.end, first, first + part_->num_tokens_)};
    }
    return true;
  }
  return false;
}

}  // namespace tandem
