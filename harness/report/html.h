// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "harness/report/report.h"

namespace tandem {

/// A page under construction. What it is given as text is text; nothing in it can become markup.
class HtmlPage {
 public:
  /// Heading of a part, with an entry in the list of contents.
  void begin_part(const std::string& title);
  void paragraph(const std::string& text, const std::string& style_class = "");
  /// Rows under the first one; wide ones scroll in a box of their own. Cells of the words in docs/measuring.md ("pass", "fail",
  /// ...) and cells that begin with a number are set accordingly.
  void table(const std::vector<std::vector<std::string>>& rows, const std::string& style_class = "");
  void begin_details(const std::string& summary, bool is_open);
  void end_details();
  /// Charts side by side where there is room.
  void charts(const std::vector<Chart>& charts);
  void section(const ReportSection& section);
  /// The whole text.
  [[nodiscard]] std::string finish(const std::string& title) &&;

 private:
  std::string body_, contents_;
  int parts_ = 0;
};

}  // namespace tandem
