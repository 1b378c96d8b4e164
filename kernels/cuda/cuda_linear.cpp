// SPDX-License-Identifier: Apache-2.0
// Which of a product's parts the matrix library does in one pass, and who does the others.
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

void CudaKernels::multiply(const ProductCall& call) {
  const auto& [shape, a, b, c, bias, gelu] = call;
  TANDEM_CHECK(a.dtype() == b.dtype(), fmt::format("a product of {} and {}", name(a.dtype()), name(b.dtype())));
  const DType operands = a.dtype() == DType::f32 ? products_ : a.dtype();  // autocast
  const Converted left(*this, a, operands), right(*this, b, operands), addend(*this, bias, c.dtype());
  Product product = {.rows = shape.m,
                     .columns = shape.n,
                     .inner = shape.k,
                     .a_stride = shape.lda,
                     .b_stride = shape.ldb,
                     .c_stride = shape.ldc,
                     .transpose_a = shape.transpose_a ? Transposed::yes : Transposed::no,
                     .transpose_b = shape.transpose_b ? Transposed::yes : Transposed::no,
                     .beta = shape.accumulate ? 1.0 : 0.0};
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

}  // namespace tandem::TANDEM_GPU
