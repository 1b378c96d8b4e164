// SPDX-License-Identifier: Apache-2.0
#include "harness/attribution.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace tandem {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr std::uint64_t kSeed = 20240301;
constexpr std::array kCauses = {Cause::compute, Cause::link, Cause::overlap, Cause::storage, Cause::unexplained};

// Seconds of the parts of one step.
struct Parts {
  double compute = 0, busy = 0, exposed = 0, stored = 0, idle = 0;
  [[nodiscard]] double hidden() const { return busy - exposed; }
};

Parts parts_of(const Measurements& measured, double step_seconds) {
  return {measured.compute_share * step_seconds, measured.busy_share * step_seconds, measured.exposed_share * step_seconds,
          (measured.data_share + measured.checkpoint_share) * step_seconds, measured.idle_share * step_seconds};
}

// A case that both machines ran.
struct Twin {
  const Measurements* a = nullptr;
  const Measurements* b = nullptr;
};

bool has_split(const CaseResult& result) {
  return result.verdict.status == Status::pass && result.measurements && !result.measurements->step_seconds.samples.empty() &&
         std::isfinite(result.measurements->compute_share) && std::isfinite(result.measurements->exposed_share);
}

std::vector<Twin> twins_of(const ResultFile& a, const ResultFile& b) {
  std::vector<Twin> twins;
  for (const CaseResult& of_a : a.cases) {
    const auto of_b = std::ranges::find_if(b.cases, [&](const CaseResult& other) { return same_work(of_a, other); });
    if (of_b == b.cases.end() || !has_split(of_a) || !has_split(*of_b)) continue;
    twins.push_back({&*of_a.measurements, &*of_b->measurements});
  }
  return twins;
}

double growth(double a, double b) { return a > 0 ? b / a : 1; }

// Seconds of B that A does not take, by cause.
std::array<double, kCauses.size()> gaps_of(const Parts& a, const Parts& b) {
  const double more_to_hide = growth(a.busy, b.busy);
  const double more_to_hide_behind = growth(a.compute, b.compute);
  const auto [least, most] = std::minmax({1.0, more_to_hide, more_to_hide_behind});
  const double as_well_hidden = std::clamp(b.hidden(), a.hidden() * least, a.hidden() * most);
  return {b.compute - a.compute, (b.busy - a.busy) - (as_well_hidden - a.hidden()), as_well_hidden - b.hidden(),
          b.stored - a.stored, b.idle - a.idle};
}

// Own time of each cause (overlap: exposed communication), and of the whole step.
using Times = std::array<double, kCauses.size() + 1>;

Times own_times(const Parts& parts) {
  return {parts.compute, parts.busy, parts.exposed,
          parts.stored,  parts.idle, parts.compute + parts.exposed + parts.stored + parts.idle};
}

// Over all cases; with a generator, of resampled steps.
Times sum_of(const std::vector<Twin>& twins, const Measurements* Twin::*side, CounterRng* rng) {
  Times sum{};
  for (const Twin& twin : twins) {
    const Measurements& measured = *(twin.*side);
    std::vector<double> samples = measured.step_seconds.samples;
    if (rng != nullptr) {
      for (double& value : samples) value = measured.step_seconds.samples[rng->next_below(samples.size())];
    }
    const Times times = own_times(parts_of(measured, median(std::move(samples))));
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += times[i];
  }
  return sum;
}

// B / A of each; intervals from resampling the steps of both sides, the shares of a step staying as they are.
std::array<Ratio, kCauses.size() + 1> ratios_of(const std::vector<Twin>& twins) {
  const auto ratio = [](double a, double b) { return a > 0 ? b / a : kNaN; };
  CounterRng rng(kSeed, "attribution");
  std::array<std::vector<double>, kCauses.size() + 1> drawn;
  for (int resample = 0; resample < kBootstrapResamples; ++resample) {
    const Times a = sum_of(twins, &Twin::a, &rng), b = sum_of(twins, &Twin::b, &rng);
    for (std::size_t i = 0; i < drawn.size(); ++i) drawn[i].push_back(ratio(a[i], b[i]));
  }
  const Times a = sum_of(twins, &Twin::a, nullptr), b = sum_of(twins, &Twin::b, nullptr);
  std::array<Ratio, kCauses.size() + 1> ratios;
  for (std::size_t i = 0; i < ratios.size(); ++i) {
    ratios[i].value = ratio(a[i], b[i]);
    if (!std::isfinite(ratios[i].value)) std::ranges::fill(drawn[i], kNaN);
    std::ranges::sort(drawn[i]);
    ratios[i].ci95 = {quantile(drawn[i], 0.025), quantile(drawn[i], 0.975)};
  }
  return ratios;
}

