// SPDX-License-Identifier: Apache-2.0
// The only file that knows OpenBLAS.
#include "kernels/cpu/matmul.h"

#if defined(TANDEM_HAS_OPENBLAS)
#include <cblas.h>
#endif

#include <limits>
#include <mutex>
#include <sstream>

#include <fmt/format.h>

#include "core/error.h"

namespace tandem::cpu {

#if defined(TANDEM_HAS_OPENBLAS)
namespace {

blasint to_blas(std::int64_t value) {
  TANDEM_CHECK(value <= std::numeric_limits<blasint>::max(),
               fmt::format("a side of {} is beyond this OpenBLAS's integers", value));
  return static_cast<blasint>(value);
}

class OpenBlas final : public MatrixLibrary {
 public:
  [[nodiscard]] std::string name() const override {
    std::istringstream configuration(openblas_get_config());  // "OpenBLAS 0.3.21 DYNAMIC_ARCH ..."
    std::string library, version;
    configuration >> library >> version;
    return library + " " + version;
  }
  [[nodiscard]] bool has_double() const override { return true; }
  void multiply(const MatrixProduct& p, const float* a, const float* b, float* c) const override {
    cblas_sgemm(CblasRowMajor, transposed(p.transpose_a), transposed(p.transpose_b), to_blas(p.m), to_blas(p.n), to_blas(p.k),
                1.0F, a, to_blas(p.lda), b, to_blas(p.ldb), p.accumulate ? 1.0F : 0.0F, c, to_blas(p.ldc));
  }
  void multiply(const MatrixProduct& p, const double* a, const double* b, double* c) const override {
    cblas_dgemm(CblasRowMajor, transposed(p.transpose_a), transposed(p.transpose_b), to_blas(p.m), to_blas(p.n), to_blas(p.k),
                1.0, a, to_blas(p.lda), b, to_blas(p.ldb), p.accumulate ? 1.0 : 0.0, c, to_blas(p.ldc));
  }

 private:
  static CBLAS_TRANSPOSE transposed(bool yes) { return yes ? CblasTrans : CblasNoTrans; }
};

}  // namespace

std::unique_ptr<MatrixLibrary> make_openblas_library() {
  // The number is the process's, not the thread's: set once, before the first product, never while one runs.
  static std::once_flag single_threaded;
  std::call_once(single_threaded, [] { openblas_set_num_threads(1); });
  return std::make_unique<OpenBlas>();
}
#else
std::unique_ptr<MatrixLibrary> make_openblas_library() { return nullptr; }
#endif

}  // namespace tandem::cpu
