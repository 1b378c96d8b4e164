// SPDX-License-Identifier: Apache-2.0
#include "harness/chrome_trace.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string_view>

#include <fmt/format.h>

#include "core/io/atomic_file.h"

namespace tandem {
namespace {

constexpr int kProcessesPerGroup = 1000;

// Runs leave hundreds of thousands of spans: text is appended to one buffer, without a tree of JSON values in between.
class Writer {
 public:
  void metadata(std::string_view what, int process, int thread, std::string_view name) {
    separate();
    fmt::format_to(std::back_inserter(text_), R"({{"ph":"M","name":"{}","pid":{},"tid":{},"args":{{"name":"{}"}}}})", what,
                   process, thread, escaped(name));
  }

  void event(const Span& span, int process, std::int64_t origin_ns) {
    separate();
    const std::int64_t begin = span.begin_ns - origin_ns;
    const std::int64_t duration = std::max<std::int64_t>(0, span.end_ns - span.begin_ns);
    fmt::format_to(std::back_inserter(text_),
                   R"({{"ph":"X","name":"{}","cat":"{}","pid":{},"tid":{},"ts":{}.{:03},"dur":{}.{:03},"args":{{"step":{})",
                   escaped(span.name), name(span.activity), process, static_cast<int>(span.lane), begin / 1000, begin % 1000,
                   duration / 1000, duration % 1000, span.step);
    if (span.bytes > 0) {
      fmt::format_to(std::back_inserter(text_), R"(,"bytes":{},"purpose":"{}")", span.bytes, name(span.purpose));
    }
    text_ += "}}";
  }

  [[nodiscard]] std::string finish() && { return "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n" + text_ + "\n]}\n"; }

 private:
  void separate() {
    if (!text_.empty()) text_ += ",\n";
  }

  static std::string escaped(std::string_view name) {
    std::string out;
    for (const char c : name) {
      if (c == '"' || c == '\\') out += '\\';
      out += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
    }
    return out;
  }

  std::string text_;
};

std::int64_t earliest(const TraceGroup& group) {
  std::int64_t first = std::numeric_limits<std::int64_t>::max();
  for (const auto& spans : group.spans_by_rank) {
    for (const Span& span : spans) first = std::min(first, span.begin_ns);
  }
  return first;
}

}  // namespace

std::string to_chrome_trace(const std::vector<TraceGroup>& groups) {
  Writer writer;
  for (std::size_t index = 0; index < groups.size(); ++index) {
    const TraceGroup& group = groups[index];
    const std::int64_t origin_ns = earliest(group);
    for (std::size_t rank = 0; rank < group.spans_by_rank.size(); ++rank) {
      const int process = static_cast<int>(index) * kProcessesPerGroup + static_cast<int>(rank);
      writer.metadata("process_name", process, 0,
                      group.name.empty() ? fmt::format("rank {}", rank) : fmt::format("{} rank {}", group.name, rank));
      writer.metadata("thread_name", process, static_cast<int>(Lane::compute), "compute");
      writer.metadata("thread_name", process, static_cast<int>(Lane::communication), "communication");
      for (const Span& span : group.spans_by_rank[rank]) writer.event(span, process, origin_ns);
    }
  }
  return std::move(writer).finish();
}

void write_chrome_trace(const std::filesystem::path& path, const std::vector<TraceGroup>& groups) {
  write_file_atomically(path, to_chrome_trace(groups));
}

void write_chrome_trace(const std::filesystem::path& path, const std::vector<std::vector<Span>>& spans_by_rank) {
  write_chrome_trace(path, std::vector<TraceGroup>{{"", spans_by_rank}});
}

}  // namespace tandem
