// SPDX-License-Identifier: Apache-2.0
#include "suites/report_sections.h"

#include <charconv>
#include <limits>
#include <optional>
#include <string_view>

#include <fmt/format.h>

#include "core/model_config.h"
#include "suites/compression_cases.h"
#include "suites/overlap_cases.h"

namespace tandem {
namespace {

// "PREFIXnumberSUFFIX"
std::optional<double> number_within(std::string_view text, std::string_view prefix, std::string_view suffix) {
  if (!text.starts_with(prefix) || !text.ends_with(suffix)) return {};
  text.remove_prefix(prefix.size());
  text.remove_suffix(std::min(suffix.size(), text.size()));
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return {};
  return value;
}

// Mean bytes of a bucket: at the ends of the curve they follow from the model's gradients.
std::optional<double> bucket_bytes(std::string_view buckets, const GptConfig& model) {
  double bytes = 0;
  const std::vector<ParameterSpec> parameters = gpt_parameters(model);
  for (const ParameterSpec& parameter : parameters) bytes += 4 * static_cast<double>(num_elements(parameter.shape));
  if (buckets == "one bucket") return bytes;
  if (buckets == "a bucket for every tensor") return bytes / static_cast<double>(parameters.size());
  return number_within(buckets, "", " bytes");
}

std::optional<Chart> bucket_chart(const CaseResult& result) {
  constexpr std::string_view kName = "step_seconds_over_predicted, ";
  ChartSeries measured{.name = "measured"};
  ChartSeries predicted{.name = "predicted by the step program"};
  for (const Property& property : result.verdict.properties) {
    if (!property.name.starts_with(kName)) continue;
    const std::string buckets = property.name.substr(kName.size());
    const std::optional<double> bytes = bucket_bytes(buckets, result.model);
    if (!bytes || property.limit <= kOverlapFactor) continue;
    // The limit is kOverlapFactor + kOverlapSlackSeconds / predicted.
    const double seconds = kOverlapSlackSeconds / (property.limit - kOverlapFactor);
    measured.x.push_back(*bytes);
    measured.y.push_back(1e3 * seconds * property.value);
    predicted.x.push_back(*bytes);
    predicted.y.push_back(1e3 * seconds);
    predicted.labels.push_back(buckets.ends_with("bytes") ? "" : buckets);
  }
  if (measured.y.size() < 2) return {};
  return Chart{.id = "bucket_size",
               .title = "Step time over bucket size",
               .caption = result.name + ": small buckets pay a latency each, one large bucket hides nothing.",
               .x_label = "bytes of a bucket, mean",
               .y_label = "ms of a step",
               .log_x = true,
               .series = {std::move(measured), std::move(predicted)}};
}

std::optional<ChartSeries> codec_series(const CaseResult& result) {
  if (result.name.find("/pays/") == std::string::npos) return {};
  ChartSeries series{.name = result.name.substr(result.suite.size() + 1)};
  series.name.resize(series.name.find('/'));
  for (const Property& property : result.verdict.properties) {
    const std::optional<double> megabytes = number_within(property.name, "seconds_of_sum_saved at ", " MB/s");
    if (!megabytes) continue;
    const double share = property.value / (kTimedSumBytes / (*megabytes * 1e6));
    series.x.push_back(*megabytes * 1e6);
    series.y.push_back(share >= -1 ? share : std::numeric_limits<double>::quiet_NaN());
  }
  if (series.y.empty()) return {};
  return series;
}

}  // namespace

std::vector<ReportSection> sweep_sections(const ResultFile& file) {
  ReportSection section{.title = "Sweeps", .text = "One quantity varied within a case, everything else kept."};
  Chart codecs{.id = "compression_bandwidth",
               .title = "What compression saves, over bandwidth",
               .caption =
                   "Seconds that a sum of 16.8 MB takes less with the code, over the seconds that its bytes are on the link. "
                   "Below 0 the code costs more than it saves; below -1 nothing is drawn.",
               .x_label = "bytes a second of the link",
               .y_label = "share of the link's time saved",
               .log_x = true};
  for (const CaseResult& result : file.cases) {
    if (result.verdict.status != Status::pass) continue;
    if (result.name.starts_with("overlap/bucket-size/")) {
      if (const auto chart = bucket_chart(result)) section.charts.push_back(*chart);
    }
    if (result.suite == "compression") {
      if (const auto series = codec_series(result)) codecs.series.push_back(*series);
    }
  }
  if (!codecs.series.empty()) section.charts.push_back(std::move(codecs));
  if (section.charts.empty()) return {};
  return {std::move(section)};
}

}  // namespace tandem
