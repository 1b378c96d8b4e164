// SPDX-License-Identifier: Apache-2.0
#include "optimized/data_pipeline/documents.h"

#include <algorithm>

#include <fmt/format.h>

#include "core/error.h"
#include "core/io/mapped_file.h"
#include "core/text.h"

namespace tandem {

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
    const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
    if (text.empty()) throw InputError(fmt::format("{} is empty", path.string()));
    require_text(text, path.string());
    bool any = false;
    for_each_document(text, rule, [&](std::string_view document) {
      any = true;
      visit(document);
    });
    if (!any) throw InputError(fmt::format("{} has no document: all its lines are empty", path.string()));
  }
}

}  // namespace tandem
