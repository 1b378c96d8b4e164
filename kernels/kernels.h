// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/optimizer_config.h"
#include "core/pitfall.h"
#include "core/rng.h"
#include "core/tensor.h"
#include "kernels/memory.h"

namespace tandem {

class CompressionKernels;

class SpanObserver;  // core/timeline.h

/// A dropout mask to apply. `first_element` maps local element 0 of the operand to its global index (core/rng.h); rows of the
/// operand that are not neighbours in the global batch get one entry of `row_ids` each.
struct DropoutSpec {
  DropoutKey key;
  double probability = 0.0;               ///< 0: the operator copies, no number is drawn
  std::span<const std::int64_t> row_ids;  ///< [rows] global row of each local row
  /// Number of mask elements per row: sequence * hidden with the model's full sizes (heads * sequence * sequence for attention
  /// probabilities). Row r of the operand has global elements [row_ids[r] * row_elements, ...).
  std::int64_t row_elements = 0;
};

/// One attention call. qkv is [rows, sequence, 3 * heads * head_size]: queries, keys, values as thirds, heads contiguous in each.
/// Causal within a document: query t of a row sees keys s with document_starts[t] <= s <= t. Scores are q.k / sqrt(head_size).
struct AttentionShape {
  std::int64_t rows = 0;
  std::int64_t sequence = 0;
  int heads = 0;
  std::int64_t head_size = 0;
  std::span<const std::int32_t> document_starts;  ///< [rows, sequence]; empty: all zero
  /// Side of the square of probability indices in the global dropout element index (the model's full sequence).
  std::int64_t dropout_sequence = 0;
  /// Heads of the whole model and the first of those computed here, for the same index: element ((row * total_heads + first_head
  /// + head) * dropout_sequence + query) * dropout_sequence + key. total_heads 0: `heads`.
  int total_heads = 0;
  int first_head = 0;
};

/// Rows of a matrix that lie apart in memory: element c of token t of row r is element
/// offset + r * row_stride + t * token_stride + c of `memory`. Strides in elements.
struct StridedRows {
  TensorView memory;
  std::int64_t offset = 0;
  std::int64_t row_stride = 0;
  std::int64_t token_stride = 0;
};

/// Attention between one contiguous run of queries and one of keys of the same rows: a tile of ring attention. Query i of a row
/// is at position query_begin + i of the sequence, key j at key_begin + j; query t sees keys s with document_start(t) <= s <= t,
/// positions being global. A query may see none of these keys.
struct AttentionSegment {
  std::int64_t rows = 0;
  std::int64_t queries = 0;
  std::int64_t keys = 0;
  std::int64_t query_begin = 0;
  std::int64_t key_begin = 0;
  int heads = 0;
  std::int64_t head_size = 0;
  /// Entry r * document_stride + i is the global position at which the document of query i of row r starts; empty: all zero.
  std::span<const std::int32_t> document_starts;
  std::int64_t document_stride = 0;
  std::int64_t dropout_sequence = 0;
  int total_heads = 0;  ///< as in AttentionShape
  int first_head = 0;
};

/// What AdamW needs beside the tensors; see OptimizerConfig for the equation.
struct AdamWStep {
  double learning_rate = 0;
  double beta1 = 0, beta2 = 0, epsilon = 0;
  double weight_decay = 0;      ///< 0 for tensors that do not decay
  std::int64_t step_index = 1;  ///< n, counts from 1
  double gradient_scale = 1;    ///< the clip coefficient, applied on the fly
};

/// One tensor of adamw_all(): the arguments of adamw().
struct AdamWTensors {
  AdamWStep step;
  TensorView gradient, parameter, m, v, stored;
};

/// Peaks that this machine's kernels can be measured against, and what they run on.
struct KernelsInfo {
  std::string backend;          ///< "cpu", "cuda", "simt" (the CUDA kernels on an emulated GPU)
  std::string instruction_set;  ///< "avx512", "avx2", "baseline"; "sm_90"; "emulated"
  std::string matrix_library;   ///< "oneDNN 2.6.3", "OpenBLAS 0.3.21", "own loops"; "cuBLASLt 13.1.0"
  std::string bf16_products;  ///< "oneDNN 2.6.3, bf16 instructions", or "converted to fp32" where that is faster or all there is
  std::vector<std::string> notes;  ///< one line per fallback taken ("no AVX-512: ...")
};

/// One-device math. One object per rank, used by that rank's compute thread only; that thread and `threads - 1` of its own share
/// the work.
///
/// The data tensors of a call (activations, parameters and gradients of activations) have one floating dtype D: fp64, fp32, bf16
/// or fp16; others throw ContractError. With D of 16 bits
///  - arithmetic is fp32 throughout, and every element of an output is rounded once (to nearest even), when it is stored;
///  - statistics are fp32: mean, rstd, logsumexp, cross-entropy statistics, gates, router probabilities (what this header calls
///  so);
///  - tensors that a call accumulates into are of D or fp32, all of a call alike: an element of D is read, added to in fp32 and
///    rounded once;
///  - the result of linear_forward may be fp32 (logits of a router).
/// Tensors are contiguous and do not overlap unless said. "accumulates" means +=; everything else overwrites. All calls are
/// deterministic: the same inputs give the same bits, for any number of threads. Shapes are checked (ContractError). Zero rows
/// are legal everywhere and do nothing (accumulating outputs stay as they are).
///
/// Tensors lie in memory(); spans, and what a call returns or adds to, in the host's. On a GPU a call issues work in the order of
/// its lane and returns; spans may change as soon as it has. A call that returns a number blocks until it is there: in a training
/// step the norm of the gradients, and nothing else.
///
/// [tokens, ...] is [rows * sequence, ...].
class Kernels {
 public:
  virtual ~Kernels() = default;

