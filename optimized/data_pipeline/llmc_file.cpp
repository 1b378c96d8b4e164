// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/llmc_file.h"

#include <array>
#include <cstring>
#include <fstream>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem {
namespace {

constexpr std::int32_t kMagic = 20240520;
constexpr std::int32_t kVersion = 1;
constexpr std::size_t kHeaderBytes = 256 * sizeof(std::int32_t);
constexpr std::size_t kTokenBytes = 2;

}  // namespace

bool LlmcTokens::is_one(const std::filesystem::path& file) {
  std::error_code unreadable;
  if (!std::filesystem::is_regular_file(file, unreadable)) return false;
  std::int32_t magic = 0;
  std::ifstream(file, std::ios::binary).read(reinterpret_cast<char*>(&magic), sizeof(magic));
  return magic == kMagic;
}

LlmcTokens::LlmcTokens(const std::filesystem::path& file) : file_(file) {
  const std::span<const std::byte> bytes = file_.bytes();
  std::array<std::int32_t, 3> header{};
  const auto refuse = [&](const std::string& what) {
    throw InputError(fmt::format("{} is not a whole token file of llm.c: {}", file.string(), what));
  };
  if (bytes.size() < kHeaderBytes) refuse(fmt::format("{} bytes, the header alone takes {}", bytes.size(), kHeaderBytes));
  std::memcpy(header.data(), bytes.data(), sizeof(header));
  if (header[0] != kMagic) refuse(fmt::format("it begins with {}, not with {}", header[0], kMagic));
  if (header[1] != kVersion) refuse(fmt::format("version {}, this program reads {} (GPT-2 tokens)", header[1], kVersion));
  const std::size_t has = bytes.size() - kHeaderBytes;
  if (header[2] < 0 || has != static_cast<std::size_t>(header[2]) * kTokenBytes) {
    refuse(fmt::format("its header says {} tokens, and {} bytes of tokens follow it", header[2], has));
  }
  num_tokens_ = header[2];
  find_documents();
}

std::span<const std::byte> LlmcTokens::stored() const noexcept { return file_.bytes().subspan(kHeaderBytes); }

void LlmcTokens::find_documents() {
  if (num_tokens_ > 0) document_begins_.push_back(0);
  const std::byte* from = stored().data();
  for (std::int64_t i = 0; i < num_tokens_; ++i) {
    std::uint16_t token = 0;
    std::memcpy(&token, from + i * static_cast<std::int64_t>(kTokenBytes), kTokenBytes);
    if (token < kEndOfText) continue;
    if (token >= kVocabulary) {
      throw InputError(fmt::format("{} has token {} at {}, the vocabulary is {}", file_.path().string(), token, i, kVocabulary));
    }
    if (i > 0) document_begins_.push_back(i);
  }
  document_begins_.push_back(num_tokens_);
}

std::int64_t LlmcTokens::document_begin(std::int64_t index) const {
  TANDEM_CHECK(index >= 0 && index <= num_documents(), fmt::format("document {} of {}", index, num_documents()));
  return document_begins_[static_cast<std::size_t>(index)];
}

void LlmcTokens::read(std::int64_t first, std::span<std::int32_t> out) const {
  const auto count = static_cast<std::int64_t>(out.size());
  TANDEM_CHECK(first >= 0 && first <= num_tokens_ - count,
               fmt::format("tokens [{}, {}) of {}", first, first + count, num_tokens_));
  decode_tokens(DType::u16, stored().subspan(static_cast<std::size_t>(first) * kTokenBytes, out.size() * kTokenBytes), first,
                file_.path().string(), out);
}

std::string LlmcTokens::describe() const { return fmt::format("{} (tokenizer {}, llm.c)", file_.path().string(), kTokenizer); }

std::string LlmcTokens::identity() const { return fmt::format("tokens by {}, {}", kTokenizer, to_hex(hash128(stored()))); }

}  // namespace tandem
