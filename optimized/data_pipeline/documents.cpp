// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/documents.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "core/error.h"
#include "core/io/mapped_file.h"
#include "core/text.h"

namespace tandem {
namespace {

std::string_view text_of(const MappedFile& file) {
  if (file.bytes().empty()) throw InputError(fmt::format("{} is empty", file.path().string()));
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

[[noreturn]] void refuse_without_document(const std::filesystem::path& path) {
  throw InputError(fmt::format("{} has no document: all its lines are empty", path.string()));
}

}  // namespace

void for_each_document(std::string_view text, DocumentRule rule, const std::function<void(std::string_view)>& visit) {
  if (rule == DocumentRule::file) return visit(text);
  constexpr std::size_t kOutside = std::string_view::npos;
  std::size_t paragraph_begin = kOutside;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t newline = text.find('\n', begin);
    const std::size_t line_end = std::min(newline, text.size());  // without the '\n'
    const std::string_view line = text.substr(begin, line_end - begin);
    if (line.empty() || line == "\r") {
      if (paragraph_begin != kOutside) visit(text.substr(paragraph_begin, begin - paragraph_begin));
      paragraph_begin = kOutside;
    } else if (rule == DocumentRule::line) {
      visit(line);
    } else if (paragraph_begin == kOutside) {
      paragraph_begin = begin;
    }
    begin = line_end + 1;
  }
  if (paragraph_begin != kOutside) visit(text.substr(paragraph_begin));
}

void for_each_document(const std::vector<std::filesystem::path>& files, DocumentRule rule,
                       const std::function<void(std::string_view)>& visit) {
  if (files.empty()) throw InputError("no text file is named");
  for (const std::filesystem::path& path : files) {
    const MappedFile file(path);
    const std::string_view text = text_of(file);
    require_text(text, path.string());
    bool any = false;
    for_each_document(text, rule, [&](std::string_view document) {
      any = true;
      visit(document);
    });
    if (!any) refuse_without_document(path);
  }
}

void for_each_chunk(const std::vector<std::filesystem::path>& files, DocumentRule rule, std::size_t chunk_bytes,
                    const std::function<void(TextChunk)>& visit) {
  if (files.empty()) throw InputError("no text file is named");
  for (const std::filesystem::path& path : files) {
    const auto file = std::make_shared<const MappedFile>(path);
    const std::string_view text = text_of(*file);
    TextChunk chunk = {file, {}, 0};
    bool any = false;
    const auto add = [&](std::string_view piece, bool ends_document) {
      chunk.pieces.push_back({piece, ends_document});
      chunk.bytes += piece.size();
      any = true;
      if (chunk.bytes < chunk_bytes) return;
      visit(std::exchange(chunk, {file, {}, 0}));
    };
    for_each_document(text, rule, [&](std::string_view document) {
      while (document.size() > chunk_bytes) {
        const std::size_t size = piece_bytes(document, chunk_bytes);
        add(document.substr(0, size), false);
        document.remove_prefix(size);
      }
      add(document, true);
    });
    if (!any) refuse_without_document(path);
    if (!chunk.pieces.empty()) visit(std::move(chunk));
  }
}

std::size_t piece_bytes(std::string_view text, std::size_t limit) noexcept {
  if (text.size() <= limit) return text.size();
  for (std::size_t at = limit; at > 1; --at) {
    if (text[at] == ' ' || text[at - 1] == '\n') return at;
  }
  const auto continues = [&](std::size_t at) { return (static_cast<unsigned char>(text[at]) & 0xC0U) == 0x80U; };
  std::size_t at = limit;
  // A character has at most three bytes that continue it; more than that is no UTF-8, and found to be so wherever it is cut.
  while (at > 1 && limit - at < 3 && continues(at)) --at;
  return continues(at) ? limit : at;
}

}  // namespace tandem
