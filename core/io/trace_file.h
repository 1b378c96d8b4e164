// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/model_config.h"
#include "core/shard.h"

namespace tandem {

/// What an entry of a trace is. An activation gradient is named "d." + the activation ("d.h.0.attn.c_attn"), a parameter gradient
/// "d." + the parameter ("d.h.0.attn.c_attn.weight"), a parameter (before the step) as it is.
enum class TraceKind : std::uint8_t { activation, activation_gradient, parameter, parameter_gradient };
[[nodiscard]] std::string_view name(TraceKind kind);
[[nodiscard]] std::optional<TraceKind> find_trace_kind(std::string_view name);

/// One block of values of a trace: the part of a global tensor that one rank saw in one micro-batch.
///
/// How the stored values lie is described from the outside in: `shard.slices` pick indices of the global tensor (Hugging Face
/// layout) as in core/shard.h; `megatron_qkv` reorders the last dimension of that local tensor from [q, k, v][head][head_size] to
/// [head][q, k, v][head_size]; `transposed` swaps its two dimensions; `shard.flat_range` is a range of the flattened result, and
/// may reach beyond its end: what lies there is padding.
struct TraceEntry {
  std::string name;
  TraceKind kind = TraceKind::activation;
  ShardSpec shard;  ///< global_name is `name`; dtype that of the stored values; partial_sum: all entries of this name are added
  int rank = 0;
  int micro_batch = 0;
  bool megatron_qkv = false;
  bool transposed = false;
  std::string file;  ///< safetensors file, relative to the folder of the trace
  std::string key;   ///< tensor in that file
};

/// Global row-major index of each stored value, -1 for padding. `head_size` is used by megatron_qkv. Throws ContractError for an
/// entry that require_possible() refuses.
[[nodiscard]] std::vector<std::int64_t> global_indices(const TraceEntry& entry, std::int64_t head_size);
/// Stored values, padding included.
[[nodiscard]] std::int64_t num_elements(const TraceEntry& entry);
/// Throws InputError, beginning with `where`, where slices leave the global shape, a range is upside down, or the layout does not
/// fit the shape.
void require_possible(const TraceEntry& entry, std::int64_t head_size, std::string_view where);

/// Which dropout masks the traced step used.
enum class TraceDropout : std::uint8_t {
  off,
  tandem,  ///< those of core/rng.h under dropout_seed and dropout_step
  other    ///< another generator's: nothing can be computed again
};

/// What holds for a whole trace. docs/trace_format.md describes each field.
struct TraceHeader {
  std::string framework;                   ///< free text, "pytorch 2.1"
  bool is_reference = false;               ///< made by the double reference: the truth of a comparison
  DType precision = DType::f32;            ///< what activations are stored in
  DType accumulate = DType::f32;           ///< what sums inside an operation are formed in
  DType gradient_accumulate = DType::f32;  ///< what gradients of parameters are summed in, over tokens and micro-batches
  double loss_scale = 1;                   ///< gradients are stored multiplied by this
  GptConfig model;
  std::int64_t step = 0;
  TraceDropout dropout = TraceDropout::off;
  std::uint64_t dropout_seed = 0;
  std::uint32_t dropout_step = 0;
  std::optional<double> loss;  ///< of the global batch
  int ranks = 1;
};

/// A trace as its readers see it: entries in the order of execution (of each rank), values by index.
class TraceSource {
 public:
  TraceSource() = default;
  TraceSource(const TraceSource&) = delete;
  TraceSource& operator=(const TraceSource&) = delete;
  virtual ~TraceSource() = default;
  [[nodiscard]] virtual const TraceHeader& header() const = 0;
  [[nodiscard]] virtual const std::vector<TraceEntry>& entries() const = 0;
  /// The stored values of entries()[index], in their order.
  [[nodiscard]] virtual std::vector<double> values(std::size_t index) const = 0;
};

/// Takes one entry; the view is lent for the call. `file` and `key` are not looked at.
using TraceConsumer = std::function<void(const TraceEntry&, TensorView)>;

/// An entry that is a whole tensor on rank 0.
[[nodiscard]] TraceEntry whole_entry(std::string name, TraceKind kind, Shape shape, DType dtype);

}  // namespace tandem
