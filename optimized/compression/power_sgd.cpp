// SPDX-License-Identifier: Apache-2.0
#include "optimized/compression/power_sgd.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include <fmt/format.h>

#include "core/error.h"
#include "core/rng.h"
#include "optimized/compression/corrected_stream.h"

namespace tandem {
namespace {

constexpr double kDependent = 1e-5;
constexpr std::int64_t kLanes = 16;
// Vectors of a factor that one pass over a row takes along: so many sums fit into registers.
constexpr int kVectors = 4;
// Rows that one pass over the right factor takes along.
constexpr std::int64_t kRows = 4;
// Columns of kRows rows and kVectors vectors fit into the first-level cache.
constexpr std::int64_t kTile = 1024;

using Lanes [[gnu::vector_size(kLanes * sizeof(float)), gnu::aligned(4), gnu::may_alias]] = float;

[[gnu::always_inline]] inline const Lanes& lanes_at(const float* from) { return *reinterpret_cast<const Lanes*>(from); }

// out[j * stride] = x . vectors[j] for j < kCount
template <int kCount>
[[gnu::always_inline]] inline void dots(const float* x, const float* vectors, std::int64_t length, float* out,
                                        std::int64_t stride) {
  Lanes sums[kCount] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= length; i += kLanes) {
    const Lanes part = lanes_at(x + i);
#pragma GCC unroll 4
    for (int j = 0; j < kCount; ++j) sums[j] += part * lanes_at(vectors + j * length + i);
  }
  for (int j = 0; j < kCount; ++j) {
    double sum = 0.0;
    for (std::int64_t lane = 0; lane < kLanes; ++lane) sum += static_cast<double>(sums[j][lane]);
    for (std::int64_t k = i; k < length; ++k) sum += static_cast<double>(x[k]) * static_cast<double>(vectors[j * length + k]);
    out[j * stride] = static_cast<float>(sum);
  }
}

// c = gradient + residual where it is kept. The largest magnitude, as bits.
template <bool kAdd, bool kKeep>
[[gnu::always_inline]] inline std::int32_t form_row(const float* gradient, const float* residual, float* c, std::int64_t count) {
  std::int32_t largest = 0;
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = detail::corrected<kAdd>(gradient, residual, i);
    if constexpr (kKeep) c[i] = value;
    largest = std::max(largest, detail::magnitude_bits(value));
  }
  return largest;
}

bool all_finite(std::span<const float> values) {
  return std::ranges::all_of(values, [](float value) { return std::isfinite(value); });
}

// to[k] += sum over n < kCount of factors[n * factor_stride] from[n * from_stride + k]
template <int kCount>
[[gnu::always_inline]] inline void add_scaled(const float* factors, std::int64_t factor_stride, const float* from,
                                              std::int64_t from_stride, std::int64_t count, float* to) {
  float factor[kCount];
  for (int n = 0; n < kCount; ++n) factor[n] = factors[n * factor_stride];
#pragma GCC ivdep
  for (std::int64_t k = 0; k < count; ++k) {
    float sum = to[k];
#pragma GCC unroll 4
    for (int n = 0; n < kCount; ++n) sum += factor[n] * from[n * from_stride + k];
    to[k] = sum;
  }
}

// The same for any number of terms.
[[gnu::always_inline]] inline void add_all_scaled(std::int64_t terms, const float* factors, std::int64_t factor_stride,
                                                  const float* from, std::int64_t from_stride, std::int64_t count, float* to) {
  std::int64_t n = 0;
  for (; n + 4 <= terms; n += 4) {
    add_scaled<4>(factors + n * factor_stride, factor_stride, from + n * from_stride, from_stride, count, to);
  }
  for (; n < terms; ++n) {
    add_scaled<1>(factors + n * factor_stride, factor_stride, from + n * from_stride, from_stride, count, to);
  }
}

