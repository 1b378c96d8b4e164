// SPDX-License-Identifier: Apache-2.0
// The only file that knows oneDNN. dnnl_sgemm (the same in versions 2 and 3) is within 5 % of packed weights on the shapes of
// training, and needs no primitive to be kept.
#include "kernels/cpu/matmul.h"

#if defined(TANDEM_HAS_ONEDNN)
#include <oneapi/dnnl/dnnl.h>
#endif

#include <fmt/format.h>

#include "core/error.h"

#if defined(TANDEM_HAS_ONEDNN)
// Of oneDNN's OpenMP runtime. Declared here because this project is compiled without OpenMP, and clang 14 cannot read g++ 12's
// <omp.h>.
extern "C" {
int omp_get_max_threads();
void omp_set_num_threads(int);
}

namespace tandem::cpu {
namespace {

/// One library thread for the calls in its scope. OpenMP keeps this number per calling thread, so it is set where the call is
/// made.
class OneLibraryThread {
 public:
  OneLibraryThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneLibraryThread() { omp_set_num_threads(before_); }
  OneLibraryThread(const OneLibraryThread&) = delete;
  OneLibraryThread& operator=(const OneLibraryThread&) = delete;

 private:
  int before_;
};

class OneDnn final : public MatrixLibrary {
 public:
  [[nodiscard]] std::string name() const override {
    const dnnl_version_t* version = dnnl_version();
    return fmt::format("oneDNN {}.{}.{}", version->major, version->minor, version->patch);
  }
  [[nodiscard]] bool has_double() const override { return false; }
  void multiply(const MatrixProduct& p, const float* a, const float* b, float* c) const override {
    const OneLibraryThread scope;
    const dnnl_status_t status = dnnl_sgemm(p.transpose_a ? 'T' : 'N', p.transpose_b ? 'T' : 'N', p.m, p.n, p.k, 1.0F, a, p.lda,
                                            b, p.ldb, p.accumulate ? 1.0F : 0.0F, c, p.ldc);
    TANDEM_CHECK(status == dnnl_success,
                 fmt::format("dnnl_sgemm of {} x {} x {}: status {}", p.m, p.n, p.k, static_cast<int>(status)));
  }
  void multiply(const MatrixProduct&, const double*, const double*, double*) const override {
    TANDEM_CHECK(false, "oneDNN has no fp64 matrix product");
  }
};

}  // namespace

std::unique_ptr<MatrixLibrary> make_onednn_library() { return std::make_unique<OneDnn>(); }

}  // namespace tandem::cpu
#else
namespace tandem::cpu {

std::unique_ptr<MatrixLibrary> make_onednn_library() { return nullptr; }

}  // namespace tandem::cpu
#endif
