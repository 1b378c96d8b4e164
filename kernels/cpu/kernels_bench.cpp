// SPDX-License-Identifier: Apache-2.0
// Each operation at the shapes of GPT-2 124M, 1024 tokens (4 rows of 256); argument: threads. `share` is the achieved part
// of the peak that measure_peaks() finds with as many threads: of matrix FLOP/s where the operation is named with FLOPs, else of
// memory bytes/s, counting each operand once. A share above 1 means that operands came from a cache.
#include <benchmark/benchmark.h>

#include <map>
#include <memory>
#include <numeric>
#include <vector>

#include "kernels/cpu/huge_buffer.h"
#include "kernels/kernels.h"

namespace tandem::cpu {
namespace {

constexpr std::int64_t kRows = 4, kSequence = 256, kTokens = kRows * kSequence;
constexpr std::int64_t kHidden = 768, kMlp = 4 * kHidden, kHeads = 12, kVocabulary = 50257;
constexpr std::int64_t kHeadRows = 256;  // rows of logits made at a time

const MeasuredPeaks& peaks(int threads) {
  static std::map<int, MeasuredPeaks> measured;  // by threads; benchmarks run one after the other
  const auto found = measured.find(threads);
  return found != measured.end() ? found->second : measured.emplace(threads, measure_peaks(threads)).first->second;
}

/// Tensors that live as long as the benchmark, filled with a small value.
class Tensors {
 public:
  explicit Tensors(DType storage = DType::f32) : storage_(storage) {}
  TensorView make(std::initializer_list<std::int64_t> shape, float value = 0.01F) { return make(storage_, shape, value); }
  TensorView make_fp32(std::initializer_list<std::int64_t> shape, float value = 0.01F) { return make(DType::f32, shape, value); }

 private:
  TensorView make(DType dtype, std::initializer_list<std::int64_t> shape, float value) {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    buffers_.emplace_back(static_cast<std::size_t>(count), value);
    const TensorView view(buffers_.back().data(), dtype, shape);
    // Values that differ: sums of equal ones would be exact, exponentials of them trivial.
    std::uint32_t state = 12345;
    for (std::int64_t i = 0; i < count; ++i) {
      state = state * 1664525U + 1013904223U;
      const float element = value * (static_cast<float>(state >> 8) * 0x1p-23F - 1.0F);
      if (dtype == DType::f32) {
        static_cast<float*>(view.data())[i] = element;
      } else {
        static_cast<std::uint16_t*>(view.data())[i] = dtype == DType::bf16 ? to_bf16_bits(element) : to_f16_bits(element);
      }
    }
    return view;
  }