// Row by row, tile by tile: store(first element of the tile, the tile of sum over j of p[j] q[j]^T, its length).
template <class Store>
void product_of_factors(const PowerSgdShape& shape, const float* p, const float* q, InstructionSet set, const Store& store) {
  run_with(
      set, [&]() __attribute__((always_inline)) {
        const std::int64_t rows = shape.rows, columns = shape.columns, rank = shape.rank;
        alignas(64) float tile[kTile];
        for (std::int64_t first = 0; first < columns; first += kTile) {
          const std::int64_t count = std::min(kTile, columns - first);
          for (std::int64_t row = 0; row < rows; ++row) {
            std::fill_n(tile, count, 0.0F);
            add_all_scaled(rank, p + row, rows, q + first, columns, count, tile);
            store(row * columns + first, tile, count);
          }
        }
      });
}

void check(const PowerSgdShape& shape) {
  TANDEM_CHECK(shape.rows >= 0 && shape.columns >= 0 && shape.rank >= 1,
               fmt::format("rank {} of [{}, {}]", shape.rank, shape.rows, shape.columns));
}

template <class T>
void check_size(std::span<T> values, std::int64_t expected, std::string_view what) {
  TANDEM_CHECK(static_cast<std::int64_t>(values.size()) == expected,
               fmt::format("{} has {} elements, expected {}", what, values.size(), expected));
}

void check_factors(const PowerSgdShape& shape, std::span<const float> p, std::span<const float> q) {
  check(shape);
  check_size(p, shape.rank * shape.rows, "p");
  check_size(q, shape.rank * shape.columns, "q");
}

template <bool kAdd, bool kKeep>
bool project(const PowerSgdShape& shape, const CompressCall& call, const float* q, float* p, InstructionSet set) {
  std::int32_t largest = 0;
  run_with(
      set, [&]() __attribute__((always_inline)) {
        const std::int64_t rows = shape.rows, columns = shape.columns;
        detail::CorrectedStream<kAdd, kKeep> stream(call);
        for (std::int64_t row = 0; row < rows; ++row) {
          const std::int32_t of_row = form_row<kAdd, kKeep>(stream.gradient, stream.residual, stream.new_residual, columns);
          largest = std::max(largest, of_row);
          const float* const c = kKeep ? stream.new_residual : stream.gradient;
          int j = 0;
          for (; j + kVectors <= shape.rank; j += kVectors) dots<kVectors>(c, q + j * columns, columns, p + j * rows + row, rows);
          for (; j < shape.rank; ++j) dots<1>(c, q + j * columns, columns, p + j * rows + row, rows);
          stream.advance(columns);
        }
      });
  return static_cast<std::uint32_t>(largest) < detail::kInfinityBits;
}

}  // namespace

std::int64_t power_sgd_bytes(const PowerSgdShape& shape) { return (shape.rows + shape.columns) * shape.rank * 4; }

void power_sgd_start(const PowerSgdShape& shape, std::uint64_t seed, std::string_view name, std::span<float> q) {
  check_size(q, shape.rank * shape.columns, "q");
  const std::string key = fmt::format("power_sgd/{}", name);
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = static_cast<float>(parameter_normal(seed, key, i));
}

bool power_sgd_project(const PowerSgdShape& shape, std::span<const float> gradient, std::span<const float> residual,
                       std::span<const float> q, std::span<float> c, std::span<float> p, InstructionSet set) {
  check_factors(shape, p, q);
  check_size(gradient, shape.rows * shape.columns, "gradient");
  const CompressCall call = {.gradient = gradient, .residual = residual, .new_residual = c, .payload = {}};
  detail::check_sizes(call, 0);
  return detail::with_operands(
             call, [&]<bool kAdd, bool kKeep>() { return project<kAdd, kKeep>(shape, call, q.data(), p.data(), set); }) &&
         all_finite(p);
}