const char* noun(Cause cause) {
  switch (cause) {
    case Cause::compute: return "computing";
    case Cause::link: return "links";
    case Cause::overlap: return "less overlap";
    case Cause::storage: return "data and checkpoints";
    case Cause::unexplained: return "idle time that nothing explains";
  }
  return "?";
}

bool stands_out(const Attribution& result) { return result.ratio.ci95.low > 1 || result.ratio.ci95.high < 1; }

std::string sentence_of(const Attribution& result) {
  if (result.cases == 0) return "no case that passed in both files has the split of its time";
  const double ratio = result.ratio.value;
  const std::string size =
      fmt::format("{} step{} take{} {:.3f} x the time of A's (95 %: {:.3f} to {:.3f})",
                  result.cases == 1 ? "B's" : fmt::format("{} of B's", result.cases), result.cases == 1 ? "" : "s",
                  result.cases == 1 ? "s" : "", ratio, result.ratio.ci95.low, result.ratio.ci95.high);
  if (!stands_out(result)) return size + ": no gap that stands out from the noise";
  std::vector<std::string> words;
  for (const CauseShare& cause : result.causes) {
    if (std::abs(cause.share) < 0.05) continue;
    // A faster machine has less of what a slower one has more of.
    const std::string what = cause.cause == Cause::overlap && ratio < 1 ? "more overlap" : noun(cause.cause);
    std::string word = fmt::format("{:.0f} % {}{}", 100 * cause.share, words.empty() ? "of the gap is " : "", what);
    if (std::isfinite(cause.ratio.value)) word += fmt::format(" ({:.2f} x)", cause.ratio.value);
    words.push_back(std::move(word));
  }
  return fmt::format("{}; {}", size, fmt::join(words, ", "));
}

}  // namespace

std::string_view name(Cause cause) {
  switch (cause) {
    case Cause::compute: return "compute";
    case Cause::link: return "link";
    case Cause::overlap: return "overlap";
    case Cause::storage: return "storage";
    case Cause::unexplained: return "unexplained";
  }
  return "?";
}

bool same_work(const CaseResult& a, const CaseResult& b) {
  TrainingPlan as_in_b = a.plan;
  as_in_b.overlap = b.plan.overlap;
  as_in_b.threads_per_rank = b.plan.threads_per_rank;
  return a.name == b.name && a.model == b.model && as_in_b == b.plan;
}

Attribution attribute_gap(const ResultFile& a, const ResultFile& b) {
  Attribution result;
  const std::vector<Twin> twins = twins_of(a, b);
  result.cases = static_cast<int>(twins.size());
  if (!twins.empty()) {
    result.seconds_a = sum_of(twins, &Twin::a, nullptr).back();
    result.seconds_b = sum_of(twins, &Twin::b, nullptr).back();
    std::array<double, kCauses.size()> seconds{};
    for (const Twin& twin : twins) {
      const auto parts = [](const Measurements& measured) { return parts_of(measured, median(measured.step_seconds.samples)); };
      const auto gaps = gaps_of(parts(*twin.a), parts(*twin.b));
      for (std::size_t i = 0; i < seconds.size(); ++i) seconds[i] += gaps[i];
    }
    const auto ratios = ratios_of(twins);
    result.ratio = ratios.back();
    const double gap = std::accumulate(seconds.begin(), seconds.end(), 0.0);
    for (std::size_t i = 0; i < kCauses.size(); ++i) {
      result.causes.push_back({kCauses[i], seconds[i], gap != 0 ? seconds[i] / gap : 0, ratios[i]});
    }
    std::ranges::stable_sort(result.causes, std::ranges::greater(), &CauseShare::share);
    if (stands_out(result)) result.verdict = result.causes.front().cause;
  }
  result.sentence = sentence_of(result);
  return result;
}

}  // namespace tandem