  [[nodiscard]] virtual KernelsInfo info() const = 0;
  /// Where the tensors of calls lie; owned by this.
  [[nodiscard]] virtual Memory& memory() noexcept { return host_memory(); }
  /// Codes of gradients in memory(); owned by this. Null where there are none: on the CPU, where the codecs are loops of their
  /// own.
  [[nodiscard]] virtual CompressionKernels* compression() noexcept { return nullptr; }
  /// Blocks until everything issued so far is done, and sums that were put off are added.
  virtual void synchronize() { memory().synchronize(); }

  /// Calls between the two may be recorded as one graph and issued by end_graph() together, which spares a GPU the gaps between
  /// small kernels. No call in between may return a number, read memory or synchronize. `key` tells sequences of calls of the
  /// same shapes from others: the first of a key is issued as it comes, the second makes its graph, later ones update it. Both do
  /// nothing where there are no graphs.
  virtual void begin_graph(std::uint64_t key) { static_cast<void>(key); }
  virtual void end_graph() {}

  /// out[t] = wte[ids[t]] + wpe[positions[t]]. out [tokens, hidden]; wte [vocabulary, hidden]; wpe [sequence, hidden].
  virtual void embedding_forward(std::span<const std::int32_t> ids, std::span<const std::int32_t> positions, TensorView wte,
                                 TensorView wpe, TensorView out) = 0;
  /// Accumulates: dwte[ids[t]] += dout[t], dwpe[positions[t]] += dout[t], in order of t.
  virtual void embedding_backward(std::span<const std::int32_t> ids, std::span<const std::int32_t> positions, TensorView dout,
                                  TensorView dwte, TensorView dwpe) = 0;