void power_sgd_orthogonalize(const PowerSgdShape& shape, std::span<float> p) {
  check_size(p, shape.rank * shape.rows, "p");
  const auto length = static_cast<std::size_t>(shape.rows);
  std::vector<double> rest(length);
  const auto norm = [&rest] {
    double sum = 0.0;
    for (const double value : rest) sum += value * value;
    return std::sqrt(sum);
  };
  for (std::size_t j = 0; j < static_cast<std::size_t>(shape.rank); ++j) {
    const std::span<float> vector = p.subspan(j * length, length);
    std::ranges::copy(vector, rest.begin());
    const double whole = norm();
    double left = whole;
    for (int round = 0; round < 2 && left > kDependent * whole; ++round) {
      for (std::size_t earlier = 0; earlier < j; ++earlier) {
        const float* const direction = p.data() + earlier * length;
        double along = 0.0;
        for (std::size_t i = 0; i < length; ++i) along += static_cast<double>(direction[i]) * rest[i];
        for (std::size_t i = 0; i < length; ++i) rest[i] -= along * static_cast<double>(direction[i]);
      }
      left = norm();
    }
    const bool dependent = !(left > kDependent * whole);
    for (std::size_t i = 0; i < length; ++i) vector[i] = dependent ? 0.0F : static_cast<float>(rest[i] / left);
  }
}

bool power_sgd_back_project(const PowerSgdShape& shape, std::span<const float> c, std::span<const float> p, std::span<float> own,
                            InstructionSet set) {
  check_factors(shape, p, own);
  check_size(c, shape.rows * shape.columns, "c");
  std::ranges::fill(own, 0.0F);
  run_with(
      set, [&]() __attribute__((always_inline)) {
        const std::int64_t rows = shape.rows, columns = shape.columns, rank = shape.rank;
        for (std::int64_t row = 0; row < rows; row += kRows) {
          const std::int64_t few = std::min(kRows, rows - row);
          for (std::int64_t first = 0; first < columns; first += kTile) {
            const std::int64_t count = std::min(kTile, columns - first);
            for (std::int64_t j = 0; j < rank; ++j) {
              add_all_scaled(few, p.data() + j * rows + row, 1, c.data() + row * columns + first, columns, count,
                             own.data() + j * columns + first);
            }
          }
        }
      });
  return all_finite(own);
}

void power_sgd_subtract(const PowerSgdShape& shape, std::span<const float> p, std::span<const float> own, std::span<float> c,
                        InstructionSet set) {
  check_factors(shape, p, own);
  check_size(c, shape.rows * shape.columns, "c");
  product_of_factors(
      shape, p.data(), own.data(),
      set, [&](std::int64_t first, const float* tile, std::int64_t count) __attribute__((always_inline)) {
        float* const to = c.data() + first;
#pragma GCC ivdep
        for (std::int64_t i = 0; i < count; ++i) to[i] -= tile[i];
      });
}

void power_sgd_decompress(const PowerSgdShape& shape, std::span<const float> p, std::span<const float> q, std::span<float> out,
                          InstructionSet set) {
  check_factors(shape, p, q);
  check_size(out, shape.rows * shape.columns, "out");
  product_of_factors(
      shape, p.data(), q.data(),
      set, [&](std::int64_t first, const float* tile, std::int64_t count) __attribute__((always_inline)) {
        std::copy_n(tile, count, out.data() + first);
      });
}

void power_sgd_next_start(const PowerSgdShape& shape, std::span<const float> q, std::span<float> start) {
  check_size(q, shape.rank * shape.columns, "q");
  check_size(start, shape.rank * shape.columns, "start");
  const auto columns = static_cast<std::size_t>(shape.columns);
  for (std::size_t first = 0; first < q.size(); first += columns) {
    const std::span<const float> vector = q.subspan(first, columns);
    const bool zero = std::ranges::all_of(vector, [](float value) { return value == 0.0F; });
    if (!zero) std::ranges::copy(vector, start.begin() + static_cast<std::ptrdiff_t>(first));
  }
}

}  // namespace tandem
