// SPDX-License-Identifier: Apache-2.0
// Matrix products by cuBLASLt. The library is column-major: C = op(A) op(B) by rows is C^T = op(B)^T op(A)^T by columns, so that
// its A is our B and its rows are our columns.
#include <algorithm>
#include <bit>
#include <compare>
#include <map>
#include <optional>

#include <fmt/format.h>

#include "core/error.h"
#include "kernels/cuda/load_cublaslt.h"
#include "kernels/cuda/matmul.h"

namespace tandem::cuda_gpu {
namespace {

constexpr std::int64_t kWorkspaceBytes = 64 << 20;
constexpr int kCandidates = 16;
// The algorithms ask for 16 bytes at most. Tensors lie one behind the other: were more of it part of the key, the same product in
// another layout could get another algorithm, and other bits.
constexpr std::uint32_t kAlignment = 16;
constexpr int kFusedGeluFrom = 90;  // earlier cards do the gelu of bf16 in a kernel of its own that is slower than ours

class Description {
 public:
  Description(cublasComputeType_t compute, cudaDataType_t scale) {
    cublaslt().check(cublaslt().create_description(&handle_, compute, scale), "cublasLtMatmulDescCreate");
  }
  Description(Description&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Description& operator=(Description&&) = delete;
  ~Description() {
    if (handle_ != nullptr) static_cast<void>(cublaslt().destroy_description(handle_));
  }
  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    cublaslt().check(cublaslt().set_description(handle_, attribute, &value, sizeof(value)), "cublasLtMatmulDescSetAttribute");
  }
  [[nodiscard]] cublasLtMatmulDesc_t get() const noexcept { return handle_; }

 private:
  cublasLtMatmulDesc_t handle_ = nullptr;
};

class Layout {
 public:
  Layout(cudaDataType_t type, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
    cublaslt().check(
        cublaslt().create_layout(&handle_, type, static_cast<std::uint64_t>(rows), static_cast<std::uint64_t>(columns), stride),
        "cublasLtMatrixLayoutCreate");
  }
  Layout(Layout&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Layout& operator=(Layout&&) = delete;
  ~Layout() {
    if (handle_ != nullptr) static_cast<void>(cublaslt().destroy_layout(handle_));
  }
  [[nodiscard]] cublasLtMatrixLayout_t get() const noexcept { return handle_; }

 private:
  cublasLtMatrixLayout_t handle_ = nullptr;
};

class Preference {
 public:
  Preference() { cublaslt().check(cublaslt().create_preference(&handle_), "cublasLtMatmulPreferenceCreate"); }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
  ~Preference() { static_cast<void>(cublaslt().destroy_preference(handle_)); }
  template <class T>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
    cublaslt().check(cublaslt().set_preference(handle_, attribute, &value, sizeof(value)),
                     "cublasLtMatmulPreferenceSetAttribute");
  }
  [[nodiscard]] cublasLtMatmulPreference_t get() const noexcept { return handle_; }

 private:
  cublasLtMatmulPreference_t handle_ = nullptr;
};

cudaDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::f64: return CUDA_R_64F;
    case DType::f32: return CUDA_R_32F;
    case DType::bf16: return CUDA_R_16BF;
    case DType::f16: return CUDA_R_16F;
    default: throw ContractError(fmt::format("a matrix product of {}", name(dtype)));
  }
}

std::uint32_t alignment_of(const void* address) {
  const auto bits = reinterpret_cast<std::uintptr_t>(address) | kAlignment;
  return static_cast<std::uint32_t>(bits & (~bits + 1));
}

/// All that the choice of an algorithm depends on.
struct Key {
  std::int64_t rows, columns, inner, a_stride, b_stride, c_stride;
  Transposed transpose_a, transpose_b;
  DType operands, result;
  bool accumulates, bias, gelu;
  std::uint32_t a_alignment, b_alignment, c_alignment, bias_alignment;
  auto operator<=>(const Key&) const = default;
};

