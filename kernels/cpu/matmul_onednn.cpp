// SPDX-License-Identifier: Apache-2.0
// The only file that knows oneDNN. For fp32, dnnl_sgemm (the same in versions 2 and 3) is within 5 % of packed weights on the
// shapes of training, and needs no primitive to be kept.
#include "kernels/cpu/matmul.h"

#if defined(TANDEM_HAS_ONEDNN)
#include <oneapi/dnnl/dnnl.h>
#endif

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

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

void check(dnnl_status_t status, const MatrixProduct& p) {
  TANDEM_CHECK(status == dnnl_success,
               fmt::format("oneDNN product of {} x {} x {}: status {}", p.m, p.n, p.k, static_cast<int>(status)));
}

/// The C handles of the library, destroyed with their owner.
template <class Handle, dnnl_status_t (*destroy)(Handle)>
class Owned {
 public:
  Owned() = default;
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (handle_ != nullptr) destroy(handle_);
  }
  [[nodiscard]] Handle get() const { return handle_; }
  [[nodiscard]] Handle* out() { return &handle_; }

 private:
  Handle handle_ = nullptr;
};

using Engine = Owned<dnnl_engine_t, dnnl_engine_destroy>;
using Stream = Owned<dnnl_stream_t, dnnl_stream_destroy>;
using Memory = Owned<dnnl_memory_t, dnnl_memory_destroy>;
using Primitive = Owned<dnnl_primitive_t, dnnl_primitive_destroy>;
using PrimitiveDesc = Owned<dnnl_primitive_desc_t, dnnl_primitive_desc_destroy>;
using Attributes = Owned<dnnl_primitive_attr_t, dnnl_primitive_attr_destroy>;
using PostOps = Owned<dnnl_post_ops_t, dnnl_post_ops_destroy>;

/// A product with bf16 operands and an fp32 result, as the library describes it. Throws ContractError where it refuses.
class Bf16Description {
 public:
  Bf16Description(dnnl_engine_t engine, const MatrixProduct& p) : product_(p) { describe(engine); }
  [[nodiscard]] const_dnnl_primitive_desc_t get() const { return desc_.get(); }

 private:
  using Pair = std::array<dnnl_dim_t, 2>;

  void describe(dnnl_engine_t engine) {
    const MatrixProduct& p = product_;
    const Pair a_strides = p.transpose_a ? Pair{1, p.lda} : Pair{p.lda, 1};
    const Pair b_strides = p.transpose_b ? Pair{1, p.ldb} : Pair{p.ldb, 1};
    Attributes attributes;
    PostOps post_ops;
    check(dnnl_primitive_attr_create(attributes.out()), p);
    check(dnnl_primitive_attr_set_scratchpad_mode(attributes.get(), dnnl_scratchpad_mode_user), p);
    check(dnnl_post_ops_create(post_ops.out()), p);
    if (p.accumulate) check(append_sum(post_ops.get()), p);
    check(dnnl_primitive_attr_set_post_ops(attributes.get(), post_ops.get()), p);
    create_desc(engine, attributes.get(), {p.m, p.k}, a_strides, {p.k, p.n}, b_strides, {p.m, p.n}, {p.ldc, 1});
  }

#if DNNL_VERSION_MAJOR >= 3
  using MemoryDesc = Owned<dnnl_memory_desc_t, dnnl_memory_desc_destroy>;