  /// y = (x - mean) * rstd * weight + bias over the last dimension; rstd = 1 / sqrt(var + epsilon), var with divisor n.
  /// x, y [tokens, hidden]; weight, bias [hidden]; mean, rstd [tokens], kept for backward.
  virtual void layer_norm_forward(TensorView x, TensorView weight, TensorView bias, double epsilon, TensorView y, TensorView mean,
                                  TensorView rstd) = 0;
  /// dx[t] (+)= rstd (g - mean(g) - xhat mean(g xhat)), g = dy * weight, xhat = (x - mean) rstd. With `dresidual` (may be the
  /// same memory as dx) dx = dresidual + that; with an empty view dx = that.
  virtual void layer_norm_backward_input(TensorView dy, TensorView x, TensorView weight, TensorView mean, TensorView rstd,
                                         TensorView dresidual, TensorView dx) = 0;
  /// Accumulates: dweight += sum over tokens of dy * xhat, dbias += sum of dy.
  virtual void layer_norm_backward_weight(TensorView dy, TensorView x, TensorView mean, TensorView rstd, TensorView dweight,
                                          TensorView dbias) = 0;

  /// out = residual + dropout(x), then y = layer norm of out, as the two calls one after the other; on a GPU in one pass over
  /// memory.
  virtual void dropout_residual_norm_forward(const DropoutSpec& dropout, TensorView x, TensorView residual, TensorView out,
                                             TensorView weight, TensorView bias, double epsilon, TensorView y, TensorView mean,
                                             TensorView rstd) {
    dropout_residual_forward(dropout, x, residual, out);
    layer_norm_forward(out, weight, bias, epsilon, y, mean, rstd);
  }

  /// y = x W + b. x [tokens, in]; weight [in, out]; bias [out] or empty; y [tokens, out].
  virtual void linear_forward(TensorView x, TensorView weight, TensorView bias, TensorView y) = 0;
  /// y_pre = x W + b and y = gelu(y_pre) in one pass. Both [tokens, out].
  virtual void linear_gelu_forward(TensorView x, TensorView weight, TensorView bias, TensorView y_pre, TensorView y) = 0;
  /// dx = dy W^T.
  virtual void linear_backward_input(TensorView dy, TensorView weight, TensorView dx) = 0;
  /// Accumulates: dweight += x^T dy, dbias += sum over tokens of dy (dbias may be empty).
  virtual void linear_backward_weight(TensorView x, TensorView dy, TensorView dweight, TensorView dbias) = 0;

  /// out [tokens, heads * head_size]; logsumexp [rows, heads, sequence] is all that is kept of the probabilities: no [T, T]
  /// matrix per head outlives the call. Dropout acts on the normalised probabilities.
  virtual void attention_forward(const AttentionShape& shape, const DropoutSpec& dropout, TensorView qkv, TensorView out,
                                 TensorView logsumexp) = 0;
  /// dqkv, from the kept qkv, out and logsumexp and the regenerated mask.
  virtual void attention_backward(const AttentionShape& shape, const DropoutSpec& dropout, TensorView dout, TensorView qkv,
                                  TensorView out, TensorView logsumexp, TensorView dqkv) = 0;
  /// Ring attention. out [rows, queries, heads * head_size] and logsumexp [rows, heads, queries] (contiguous) are updated by one
  /// more segment of keys, as if softmax had been over all keys so far: with the segment's own (o, l),
  ///   L = log(exp(logsumexp) + exp(l));  out <- exp(logsumexp - L) out + exp(l - L) o;  logsumexp <- L.
  /// Before the first segment logsumexp is -infinity and out zero (fill()); a query that has seen no key stays so.
  virtual void attention_segment_forward(const AttentionSegment& segment, const DropoutSpec& dropout, const StridedRows& query,
                                         const StridedRows& key, const StridedRows& value, TensorView out,
                                         TensorView logsumexp) = 0;
  /// Accumulates into dquery, dkey, dvalue (strided like their operands) the part of this segment; out and logsumexp are those
  /// over all keys. dout [rows, queries, heads * head_size].
  virtual void attention_segment_backward(const AttentionSegment& segment, const DropoutSpec& dropout, TensorView dout,
                                          const StridedRows& query, const StridedRows& key, const StridedRows& value,
                                          TensorView out, TensorView logsumexp, const StridedRows& dquery,
                                          const StridedRows& dkey, const StridedRows& dvalue) = 0;
  /// Attention that keeps its matrix: probabilities [rows, heads, sequence, sequence], before dropout, 0 where a query does not
  /// see a key. With D of 16 bits the products use them as they are kept, rounded. `out` as of attention_forward.
  virtual void attention_materialized_forward(const AttentionShape& shape, const DropoutSpec& dropout, TensorView qkv,
                                              TensorView out, TensorView probabilities) = 0;
  /// dqkv, from the kept qkv and probabilities and the regenerated mask. With P' the dropped and scaled probabilities,
  ///   dV = P'^T dO;  dP = (dO V^T) mask / (1 - p);  dS = P (dP - rowsum(dP P));  dQ = dS K / sqrt(d);  dK = dS^T Q / sqrt(d)
  virtual void attention_materialized_backward(const AttentionShape& shape, const DropoutSpec& dropout, TensorView dout,
                                               TensorView qkv, TensorView probabilities, TensorView dqkv) = 0;
  /// Generation: one new token per row. qkv [rows, 3 * heads * head_size] of the new token; key_cache and value_cache
  /// [rows, capacity, heads * head_size], of which entries [0, length) are set; appends the new key and value as entry `length`,
  /// then attends over [0, length]. out [rows, heads * head_size].
  virtual void attention_decode(int heads, std::int64_t head_size, std::int64_t length, TensorView qkv, TensorView key_cache,
                                TensorView value_cache, TensorView out) = 0;