Key key_of(const Product& p) {
  return {p.rows, p.columns, p.inner, p.a_stride, p.b_stride, p.c_stride, p.transpose_a, p.transpose_b, p.operands, p.result,
          p.beta != 0, p.bias != nullptr, p.before_gelu != nullptr, alignment_of(p.a), alignment_of(p.b),
          // With an epilogue the pre-activation is written as well, with the same alignment.
          std::min(alignment_of(p.c), p.before_gelu == nullptr ? kAlignment : alignment_of(p.before_gelu)), alignment_of(p.bias)};
}

/// One shape, ready to be multiplied. `algorithm` is empty where the library has none for it.
struct Plan {
  Description description;
  Layout a, b, c;  // the library's
  std::optional<cublasLtMatmulAlgo_t> algorithm;
};

cublasComputeType_t compute_of(DType operands) { return operands == DType::f64 ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F; }

Plan plan_of(const Product& p) {
  const cudaDataType_t type = type_of(p.operands);
  const bool ta = p.transpose_a == Transposed::yes, tb = p.transpose_b == Transposed::yes;
  return {Description(compute_of(p.operands), p.operands == DType::f64 ? CUDA_R_64F : CUDA_R_32F),
          Layout(type, tb ? p.inner : p.columns, tb ? p.columns : p.inner, p.b_stride),
          Layout(type, ta ? p.rows : p.inner, ta ? p.inner : p.rows, p.a_stride),
          Layout(type_of(p.result), p.columns, p.rows, p.c_stride), std::nullopt};
}

// The pointers of the epilogue; the heuristic reads their alignment.
void set_pointers(Plan& plan, const Product& p) {
  if (p.bias != nullptr) plan.description.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
  if (p.before_gelu != nullptr) plan.description.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.before_gelu);
}

void describe(Plan& plan, const Product& p) {
  const auto operation = [](Transposed t) { return t == Transposed::yes ? CUBLAS_OP_T : CUBLAS_OP_N; };
  plan.description.set(CUBLASLT_MATMUL_DESC_TRANSA, operation(p.transpose_b));
  plan.description.set(CUBLASLT_MATMUL_DESC_TRANSB, operation(p.transpose_a));
  if (p.bias != nullptr) {
    plan.description.set(CUBLASLT_MATMUL_DESC_EPILOGUE,
                         p.before_gelu != nullptr ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_BIAS);
    plan.description.set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<std::int32_t>(type_of(p.result)));
  }
  if (p.before_gelu != nullptr) plan.description.set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.c_stride);
  set_pointers(plan, p);
}

// Split sums are added up in fp32 from the workspace, in order, by a kernel of their own (COMPUTE_TYPE): the same bits in every
// run, rounded once. The other ways add in the result's type, which rounds it once for each part; one of them in place.
bool sums_once(const cublasLtMatmulAlgo_t& algorithm) {
  std::uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_NONE;
  std::size_t written = 0;
  cublaslt().check(cublaslt().algo_config(&algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof(scheme), &written),
                   "cublasLtMatmulAlgoConfigGetAttribute");
  return scheme == CUBLASLT_REDUCTION_SCHEME_NONE || scheme == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
}

class CublasLtProducts final : public MatrixProducts {
 public:
  explicit CublasLtProducts(const DeviceInfo& device)
      : fuses_gelu_(device.architecture.starts_with("sm_") && std::stoi(device.architecture.substr(3)) >= kFusedGeluFrom) {
    use_device(device.device);
    cublaslt().check(cublaslt().create(&handle_), "cublasLtCreate");
    // One workspace for all: the products of a stream follow one another.
    allocations_ = Stream(make_stream());
    workspace_ = allocate(kWorkspaceBytes, allocations_.get());
    synchronize(allocations_.get());
  }
  CublasLtProducts(const CublasLtProducts&) = delete;
  CublasLtProducts& operator=(const CublasLtProducts&) = delete;
  ~CublasLtProducts() override {
    plans_.clear();
    static_cast<void>(cublaslt().destroy(handle_));
    release(workspace_, allocations_.get());
  }

