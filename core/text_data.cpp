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

void validate(const TextDataOptions& options) {
  if (options.sequence < 1) throw InputError(fmt::format("sequence is {}, it must be at least 1", options.sequence));
  if (!(options.validation_fraction >= 0 && options.validation_fraction < 1)) {
    throw InputError(fmt::format("validation_fraction is {}, it must be at least 0 and below 1", options.validation_fraction));
  }
}

}  // namespace tandem