  static dnnl_status_t append_sum(dnnl_post_ops_t post_ops) {
    return dnnl_post_ops_append_sum(post_ops, 1.0F, 0, dnnl_data_type_undef);
  }
  void create_desc(dnnl_engine_t engine, dnnl_primitive_attr_t attributes, Pair a, Pair a_strides, Pair b, Pair b_strides, Pair c,
                   Pair c_strides) {
    MemoryDesc src, weights, dst;
    check(dnnl_memory_desc_create_with_strides(src.out(), 2, a.data(), dnnl_bf16, a_strides.data()), product_);
    check(dnnl_memory_desc_create_with_strides(weights.out(), 2, b.data(), dnnl_bf16, b_strides.data()), product_);
    check(dnnl_memory_desc_create_with_strides(dst.out(), 2, c.data(), dnnl_f32, c_strides.data()), product_);
    check(dnnl_matmul_primitive_desc_create(desc_.out(), engine, src.get(), weights.get(), nullptr, dst.get(), attributes),
          product_);
  }
#else
  static dnnl_status_t append_sum(dnnl_post_ops_t post_ops) { return dnnl_post_ops_append_sum(post_ops, 1.0F); }
  void create_desc(dnnl_engine_t engine, dnnl_primitive_attr_t attributes, Pair a, Pair a_strides, Pair b, Pair b_strides, Pair c,
                   Pair c_strides) {
    dnnl_memory_desc_t src, weights, dst;
    dnnl_matmul_desc_t matmul;
    check(dnnl_memory_desc_init_by_strides(&src, 2, a.data(), dnnl_bf16, a_strides.data()), product_);
    check(dnnl_memory_desc_init_by_strides(&weights, 2, b.data(), dnnl_bf16, b_strides.data()), product_);
    check(dnnl_memory_desc_init_by_strides(&dst, 2, c.data(), dnnl_f32, c_strides.data()), product_);
    check(dnnl_matmul_desc_init(&matmul, &src, &weights, nullptr, &dst), product_);
    check(dnnl_primitive_desc_create(desc_.out(), &matmul, attributes, engine, nullptr), product_);
  }
#endif

  MatrixProduct product_;
  PrimitiveDesc desc_;
};

/// One oneDNN primitive with the memory that it works in: used by one thread at a time.
class Bf16Product {
 public:
  Bf16Product(dnnl_engine_t engine, const MatrixProduct& p) : product_(p), desc_(engine, p) {
    check(dnnl_primitive_create(primitive_.out(), desc_.get()), p);
    check(dnnl_stream_create(stream_.out(), engine, dnnl_stream_default_flags), p);
    static constexpr std::array kQueries = {dnnl_query_src_md, dnnl_query_weights_md, dnnl_query_dst_md};
    for (std::size_t i = 0; i < kQueries.size(); ++i) {
      check(dnnl_memory_create(operands_[i].out(), dnnl_primitive_desc_query_md(desc_.get(), kQueries[i], 0), engine,
                               DNNL_MEMORY_NONE),
            p);
    }
    check(dnnl_memory_create(scratchpad_.out(), dnnl_primitive_desc_query_md(desc_.get(), dnnl_query_scratchpad_md, 0), engine,
                             DNNL_MEMORY_ALLOCATE),
          p);
  }

  void run(const std::uint16_t* a, const std::uint16_t* b, float* c) const {
    // The handles are of memory that may be written; operands are only read.
    const std::array<void*, 3> data = {const_cast<std::uint16_t*>(a), const_cast<std::uint16_t*>(b), c};
    for (std::size_t i = 0; i < data.size(); ++i) check(dnnl_memory_set_data_handle(operands_[i].get(), data[i]), product_);
    const std::array<dnnl_exec_arg_t, 4> arguments = {{{DNNL_ARG_SRC, operands_[0].get()},
                                                       {DNNL_ARG_WEIGHTS, operands_[1].get()},
                                                       {DNNL_ARG_DST, operands_[2].get()},
                                                       {DNNL_ARG_SCRATCHPAD, scratchpad_.get()}}};
    check(dnnl_primitive_execute(primitive_.get(), stream_.get(), static_cast<int>(arguments.size()), arguments.data()),
          product_);
    check(dnnl_stream_wait(stream_.get()), product_);
  }

 private:
  MatrixProduct product_;
  Bf16Description desc_;
  Primitive primitive_;
  Stream stream_;
  std::array<Memory, 3> operands_;
  Memory scratchpad_;
};