  DType storage_;
  std::vector<HugeBuffer> buffers_;
};

/// What a product works on: tensors in `storage`, fp32 operands rounded to `products`.
struct Precision {
  DType storage = DType::f32, products = DType::f32;
};
constexpr Precision kFp32, kBf16{DType::bf16, DType::f32}, kAutocast{DType::f32, DType::bf16};

std::unique_ptr<Kernels> kernels_for(const benchmark::State& state, const Precision& precision = kFp32) {
  return make_cpu_kernels({.threads = static_cast<int>(state.range(0)), .products = precision.products});
}

template <class Body>
void measure(benchmark::State& state, const char* unit, double per_iteration, double peak, Body body) {
  body();
  for (auto _ : state) body();
  state.counters[unit] = benchmark::Counter(per_iteration, benchmark::Counter::kIsIterationInvariantRate);
  state.counters["share"] = benchmark::Counter(per_iteration / peak, benchmark::Counter::kIsIterationInvariantRate);
}

template <class Body>
void measure_flops(benchmark::State& state, double flops, Body body) {
  measure(state, "FLOP/s", flops, peaks(static_cast<int>(state.range(0))).fp32_matmul_flops_per_second, body);
}

template <class Body>
void measure_product(benchmark::State& state, const Precision& precision, double flops, Body body) {
  const MeasuredPeaks& peak = peaks(static_cast<int>(state.range(0)));
  const bool bf16 = precision.storage == DType::bf16 || precision.products == DType::bf16;
  measure(state, "FLOP/s", flops,
          bf16 && peak.bf16_matmul_flops_per_second > 0 ? peak.bf16_matmul_flops_per_second : peak.fp32_matmul_flops_per_second,
          body);
}

template <class Body>
void measure_bytes(benchmark::State& state, DType dtype, std::int64_t num_elements, Body body) {
  measure(state, "bytes/s", static_cast<double>(num_elements) * static_cast<double>(size_bytes(dtype)),
          peaks(static_cast<int>(state.range(0))).memory_bytes_per_second, body);
}

void linear(benchmark::State& state, const Precision& precision, std::int64_t in, std::int64_t out) {
  const auto kernels = kernels_for(state, precision);
  Tensors tensors(precision.storage);
  const auto x = tensors.make({kTokens, in}), w = tensors.make({in, out}), b = tensors.make({out}),
             y = tensors.make({kTokens, out});
  measure_product(state, precision, 2.0 * kTokens * static_cast<double>(in * out), [&] { kernels->linear_forward(x, w, b, y); });
}
void linear_gelu(benchmark::State& state, const Precision& precision) {
  const auto kernels = kernels_for(state, precision);
  Tensors tensors(precision.storage);
  const auto x = tensors.make({kTokens, kHidden}), w = tensors.make({kHidden, kMlp}), b = tensors.make({kMlp});
  const auto before = tensors.make({kTokens, kMlp}), after = tensors.make({kTokens, kMlp});
  measure_product(state, precision, 2.0 * kTokens * kHidden * kMlp,
                  [&] { kernels->linear_gelu_forward(x, w, b, before, after); });
}
void linear_backward_input(benchmark::State& state, const Precision& precision, std::int64_t in, std::int64_t out) {
  const auto kernels = kernels_for(state, precision);
  Tensors tensors(precision.storage);
  const auto dx = tensors.make({kTokens, in}), w = tensors.make({in, out}), dy = tensors.make({kTokens, out});
  measure_product(state, precision, 2.0 * kTokens * static_cast<double>(in * out),
                  [&] { kernels->linear_backward_input(dy, w, dx); });
}
void linear_backward_weight(benchmark::State& state, const Precision& precision, std::int64_t in, std::int64_t out) {
  const auto kernels = kernels_for(state, precision);
  Tensors tensors(precision.storage);
  const auto x = tensors.make({kTokens, in}), dy = tensors.make({kTokens, out});
  const auto dw = tensors.make_fp32({in, out}), db = tensors.make_fp32({out});
  measure_product(state, precision, 2.0 * kTokens * static_cast<double>(in * out),
                  [&] { kernels->linear_backward_weight(x, dy, dw, db); });
}

void head(benchmark::State& state, const Precision& precision, int which) {
  const auto kernels = kernels_for(state, precision);
  Tensors tensors(precision.storage);
  const auto x = tensors.make({kHeadRows, kHidden}), table = tensors.make({kVocabulary, kHidden});
  const auto logits = tensors.make({kHeadRows, kVocabulary}), dtable = tensors.make_fp32({kVocabulary, kHidden});
  measure_product(state, precision, 2.0 * kHeadRows * kVocabulary * kHidden, [&] {
    if (which == 0) kernels->head_forward(x, table, logits);
    if (which == 1) kernels->head_backward_input(logits, table, x);
    if (which == 2) kernels->head_backward_weight(x, logits, dtable);
  });
}

void attention(benchmark::State& state, DType storage, bool backward, double probability) {
  const auto kernels = kernels_for(state);
  Tensors tensors(storage);
  const auto qkv = tensors.make({kTokens, 3 * kHidden}, 1.0F), out = tensors.make({kTokens, kHidden}, 1.0F);
  const auto dqkv = tensors.make({kTokens, 3 * kHidden}), dout = tensors.make({kTokens, kHidden});
  const auto logsumexp = tensors.make_fp32({kRows, kHeads, kSequence});
  const AttentionShape shape{kRows, kSequence, kHeads, kHidden / kHeads, {}, kSequence};
  std::vector<std::int64_t> row_ids(kRows);
  std::iota(row_ids.begin(), row_ids.end(), 0);
  const DropoutSpec dropout{{}, probability, row_ids, kHeads * kSequence * kSequence};
  // Pairs of query and key under the causal mask; two products forward, five backward.
  const double pairs = static_cast<double>(kRows * kHeads) * kSequence * (kSequence + 1) / 2;
  const double flops = 2.0 * pairs * (kHidden / kHeads);
  kernels->attention_forward(shape, dropout, qkv, out, logsumexp);
  if (backward) {
    measure_flops(state, 5 * flops, [&] { kernels->attention_backward(shape, dropout, dout, qkv, out, logsumexp, dqkv); });
  } else {
    measure_flops(state, 2 * flops, [&] { kernels->attention_forward(shape, dropout, qkv, out, logsumexp); });
  }
}

void attention_materialized(benchmark::State& state, DType storage, bool backward) {
  const auto kernels = kernels_for(state);
  Tensors tensors(storage);
  const auto qkv = tensors.make({kTokens, 3 * kHidden}, 1.0F), out = tensors.make({kTokens, kHidden}, 1.0F);
  const auto dqkv = tensors.make({kTokens, 3 * kHidden}), dout = tensors.make({kTokens, kHidden});
  const auto kept = tensors.make({kRows, kHeads, kSequence, kSequence});
  const AttentionShape shape{kRows, kSequence, kHeads, kHidden / kHeads, {}, kSequence};
  const double flops = static_cast<double>(kRows * kHeads) * kSequence * (kSequence + 1) * (kHidden / kHeads);
  const auto forward = [&] { kernels->attention_materialized_forward(shape, {}, qkv, out, kept); };
  forward();
  if (!backward) {
    measure_flops(state, 2 * flops, forward);
    return;
  }
  measure_flops(state, 4 * flops, [&] { kernels->attention_materialized_backward(shape, {}, dout, qkv, kept, dqkv); });
}

/// One tile of ring attention: a quarter of a sequence of 1024 that sees another quarter wholly. Five products backward.
void attention_segment(benchmark::State& state, bool backward) {
  constexpr std::int64_t kWhole = 1024, kChunk = kWhole / 4, kWidth = 3 * kHidden;
  const auto kernels = kernels_for(state);
  Tensors tensors;
  const auto qkv = tensors.make({kWhole, kWidth}, 1.0F), dqkv = tensors.make({kWhole, kWidth});
  const auto out = tensors.make({kChunk, kHidden}), dout = tensors.make({kChunk, kHidden});
  const auto logsumexp = tensors.make({1, kHeads, kChunk});
  const auto part = [](TensorView of, std::int64_t first, std::int64_t third) {
    return StridedRows{of, first * kWidth + third * kHidden, kWhole * kWidth, kWidth};
  };
  AttentionSegment segment;
  segment.rows = 1;
  segment.queries = segment.keys = kChunk;
  segment.query_begin = kWhole - kChunk;
  segment.heads = static_cast<int>(kHeads);
  segment.head_size = kHidden / kHeads;
  const auto query = part(qkv, segment.query_begin, 0), key = part(qkv, 0, 1), value = part(qkv, 0, 2);
  const auto dquery = part(dqkv, segment.query_begin, 0), dkey = part(dqkv, 0, 1), dvalue = part(dqkv, 0, 2);
  const double flops = 2.0 * kHeads * kChunk * kChunk * (kHidden / kHeads);
  const auto forward = [&] { kernels->attention_segment_forward(segment, {}, query, key, value, out, logsumexp); };
  forward();
  if (!backward) {
    measure_flops(state, 2 * flops, forward);
    return;
  }
  measure_flops(state, 5 * flops, [&] {
    kernels->attention_segment_backward(segment, {}, dout, query, key, value, out, logsumexp, dquery, dkey, dvalue);
  });
}

void layer_norm(benchmark::State& state, DType dtype, int which) {
  const auto kernels = kernels_for(state);
  Tensors tensors(dtype);
  const auto x = tensors.make({kTokens, kHidden}), y = tensors.make({kTokens, kHidden}), dx = tensors.make({kTokens, kHidden});
  const auto w = tensors.make({kHidden}), b = tensors.make({kHidden}), mean = tensors.make_fp32({kTokens}),
             rstd = tensors.make_fp32({kTokens});
  kernels->layer_norm_forward(x, w, b, 1e-5, y, mean, rstd);
  const std::int64_t once = kTokens * kHidden;
  if (which == 0) measure_bytes(state, dtype, 2 * once, [&] { kernels->layer_norm_forward(x, w, b, 1e-5, y, mean, rstd); });
  if (which == 1) measure_bytes(state, dtype, 4 * once, [&] { kernels->layer_norm_backward_input(y, x, w, mean, rstd, dx, dx); });
  if (which == 2) measure_bytes(state, dtype, 2 * once, [&] { kernels->layer_norm_backward_weight(y, x, mean, rstd, w, b); });
}

void gelu(benchmark::State& state, DType dtype, bool backward) {
  const auto kernels = kernels_for(state);
  Tensors tensors(dtype);
  // Not in place: repeated, the gradient would shrink to subnormal numbers.
  const auto x = tensors.make({kTokens, kMlp}, 3.0F), y = tensors.make({kTokens, kMlp}), dx = tensors.make({kTokens, kMlp});
  if (backward) measure_bytes(state, dtype, 3 * kTokens * kMlp, [&] { kernels->gelu_backward(y, x, dx); });
  if (!backward) measure_bytes(state, dtype, 2 * kTokens * kMlp, [&] { kernels->gelu_forward(x, y); });
}

void dropout_residual(benchmark::State& state, DType dtype, double probability, bool by_token) {
  const auto kernels = kernels_for(state);
  Tensors tensors(dtype);
  const auto x = tensors.make({kTokens, kHidden}), residual = tensors.make({kTokens, kHidden}),
             out = tensors.make({kTokens, kHidden});
  std::vector<std::int64_t> row_ids(by_token ? kTokens : kRows);
  std::iota(row_ids.begin(), row_ids.end(), 0);
  const DropoutSpec dropout{{}, probability, row_ids, by_token ? kHidden : kSequence * kHidden};
  measure_bytes(state, dtype, 3 * kTokens * kHidden, [&] { kernels->dropout_residual_forward(dropout, x, residual, out); });
}

void cross_entropy(benchmark::State& state, DType dtype) {
  const auto kernels = kernels_for(state);
  Tensors tensors(dtype);
  const auto logits = tensors.make({kHeadRows, kVocabulary}, 5.0F);
  const std::vector<std::int32_t> targets(kHeadRows, 17);
  measure_bytes(state, dtype, 2 * kHeadRows * kVocabulary,
                [&] { benchmark::DoNotOptimize(kernels->cross_entropy_forward_backward(logits, targets, 1.0)); });
}

void embedding(benchmark::State& state, DType dtype, bool backward) {
  const auto kernels = kernels_for(state);
  Tensors tensors(dtype);
  const auto wte = tensors.make({kVocabulary, kHidden}), wpe = tensors.make({kSequence, kHidden}),
             out = tensors.make({kTokens, kHidden});
  std::vector<std::int32_t> ids(kTokens), positions(kTokens);
  for (std::int32_t t = 0; t < kTokens; ++t) {
    ids[static_cast<std::size_t>(t)] = t * 7919 % kVocabulary;
    positions[static_cast<std::size_t>(t)] = t % kSequence;
  }
  if (backward)
    measure_bytes(state, dtype, 5 * kTokens * kHidden, [&] { kernels->embedding_backward(ids, positions, out, wte, wpe); });
  if (!backward)
    measure_bytes(state, dtype, 3 * kTokens * kHidden, [&] { kernels->embedding_forward(ids, positions, wte, wpe, out); });
}

constexpr std::int64_t kParameters = std::int64_t{32} << 20;  // far beyond the caches

/// With a 16-bit dtype: a gradient of it, and the parameter rounded to it beside the fp32 one.
void adamw(benchmark::State& state, DType dtype) {
  const auto kernels = kernels_for(state);
  Tensors tensors(dtype);
  const auto g = tensors.make({kParameters}), p = tensors.make_fp32({kParameters}), m = tensors.make_fp32({kParameters}),
             v = tensors.make_fp32({kParameters}), stored = is_16bit(dtype) ? tensors.make({kParameters}) : TensorView();
  kernels->fill(v, 1e-4);
  const AdamWStep step{.learning_rate = 1e-4, .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.1};
  const std::int64_t halves = is_16bit(dtype) ? 2 : 0;
  measure_bytes(state, DType::u8, ((7 - halves / 2) * 4 + halves * 2) * kParameters,
                [&] { kernels->adamw(step, g, p, m, v, stored); });
}

void vector_operation(benchmark::State& state, DType dtype, int which) {
  const auto kernels = kernels_for(state);
  Tensors tensors(dtype);
  const auto x = tensors.make({kParameters}), y = tensors.make({kParameters});
  const auto wide_y = which == 4 || which == 5 ? tensors.make_fp32({kParameters}) : y;
  if (which == 0) measure_bytes(state, dtype, kParameters, [&] { benchmark::DoNotOptimize(kernels->squared_norm(x)); });
  if (which == 1) measure_bytes(state, dtype, kParameters, [&] { kernels->fill(x, 0); });
  if (which == 2) measure_bytes(state, dtype, 2 * kParameters, [&] { kernels->scale(x, 1.0); });
  if (which == 3) measure_bytes(state, dtype, 3 * kParameters, [&] { kernels->add(x, y); });
  if (which == 4) measure_bytes(state, dtype, (is_16bit(dtype) ? 5 : 3) * kParameters, [&] { kernels->add(x, wide_y); });
  if (which == 5) measure_bytes(state, dtype, (is_16bit(dtype) ? 3 : 2) * kParameters, [&] { kernels->convert(x, wide_y); });
  if (which == 6) {
    measure_bytes(state, dtype, 2 * kParameters,
                  [&] { benchmark::DoNotOptimize(kernels->quantize_fp8(x, Fp8Format::e4m3, 1024.0, y)); });
  }
}

void threads(benchmark::internal::Benchmark* benchmark) {
  benchmark->Arg(1)->Arg(2)->UseRealTime()->Unit(benchmark::kMicrosecond)->MinTime(0.2);
}

// Each on fp32, on bf16, and with fp32 operands rounded to bf16.
#define TANDEM_BENCHMARK_PRECISIONS(operation, label, ...)                                                                       \
  BENCHMARK_CAPTURE(operation, label##_fp32, kFp32 __VA_OPT__(, ) __VA_ARGS__)->Apply(threads);                                  \
  BENCHMARK_CAPTURE(operation, label##_bf16, kBf16 __VA_OPT__(, ) __VA_ARGS__)->Apply(threads);                                  \
  BENCHMARK_CAPTURE(operation, label##_autocast, kAutocast __VA_OPT__(, ) __VA_ARGS__)->Apply(threads)

TANDEM_BENCHMARK_PRECISIONS(linear, qkv, kHidden, 3 * kHidden);
TANDEM_BENCHMARK_PRECISIONS(linear, attention_projection, kHidden, kHidden);
TANDEM_BENCHMARK_PRECISIONS(linear, mlp_projection, kMlp, kHidden);
TANDEM_BENCHMARK_PRECISIONS(linear_gelu, mlp);
TANDEM_BENCHMARK_PRECISIONS(linear_backward_input, qkv, kHidden, 3 * kHidden);
TANDEM_BENCHMARK_PRECISIONS(linear_backward_input, attention_projection, kHidden, kHidden);
TANDEM_BENCHMARK_PRECISIONS(linear_backward_input, mlp, kHidden, kMlp);
TANDEM_BENCHMARK_PRECISIONS(linear_backward_input, mlp_projection, kMlp, kHidden);
TANDEM_BENCHMARK_PRECISIONS(linear_backward_weight, qkv, kHidden, 3 * kHidden);
TANDEM_BENCHMARK_PRECISIONS(linear_backward_weight, attention_projection, kHidden, kHidden);
TANDEM_BENCHMARK_PRECISIONS(linear_backward_weight, mlp, kHidden, kMlp);
TANDEM_BENCHMARK_PRECISIONS(linear_backward_weight, mlp_projection, kMlp, kHidden);
TANDEM_BENCHMARK_PRECISIONS(head, forward, 0);
TANDEM_BENCHMARK_PRECISIONS(head, backward_input, 1);
TANDEM_BENCHMARK_PRECISIONS(head, backward_weight, 2);
BENCHMARK_CAPTURE(attention, forward, DType::f32, false, 0.0)->Apply(threads);
BENCHMARK_CAPTURE(attention, forward_bf16, DType::bf16, false, 0.0)->Apply(threads);
BENCHMARK_CAPTURE(attention, backward, DType::f32, true, 0.0)->Apply(threads);
BENCHMARK_CAPTURE(attention, backward_bf16, DType::bf16, true, 0.0)->Apply(threads);
BENCHMARK_CAPTURE(attention, forward_dropout, DType::f32, false, 0.1)->Apply(threads);
BENCHMARK_CAPTURE(attention, forward_dropout_bf16, DType::bf16, false, 0.1)->Apply(threads);
BENCHMARK_CAPTURE(attention, backward_dropout, DType::f32, true, 0.1)->Apply(threads);
BENCHMARK_CAPTURE(attention, backward_dropout_bf16, DType::bf16, true, 0.1)->Apply(threads);
BENCHMARK_CAPTURE(attention_materialized, forward, DType::f32, false)->Apply(threads);
BENCHMARK_CAPTURE(attention_materialized, backward, DType::f32, true)->Apply(threads);
BENCHMARK_CAPTURE(attention_materialized, forward_bf16, DType::bf16, false)->Apply(threads);
BENCHMARK_CAPTURE(attention_materialized, backward_bf16, DType::bf16, true)->Apply(threads);
BENCHMARK_CAPTURE(attention_segment, forward, false)->Apply(threads);
BENCHMARK_CAPTURE(attention_segment, backward, true)->Apply(threads);
// Each on fp32, bf16 and fp16.
#define TANDEM_BENCHMARK_DTYPES(operation, label, ...)                                                                           \
  BENCHMARK_CAPTURE(operation, label##_fp32, DType::f32 __VA_OPT__(, ) __VA_ARGS__)->Apply(threads);                             \
  BENCHMARK_CAPTURE(operation, label##_bf16, DType::bf16 __VA_OPT__(, ) __VA_ARGS__)->Apply(threads);                            \
  BENCHMARK_CAPTURE(operation, label##_fp16, DType::f16 __VA_OPT__(, ) __VA_ARGS__)->Apply(threads)

TANDEM_BENCHMARK_DTYPES(layer_norm, forward, 0);
TANDEM_BENCHMARK_DTYPES(layer_norm, backward_input, 1);
TANDEM_BENCHMARK_DTYPES(layer_norm, backward_weight, 2);
TANDEM_BENCHMARK_DTYPES(gelu, forward, false);
TANDEM_BENCHMARK_DTYPES(gelu, backward, true);
TANDEM_BENCHMARK_DTYPES(dropout_residual, none, 0.0, false);
TANDEM_BENCHMARK_DTYPES(dropout_residual, tenth, 0.1, false);
TANDEM_BENCHMARK_DTYPES(dropout_residual, tenth_by_token, 0.1, true);
TANDEM_BENCHMARK_DTYPES(cross_entropy, whole);
TANDEM_BENCHMARK_DTYPES(embedding, forward, false);
TANDEM_BENCHMARK_DTYPES(embedding, backward, true);
TANDEM_BENCHMARK_DTYPES(adamw, update);
TANDEM_BENCHMARK_DTYPES(vector_operation, squared_norm, 0);
TANDEM_BENCHMARK_DTYPES(vector_operation, fill, 1);
TANDEM_BENCHMARK_DTYPES(vector_operation, scale, 2);
TANDEM_BENCHMARK_DTYPES(vector_operation, add, 3);
TANDEM_BENCHMARK_DTYPES(vector_operation, add_to_fp32, 4);
TANDEM_BENCHMARK_DTYPES(vector_operation, convert_to_fp32, 5);
BENCHMARK_CAPTURE(vector_operation, quantize_fp8_fp32, DType::f32, 6)->Apply(threads);
BENCHMARK_CAPTURE(vector_operation, quantize_fp8_bf16, DType::bf16, 6)->Apply(threads);

}  // namespace
}  // namespace tandem::cpu
