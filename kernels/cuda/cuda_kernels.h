// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kernels/attention_call.h"
#include "kernels/common_kernels.h"
#include "kernels/cuda/cuda_compression.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/gpu.h"
#include "kernels/cuda/matmul.h"

namespace tandem::TANDEM_GPU {

/// Kernels on a GPU: checks shapes and launches on one stream. kernels.h states each operation. The members are in one file a
/// family, cuda_norm.cpp, cuda_rows.cpp, cuda_loss.cpp, ..., their kernels and launchers in the .cu of the same name.
class CudaKernels final : public CommonKernels {
 public:
  /// `options.device` has been looked up: it is `device`.
  CudaKernels(const CudaKernelsOptions& options, const DeviceInfo& device);
  ~CudaKernels() override;

  [[nodiscard]] KernelsInfo info() const override;
  [[nodiscard]] Memory& memory() noexcept override { return memory_; }
  [[nodiscard]] CompressionKernels* compression() noexcept override { return &compression_; }
  void synchronize() override;
  void begin_graph(std::uint64_t key) override;
  void end_graph() override;

  void embedding_forward(std::span<const std::int32_t> ids, std::span<const std::int32_t> positions, TensorView wte,
                         TensorView wpe, TensorView out) override;
  void embedding_backward(std::span<const std::int32_t> ids, std::span<const std::int32_t> positions, TensorView dout,
                          TensorView dwte, TensorView dwpe) override;

  void layer_norm_forward(TensorView x, TensorView weight, TensorView bias, double epsilon, TensorView y, TensorView mean,
                          TensorView rstd) override;
  void layer_norm_backward_input(TensorView dy, TensorView x, TensorView weight, TensorView mean, TensorView rstd,
                                 TensorView dresidual, TensorView dx) override;
  void layer_norm_backward_weight(TensorView dy, TensorView x, TensorView mean, TensorView rstd, TensorView dweight,
                                  TensorView dbias) override;

  void dropout_residual_norm_forward(const DropoutSpec& dropout, TensorView x, TensorView residual, TensorView out,
                                     TensorView weight, TensorView bias, double epsilon, TensorView y, TensorView mean,
                                     TensorView rstd) override;

  void attention_decode(int heads, std::int64_t head_size, std::int64_t length, TensorView qkv, TensorView key_cache,
                        TensorView value_cache, TensorView out) override;

  void gelu_forward(TensorView x, TensorView y) override;
  void gelu_backward(TensorView dy, TensorView x, TensorView dx) override;

  void dropout_residual_forward(const DropoutSpec& dropout, TensorView x, TensorView residual, TensorView out) override;
  void dropout_backward(const DropoutSpec& dropout, TensorView dout, TensorView dx) override;

  double cross_entropy_forward_backward(TensorView logits, std::span<const std::int32_t> targets, double scale) override;
  void cross_entropy_deferred(TensorView logits, std::span<const std::int32_t> targets, double scale, double& sum) override;
  double cross_entropy_forward(TensorView logits, std::span<const std::int32_t> targets) override;
  void cross_entropy_statistics(TensorView logits, std::int64_t columns, std::span<const std::int32_t> targets,
                                TensorView statistics) override;
  void cross_entropy_gradient(TensorView logits, std::int64_t columns, std::span<const std::int32_t> targets,
                              std::span<const std::uint8_t> valid, TensorView logsumexp, double scale) override;

  void gather_rows(std::span<const std::int32_t> ids, TensorView table, TensorView out) override;
  void add_gathered_rows(std::span<const std::int32_t> ids, TensorView table, TensorView out) override;
  void scatter_add_rows(std::span<const std::int32_t> ids, TensorView x, TensorView table) override;
  void combine_rows(std::span<const std::int32_t> slots, TensorView gates, TensorView y, TensorView out) override;
  void combine_rows_backward(std::span<const std::int32_t> slots, TensorView gates, TensorView dout, TensorView y,
                             TensorView dgates, TensorView dy) override;

  void add_bias(TensorView bias, TensorView x) override;
  void bias_backward(TensorView dy, TensorView dbias) override;

  void adamw(const AdamWStep& step, TensorView gradient, TensorView parameter, TensorView m, TensorView v,
             TensorView stored) override;
  void adamw_all(std::span<const AdamWTensors> tensors) override;
  void sgd(double learning_rate, double weight_decay, double gradient_scale, TensorView gradient, TensorView parameter,
           TensorView stored) override;
  void convert(TensorView from, TensorView to) override;
  double quantize_fp8(TensorView from, Fp8Format format, double scale, TensorView to) override;
  double squared_norm(TensorView x) override;
  void squared_norms(std::span<const TensorView> tensors, std::span<double> norms) override;

  void fill(TensorView x, double value) override;
  void scale(TensorView x, double factor) override;
  void add(TensorView x, TensorView y) override;

 private:
  // Help for the members, in cuda_kernels.cpp.

  [[nodiscard]] StreamHandle stream() const { return memory_.stream(); }
  /// A copy on the device of host values, there for what is launched until the end of the caller's operation; `values` may change
  /// as soon as this returns. Null of an empty span.
  template <class T>
  [[nodiscard]] const T* upload(std::span<const T> values) {
    return static_cast<const T*>(upload_bytes(values.data(), static_cast<std::int64_t>(values.size_bytes())));
  }
  [[nodiscard]] const void* upload_bytes(const void* values, std::int64_t size_bytes);
  /// Device memory for one operation, in the order of the stream.
  [[nodiscard]] Temporary temporary(std::int64_t size_bytes) { return Temporary(memory_, size_bytes); }
  /// Values that the device holds at `from`; blocks.
  [[nodiscard]] double read_double(const void* from);
  /// `sum` += the double at `from`, by the next synchronize().
  void add_later(const double* from, double& sum);
  void add_deferred();

  /// All forms of attention but attention_decode(); in cuda_attention.cpp.
  void attention(const AttentionCall& call, const DropoutSpec& dropout) override;

  /// The sum of the losses to `total` on the device; with `scale` logits become gradients. At least one token.
  void cross_entropy(TensorView logits, std::span<const std::int32_t> targets, const double* scale, double* total);

  struct Deferred {
    const double* pinned;
    double* sum;
  };
  /// Where uploads lie, one after the other and then from the start again.
  struct UploadRing {
    void* address;
    std::int64_t size_bytes;
  };

  class Converted;
  void multiply(const ProductCall& call) override;  // in cuda_linear.cpp

  DeviceInfo device_;
  DType products_;
  bool use_graphs_;
  bool fuse_gelu_;
  DeviceMemory memory_;
  CudaCompression compression_{memory_};
  std::unique_ptr<MatrixProducts> products_library_;
  std::vector<UploadRing> upload_rings_;  // the last is in use
  std::int64_t upload_position_ = 0;
  std::vector<Deferred> deferred_;
  std::vector<Pinned> deferred_blocks_;
  std::map<std::uint64_t, Graph> graphs_;
  std::optional<std::uint64_t> graph_key_;  // between begin_graph() and end_graph()
};

}  // namespace tandem::TANDEM_GPU