/// Primitives by shape. Making one costs up to milliseconds, and training repeats its shapes.
class Bf16Products {
 public:
  /// Throws ContractError where the library refuses such products.
  Bf16Products() {
    TANDEM_CHECK(dnnl_engine_create(engine_.out(), dnnl_cpu, 0) == dnnl_success, "oneDNN has no CPU engine");
    (void)Bf16Description(engine_.get(), {.m = 64, .n = 64, .k = 64, .lda = 64, .ldb = 64, .ldc = 64});
  }

  void multiply(const MatrixProduct& product, const std::uint16_t* a, const std::uint16_t* b, float* c) {
    std::unique_ptr<Bf16Product> primitive = take(product);
    if (primitive == nullptr) primitive = std::make_unique<Bf16Product>(engine_.get(), product);
    primitive->run(a, b, c);
    give_back(product, std::move(primitive));
  }

 private:
  static constexpr std::size_t kMostKept = 128;  // shapes; experts bring a new one with each number of tokens

  std::unique_ptr<Bf16Product> take(const MatrixProduct& product) {
    const std::lock_guard lock(mutex_);
    const auto found = idle_.find(product);
    if (found == idle_.end() || found->second.empty()) return nullptr;
    std::unique_ptr<Bf16Product> primitive = std::move(found->second.back());
    found->second.pop_back();
    return primitive;
  }
  void give_back(const MatrixProduct& product, std::unique_ptr<Bf16Product> primitive) {
    const std::lock_guard lock(mutex_);
    if (idle_.size() >= kMostKept) idle_.clear();
    idle_[product].push_back(std::move(primitive));
  }

  Engine engine_;
  std::mutex mutex_;
  std::map<MatrixProduct, std::vector<std::unique_ptr<Bf16Product>>> idle_;
};

/// Whether the library would use the machine's bf16 instructions. Without them it emulates, slower than fp32.
bool has_bf16_instructions() {
  constexpr auto kBf16 = static_cast<unsigned>(dnnl_cpu_isa_avx512_core_bf16);
  const auto isa = static_cast<unsigned>(dnnl_get_effective_cpu_isa());
  return (isa & kBf16) == kBf16;  // instruction sets are bits: a wider set contains the narrower ones' bits
}

/// Null where products of bf16 gain nothing or are refused.
std::unique_ptr<Bf16Products> make_bf16_products() {
  if (!has_bf16_instructions()) return nullptr;
  try {
    return std::make_unique<Bf16Products>();
  } catch (const ContractError&) {
    return nullptr;
  }
}

class OneDnn final : public MatrixLibrary {
 public:
  [[nodiscard]] std::string name() const override {
    const dnnl_version_t* version = dnnl_version();
    return fmt::format("oneDNN {}.{}.{}", version->major, version->minor, version->patch);
  }
  [[nodiscard]] bool has_double() const override { return false; }
  void multiply(const MatrixProduct& p, const float* a, const float* b, float* c) const override {
    const OneLibraryThread scope;
    check(dnnl_sgemm(p.transpose_a ? 'T' : 'N', p.transpose_b ? 'T' : 'N', p.m, p.n, p.k, 1.0F, a, p.lda, b, p.ldb,
                     p.accumulate ? 1.0F : 0.0F, c, p.ldc),
          p);
  }
  void multiply(const MatrixProduct&, const double*, const double*, double*) const override {
    TANDEM_CHECK(false, "oneDNN has no fp64 matrix product");
  }
  [[nodiscard]] bool has_bf16() const override { return bf16_ != nullptr; }
  void multiply(const MatrixProduct& product, const std::uint16_t* a, const std::uint16_t* b, float* c) const override {
    TANDEM_CHECK(bf16_ != nullptr, "this machine has no bf16 instructions");
    const OneLibraryThread scope;
    bf16_->multiply(product, a, b, c);
  }

 private:
  std::unique_ptr<Bf16Products> bf16_ = make_bf16_products();
};

}  // namespace

std::unique_ptr<MatrixLibrary> make_onednn_library() { return std::make_unique<OneDnn>(); }

}  // namespace tandem::cpu
#else
namespace tandem::cpu {

std::unique_ptr<MatrixLibrary> make_onednn_library() { return nullptr; }

}  // namespace tandem::cpu
#endif