  /// y = 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), elementwise.
  virtual void gelu_forward(TensorView x, TensorView y) = 0;
  /// dx = dy * gelu'(x); dx may be the same memory as dy.
  virtual void gelu_backward(TensorView dy, TensorView x, TensorView dx) = 0;

  /// out = residual + dropout(x); kept elements are scaled by 1 / (1 - probability). residual may be empty (zero). out may be the
  /// same memory as x or residual. All [tokens, hidden].
  virtual void dropout_residual_forward(const DropoutSpec& dropout, TensorView x, TensorView residual, TensorView out) = 0;
  /// dx = dout * mask / (1 - probability), the mask drawn again. dx may be the same memory as dout.
  virtual void dropout_backward(const DropoutSpec& dropout, TensorView dout, TensorView dx) = 0;

  /// Cross-entropy, fused with its gradient: for each row with a valid target, loss += logsumexp(logits) - logits[target] (in
  /// double, rows in order), and logits become dlogits = scale * (softmax - onehot). Rows with kIgnoredTarget add nothing and get
  /// zero. logits [tokens, vocabulary]; returns the *sum* of the losses. `scale` is 1 / (valid tokens of the whole global batch).
  [[nodiscard]] virtual double cross_entropy_forward_backward(TensorView logits, std::span<const std::int32_t> targets,
                                                              double scale) = 0;
  /// The same without waiting: the loss sum is added to `sum` by the next synchronize() at the latest.
  virtual void cross_entropy_deferred(TensorView logits, std::span<const std::int32_t> targets, double scale, double& sum) {
    sum += cross_entropy_forward_backward(logits, targets, scale);
  }
  /// The loss sum alone; logits stay as they are.
  [[nodiscard]] virtual double cross_entropy_forward(TensorView logits, std::span<const std::int32_t> targets) = 0;

  /// Vocabulary-parallel cross-entropy, first half: of each token over the first `columns` columns of `logits` (this rank's part
  /// of the vocabulary; later ones are padding and are not looked at), statistics[t] = {largest logit, sum of exp(logit -
  /// largest), logit of the target}. targets[t] is the column of the target, or negative where it is not here; the third entry is
  /// then 0. logits [tokens, local width]; statistics [tokens, 3].
  virtual void cross_entropy_statistics(TensorView logits, std::int64_t columns, std::span<const std::int32_t> targets,
                                        TensorView statistics) = 0;
  /// Second half: logits become scale * (exp(logit - logsumexp[t]) - onehot(targets[t])) in the first `columns` columns and 0 in
  /// the padding; a token whose `valid` entry is 0 gets zeros. logsumexp [tokens], over the whole vocabulary.
  virtual void cross_entropy_gradient(TensorView logits, std::int64_t columns, std::span<const std::int32_t> targets,
                                      std::span<const std::uint8_t> valid, TensorView logsumexp, double scale) = 0;

