// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "harness/report/report.h"

namespace tandem {

/// Why this chart cannot be drawn: lengths of its series, an id that is no file name. Empty where it can.
[[nodiscard]] std::string problem_of(const Chart& chart);

/// page: SVG for the page, which has the title elsewhere and the colours of its surroundings. The others stand alone.
enum class ChartFormat : std::uint8_t { page, svg, png, pdf };

/// What gnuplot reads. Text of the chart stands in single quotes only, where gnuplot replaces nothing.
[[nodiscard]] std::string gnuplot_script(const Chart& chart, ChartFormat format);

/// Runs gnuplot on a script and returns what it writes. Throws InputError where there is no gnuplot, or none that knows the
/// format, and IoError where it fails otherwise.
[[nodiscard]] std::string run_gnuplot(const std::string& script, ChartFormat format);

}  // namespace tandem
