// SPDX-License-Identifier: Apache-2.0
// Linear layers and the head: shapes, and which of a product's parts the matrix library does in one pass.
#include <optional>

#include <fmt/format.h>

#include "kernels/cuda/cuda_kernels.h"
#include "kernels/operand_checks.h"

namespace tandem::TANDEM_GPU {

// A tensor as a product takes it: itself, or converted into memory that lasts as long as this.
class CudaKernels::Converted {
 public:
  Converted(CudaKernels& kernels, const TensorView& tensor, DType dtype)
      : memory_(kernels.memory_,
                tensor && tensor.dtype() != dtype ? tensor.num_elements() * static_cast<std::int64_t>(size_bytes(dtype)) : 0),
        view_(tensor) {
    if (memory_.data() == nullptr) return;
    view_ = TensorView(memory_.data(), dtype, tensor.shape());
    kernels.convert(tensor, view_);
  }
  [[nodiscard]] const TensorView& view() const noexcept { return view_; }

 private:
  Temporary memory_;
  TensorView view_;
};

void CudaKernels::multiply(Product product, const ProductTensors& tensors) {
  const auto& [a, b, c, bias, gelu] = tensors;
  TANDEM_CHECK(a.dtype() == b.dtype(), fmt::format("a product of {} and {}", name(a.dtype()), name(b.dtype())));
  const DType operands = a.dtype() == DType::f32 ? products_ : a.dtype();  // autocast
  const Converted left(*this, a, operands), right(*this, b, operands), addend(*this, bias, c.dtype());
  product.a = left.view().data();
  product.b = right.view().data();
  product.operands = operands;
  product.result = c.dtype();
  product.bias = addend.view().data();
  if (gelu) {
    product.c = gelu.data();
    product.before_gelu = c.data();
  }
  if (!gelu || !fuse_gelu_ || !products_library_->fuses(product)) {
    product.c = c.data();
    product.before_gelu = nullptr;
    if (bias && !products_library_->fuses(product)) product.bias = nullptr;
  }
  if (bias && product.bias == nullptr) {
    // The product is added to the bias instead, so that each element is still rounded once.
    fill(c, 0.0);
    add_bias(addend.view(), c);
    product.beta = 1;
  }
  products_library_->multiply(product, stream());
  if (gelu && product.before_gelu == nullptr) gelu_forward(c, gelu);
}

void CudaKernels::linear_forward(TensorView x, TensorView weight, TensorView bias, TensorView y) {
  const std::int64_t in = weight.dim(0), out = weight.dim(1), tokens = rows_of(x, "x", in);
  const bool wide_result = is_16bit(weight.dtype()) && y.dtype() == DType::f32;
  expect(x, "x", weight.dtype(), {tokens, in});
  expect(y, "y", wide_result ? DType::f32 : weight.dtype(), {tokens, out});
  if (bias) expect(bias, "bias", weight.dtype(), {out});
  if (tokens == 0) return;
  multiply({.rows = tokens, .columns = out, .inner = in, .a_stride = in, .b_stride = out, .c_stride = out},
           {.a = x, .b = weight, .c = y, .bias = bias, .gelu = {}});
}

void CudaKernels::linear_gelu_forward(TensorView x, TensorView weight, TensorView bias, TensorView y_pre, TensorView y) {
  const std::int64_t in = weight.dim(0), out = weight.dim(1), tokens = rows_of(x, "x", in);
  expect(x, "x", weight.dtype(), {tokens, in});
  expect(bias, "bias", weight.dtype(), {out});
  expect(y_pre, "y_pre", weight.dtype(), {tokens, out});
  expect(y, "y", weight.dtype(), {tokens, out});
  if (tokens == 0) return;
  const bool erf = pitfalls_.on(Pitfall::gelu_with_erf);
  multiply({.rows = tokens, .columns = out, .inner = in, .a_stride = in, .b_stride = out, .c_stride = out},
           {.a = x, .b = weight, .c = y_pre, .bias = bias, .gelu = erf ? TensorView() : y});
  if (erf) gelu_forward(y_pre, y);
}

void CudaKernels::linear_backward_input(TensorView dy, TensorView weight, TensorView dx) {
  const std::int64_t in = weight.dim(0), out = weight.dim(1), tokens = rows_of(dy, "dy", out);
  expect(dy, "dy", weight.dtype(), {tokens, out});
  expect(dx, "dx", weight.dtype(), {tokens, in});
  if (tokens == 0) return;
  multiply({.rows = tokens,
            .columns = in,
            .inner = out,
            .a_stride = out,
            .b_stride = out,
            .c_stride = in,
            .transpose_b = Transposed::yes},
           {.a = dy, .b = weight, .c = dx, .bias = {}, .gelu = {}});
}

void CudaKernels::linear_backward_weight(TensorView x, TensorView dy, TensorView dweight, TensorView dbias) {
  const std::int64_t in = dweight.dim(0), out = dweight.dim(1), tokens = rows_of(x, "x", in);
  if (tokens == 0) return;
  expect(x, "x", x.dtype(), {tokens, in});
  expect(dy, "dy", x.dtype(), {tokens, out});
  expect_accumulator(dweight, "dweight", x.dtype());
  if (dbias) expect(dbias, "dbias", dweight.dtype(), {out});
  multiply({.rows = in,
            .columns = out,
            .inner = tokens,
            .a_stride = in,
            .b_stride = out,
            .c_stride = out,
            .transpose_a = Transposed::yes,
            .beta = 1},
           {.a = x, .b = dy, .c = dweight, .bias = {}, .gelu = {}});
  if (dbias) bias_backward(dy, dbias);
}

void CudaKernels::head_forward(TensorView x, TensorView embedding, TensorView logits) {
  const std::int64_t vocabulary = embedding.dim(0), hidden = embedding.dim(1), tokens = rows_of(x, "x", hidden);
  expect(x, "x", embedding.dtype(), {tokens, hidden});
  expect(logits, "logits", embedding.dtype(), {tokens, vocabulary});
  if (tokens == 0) return;
  multiply({.rows = tokens,
            .columns = vocabulary,
            .inner = hidden,
            .a_stride = hidden,
            .b_stride = hidden,
            .c_stride = vocabulary,
            .transpose_b = Transposed::yes},
           {.a = x, .b = embedding, .c = logits, .bias = {}, .gelu = {}});
}

void CudaKernels::head_backward_input(TensorView dlogits, TensorView embedding, TensorView dx) {
  const std::int64_t vocabulary = embedding.dim(0), hidden = embedding.dim(1), tokens = rows_of(dlogits, "dlogits", vocabulary);
  expect(dlogits, "dlogits", embedding.dtype(), {tokens, vocabulary});
  expect(dx, "dx", embedding.dtype(), {tokens, hidden});
  if (tokens == 0) return;
  multiply(
      {.rows = tokens, .columns = hidden, .inner = vocabulary, .a_stride = vocabulary, .b_stride = hidden, .c_stride = hidden},
      {.a = dlogits, .b = embedding, .c = dx, .bias = {}, .gelu = {}});
}

void CudaKernels::head_backward_weight(TensorView x, TensorView dlogits, TensorView dembedding) {
  const std::int64_t vocabulary = dembedding.dim(0), hidden = dembedding.dim(1), tokens = rows_of(x, "x", hidden);
  if (tokens == 0) return;
  expect(x, "x", x.dtype(), {tokens, hidden});
  expect(dlogits, "dlogits", x.dtype(), {tokens, vocabulary});
  expect_accumulator(dembedding, "dembedding", x.dtype());
  multiply({.rows = vocabulary,
            .columns = hidden,
            .inner = tokens,
            .a_stride = vocabulary,
            .b_stride = hidden,
            .c_stride = hidden,
            .transpose_a = Transposed::yes,
            .beta = 1},
           {.a = dlogits, .b = x, .c = dembedding, .bias = {}, .gelu = {}});
}

}  // namespace tandem::TANDEM_GPU