  /// out[t] = table[ids[t]]; zero where ids[t] is negative. out [tokens, width], table [any, width].
  virtual void gather_rows(std::span<const std::int32_t> ids, TensorView table, TensorView out) = 0;
  /// out[t] += table[ids[t]]; nothing where negative.
  virtual void add_gathered_rows(std::span<const std::int32_t> ids, TensorView table, TensorView out) = 0;
  /// Accumulates table[ids[t]] += x[t] in order of t; nothing where negative.
  virtual void scatter_add_rows(std::span<const std::int32_t> ids, TensorView x, TensorView table) = 0;
  /// Experts' outputs to tokens: out[t] = sum over choices k of gates[t, k] * y[slots[t * choices + k]], dropped (negative) slots
  /// left out. gates [tokens, choices]; y [any, width]; out [tokens, width].
  virtual void combine_rows(std::span<const std::int32_t> slots, TensorView gates, TensorView y, TensorView out) = 0;
  /// dgates[t, k] = dout[t] . y[slot] (0 where dropped); dy[slot] = gates[t, k] * dout[t] (a slot belongs to one token at most;
  /// other rows of dy are left as they are).
  virtual void combine_rows_backward(std::span<const std::int32_t> slots, TensorView gates, TensorView dout, TensorView y,
                                     TensorView dgates, TensorView dy) = 0;

  /// x[t] += bias. x [tokens, width].
  virtual void add_bias(TensorView bias, TensorView x) = 0;
  /// Accumulates dbias += sum over tokens of dy.
  virtual void bias_backward(TensorView dy, TensorView dbias) = 0;

  /// Head with tied or separate embedding [vocabulary, hidden]: logits = x W^T.
  virtual void head_forward(TensorView x, TensorView embedding, TensorView logits) = 0;
  /// dx = dlogits W.
  virtual void head_backward_input(TensorView dlogits, TensorView embedding, TensorView dx) = 0;
  /// Accumulates: dembedding += dlogits^T x.
  virtual void head_backward_weight(TensorView x, TensorView dlogits, TensorView dembedding) = 0;

  /// One AdamW update in place (equation at OptimizerConfig), one pass over memory. parameter, m and v are fp32 or fp64; gradient
  /// is of their dtype or, beside fp32, 16 bits wide. `stored`, where not empty, is 16 bits wide and becomes `parameter` rounded
  /// (fp32 only).
  virtual void adamw(const AdamWStep& step, TensorView gradient, TensorView parameter, TensorView m, TensorView v,
                     TensorView stored) = 0;
  /// adamw() of each; on a GPU a few launches for all.
  virtual void adamw_all(std::span<const AdamWTensors> tensors) {
    for (const AdamWTensors& t : tensors) adamw(t.step, t.gradient, t.parameter, t.m, t.v, t.stored);
  }
  /// p <- p (1 - lr wd) - lr * gradient_scale * g; dtypes as of adamw. A 16-bit `parameter` is updated in fp32 and rounded (only
  /// SGD; small updates are lost, which is why master copies exist).
  virtual void sgd(double learning_rate, double weight_decay, double gradient_scale, TensorView gradient, TensorView parameter,
                   TensorView stored) = 0;
  /// to <- from, rounded once, to nearest even, where `to` is narrower. Any floating dtypes.
  virtual void convert(TensorView from, TensorView to) = 0;
  /// to <- the fp8 numbers nearest to scale * from, divided by scale (a power of two, so that `to`, fp32 or bf16, holds them
  /// exactly); saturating, NaN stays NaN. `from` is fp32 or of 16 bits; `to` may be the same memory where it is of its dtype.
  /// Returns the largest |from|, NaN left out (infinity counts); 0 of none.
  [[nodiscard]] virtual double quantize_fp8(TensorView from, Fp8Format format, double scale, TensorView to) = 0;
  /// Sum of squares in double, in blocks of a fixed size: the same bits for any number of threads. Not finite if and only if an
  /// element is not (squares of fp32 and 16-bit numbers do not overflow): the norm, and the check of a scaled loss, in one pass.
  [[nodiscard]] virtual double squared_norm(TensorView x) = 0;