  [[nodiscard]] bool fuses(const Product& product) override {
    if (product.bias == nullptr) return true;
    if (alignment_of(product.bias) < 16) return false;
    // The library's gelu takes the hardware's tanh, good to eleven bits: enough for bf16 alone. It wants strides of eight
    // elements.
    if (product.before_gelu != nullptr &&
        (!fuses_gelu_ || product.result != DType::bf16 || product.c_stride % 8 != 0 || alignment_of(product.before_gelu) < 16)) {
      return false;
    }
    return plan(product).algorithm.has_value();
  }

  void multiply(const Product& product, StreamHandle stream) override {
    TANDEM_CHECK(product.beta == 0 || product.bias == nullptr, "an epilogue of a product that is accumulated");
    Plan& chosen = plan(product);
    if (!chosen.algorithm) {
      throw GpuError(fmt::format("cuBLASLt has no algorithm for [{}, {}] x [{}, {}] of {} to {}", product.rows, product.inner,
                                 product.inner, product.columns, tandem::name(product.operands), tandem::name(product.result)));
    }
    set_pointers(chosen, product);
    const double one = 1, beta = product.beta;
    const auto one_f = static_cast<float>(one), beta_f = static_cast<float>(beta);
    const bool wide = product.operands == DType::f64;
    const auto* const alpha_at = wide ? static_cast<const void*>(&one) : &one_f;
    const auto* const beta_at = wide ? static_cast<const void*>(&beta) : &beta_f;
    cublaslt().check(cublaslt().matmul(handle_, chosen.description.get(), alpha_at, product.b, chosen.a.get(), product.a,
                                       chosen.b.get(), beta_at, product.c, chosen.c.get(), product.c, chosen.c.get(),
                                       &*chosen.algorithm, workspace_, kWorkspaceBytes, stream),
                     "cublasLtMatmul");
  }

  [[nodiscard]] std::string name() const override { return "cuBLASLt " + cublaslt().version(); }

 private:
  [[nodiscard]] Plan& plan(const Product& product) {
    const Key key = key_of(product);
    const auto found = plans_.find(key);
    if (found != plans_.end()) return found->second;
    Plan made = plan_of(product);
    describe(made, product);
    made.algorithm = choose(made, key);
    return plans_.emplace(key, std::move(made)).first->second;
  }

  // The first of the heuristic's list that sums as it should. Nothing is timed: what ran would depend on the run.
  [[nodiscard]] std::optional<cublasLtMatmulAlgo_t> choose(const Plan& plan, const Key& key) {
    Preference preference;
    preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(kWorkspaceBytes));
    preference.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                   static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.b_alignment);
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.a_alignment);
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.c_alignment);
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.c_alignment);
    cublasLtMatmulHeuristicResult_t results[kCandidates];
    int count = 0;
    const cublasStatus_t status = cublaslt().heuristic(handle_, plan.description.get(), plan.a.get(), plan.b.get(), plan.c.get(),
                                                       plan.c.get(), preference.get(), kCandidates, results, &count);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) return std::nullopt;
    cublaslt().check(status, "cublasLtMatmulAlgoGetHeuristic");
    for (int i = 0; i < count; ++i) {
      const cublasLtMatmulHeuristicResult_t& result = results[i];
      if (result.state == CUBLAS_STATUS_SUCCESS && result.workspaceSize <= kWorkspaceBytes && sums_once(result.algo)) {
        return result.algo;
      }
    }
    return std::nullopt;
  }

  bool fuses_gelu_;
  cublasLtHandle_t handle_ = nullptr;
  Stream allocations_;
  void* workspace_ = nullptr;
  std::map<Key, Plan> plans_;
};

}  // namespace

std::unique_ptr<MatrixProducts> make_matrix_products(const DeviceInfo& device) {
  return std::make_unique<CublasLtProducts>(device);
}

}  // namespace tandem::cuda_gpu
