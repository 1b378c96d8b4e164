// SPDX-License-Identifier: Apache-2.0
#include "core/text_data.h"

#include <array>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

constexpr std::array kRules = {DocumentRule::file, DocumentRule::paragraph, DocumentRule::line};

}  // namespace

Tokenizer find_tokenizer(std::string_view name) {
  if (name == "bytes") return {"bytes", 256, kEndOfDocument};
  throw InputError(fmt::format("tokenizer '{}' does not exist; there is: bytes", name));
}

std::vector<std::int32_t> encode_bytes(std::string_view text) {
  std::vector<std::int32_t> tokens;
  tokens.reserve(text.size());
  for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  return tokens;
}

std::string decode_bytes(std::span<const std::int32_t> tokens) {
  std::string text;
  text.reserve(tokens.size());
  for (const std::int32_t token : tokens) {
    if (token != kEndOfDocument) text.push_back(static_cast<char>(token));
  }
  return text;
}

std::string_view name(DocumentRule rule) {
  switch (rule) {
    case DocumentRule::file: return "file";
    case DocumentRule::paragraph: return "paragraph";
    case DocumentRule::line: return "line";
  }
  return "";
}

DocumentRule parse_document_rule(std::string_view text) {
  for (const DocumentRule rule : kRules) {
    if (name(rule) == text) return rule;
  }
  throw InputError(fmt::format("document rule '{}' does not exist; there are: file, paragraph, line", text));
}

std::string_view name(Batching batching) {
  switch (batching) {
    case Batching::stream: return "stream";
    case Batching::padded: return "padded";
    case Batching::bucketed: return "bucketed";
    case Batching::packed: return "packed";
  }
  return "";
}

void validate(const TextDataOptions& options) {
  if (options.sequence < 1) throw InputError(fmt::format("sequence is {}, it must be at least 1", options.sequence));
  if (!(options.validation_fraction >= 0 && options.validation_fraction < 1)) {
    throw InputError(fmt::format("validation_fraction is {}, it must be at least 0 and below 1", options.validation_fraction));
  }
  if (options.bucket_batches < 1)
    throw InputError(fmt::format("bucket_batches is {}, it must be at least 1", options.bucket_batches));
  const bool pads = options.batching == Batching::padded || options.batching == Batching::bucketed;
  if (options.pad_multiple < 1 || (pads && options.sequence % options.pad_multiple != 0)) {
    throw InputError(fmt::format("pad_multiple is {}; it must divide the sequence of {}, which is the longest that a row can be",
                                 options.pad_multiple, options.sequence));
  }
}

}  // namespace tandem