  /// squared_norm() of each; waits once.
  virtual void squared_norms(std::span<const TensorView> tensors, std::span<double> norms) {
    for (std::size_t i = 0; i < tensors.size(); ++i) norms[i] = squared_norm(tensors[i]);
  }

  virtual void fill(TensorView x, double value) = 0;
  /// x *= factor.
  virtual void scale(TensorView x, double factor) = 0;
  /// y += x. With x of 16 bits y may be fp32.
  virtual void add(TensorView x, TensorView y) = 0;
};

struct CpuKernelsOptions {
  int threads = 1;
  PitfallSet pitfalls = {};
  /// fp32; or bf16, fp16: autocast. linear_* and head_* then round their fp32 operands to it on the way into the matrix product,
  /// whose sums and results stay fp32 (biases and what is accumulated into are not rounded).
  DType products = DType::f32;
  /// "auto", or one of "avx512", "avx2", "baseline", "onednn", "openblas", "own": to test each fallback on any machine.
  std::string instruction_set = "auto";
  std::string matrix_library = "auto";
};

/// Picks the best instruction set and matrix library that this machine has; info() says which, and what was missing.
/// Throws InputError where an explicitly named one is not available.
[[nodiscard]] std::unique_ptr<Kernels> make_cpu_kernels(const CpuKernelsOptions& options);

struct CudaKernelsOptions {
  int device = 0;  ///< of those that CUDA_VISIBLE_DEVICES leaves
  PitfallSet pitfalls = {};
  DType products = DType::f32;  ///< as of CpuKernelsOptions
  bool graphs = true;           ///< begin_graph() records
  /// linear_gelu_forward() may form y from the sums before they are rounded, by another tanh: faster, and with other bits than
  /// gelu_forward(y_pre). bf16 only.
  bool fuse_gelu = true;
  /// Only with `simt`: the order in which the threads of a block take turns. 0: ascending.
  std::uint64_t thread_order_seed = 1;
};

/// The CUDA kernels: "cuda" on a GPU, "simt" the same kernels on an emulated one, thread by thread on the CPU, to check what they
/// compute and how host code treats its memory (docs/cuda.md). Throws InputError where this build or machine lacks it, saying
/// why.
[[nodiscard]] std::unique_ptr<Kernels> make_cuda_kernels(const std::string& backend, const CudaKernelsOptions& options);

/// Why make_cuda_kernels(backend) would throw here; empty where it would not.
[[nodiscard]] std::string why_no_gpu(const std::string& backend);

/// Ranges for a profiler (NVTX, domain "tandem", a colour for each activity) of the timelines that are given it. Null where this
/// build has no CUDA.
[[nodiscard]] std::unique_ptr<SpanObserver> make_nvtx_observer();

/// Measured peaks of this machine with `threads` threads: the denominators of "share of peak". Takes about a second.
struct MeasuredPeaks {
  double fp32_matmul_flops_per_second = 0;  ///< 1024 x 1024 x 1024 and 1024 x 3072 x 768, best of several
  double bf16_matmul_flops_per_second = 0;  ///< the same with bf16 operands and results
  double memory_bytes_per_second = 0;       ///< best of triad and update in place, far beyond the caches
};
[[nodiscard]] MeasuredPeaks measure_peaks(int threads);
/// The same of a GPU, by its own clock: memory is a copy on the device of 1 GiB, read and written bytes counted; products are of
/// 8192 (bf16) and 4096 (fp32) a side, of numbers without a pattern: a card's clock depends on them. "simt": small, to see that
/// it runs.
[[nodiscard]] MeasuredPeaks measure_gpu_peaks(const std::string& backend, int device);

}  // namespace tandem
