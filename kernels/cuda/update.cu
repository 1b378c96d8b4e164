// SPDX-License-Identifier: Apache-2.0
// Optimizer steps and norms over many tensors in one launch: a block finds its tensor in a table. Threads take four neighbouring
// elements at a time, in one access per array where every address allows. Nothing is read or written twice.
#include "core/error.h"
#include "kernels/cuda/block.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/update_kernels.h"
#include "kernels/cuda/vector_access.cuh"

namespace tandem::TANDEM_GPU {
namespace {

constexpr int kThreads = 256;
constexpr int kGroup = 4;

/// For load_pack<kGroup, T>().
template <class T>
__device__ bool is_aligned(const void* address) {
  return reinterpret_cast<std::uintptr_t>(address) % (sizeof(T) == 2 ? 8 : 16) == 0;
}
__device__ inline bool is_aligned_group(const void* address, DType dtype) {
  if (dtype == DType::f64) return is_aligned<double>(address);
  return dtype == DType::f32 ? is_aligned<float>(address) : is_aligned<bf16>(address);
}

/// values = from[first .. first + kGroup), the first `count` of them; the rest 0. `whole`: there are kGroup, and they are
/// aligned.
template <class T, class Real>
__device__ void load_group(const T* from, std::int64_t first, int count, bool whole, Real (&values)[kGroup]) {
  if (whole) {
    const Pack<T, kGroup> group = load_pack<kGroup>(from + first);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) values[j] = static_cast<Real>(to_wide(group.get(j)));
  } else {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) values[j] = j < count ? static_cast<Real>(to_wide(from[first + j])) : Real(0);
  }
}

template <class T>
__device__ void store_group(T* to, std::int64_t first, int count, bool whole, const Wide<T> (&values)[kGroup]) {
  if (whole) {
    Pack<T, kGroup> group;
#pragma unroll
    for (int j = 0; j < kGroup; ++j) group.set(j, from_wide<T>(values[j]));
    store_pack(to + first, group);
  } else {
#pragma unroll
    for (int j = 0; j < kGroup; ++j) {
      if (j < count) to[first + j] = from_wide<T>(values[j]);
    }
  }
}

/// The same of an array whose dtype is known when the kernel runs.
template <class Real>
__device__ void load_any(const void* from, DType dtype, std::int64_t first, int count, bool whole, Real (&values)[kGroup]) {
  if (dtype == DType::bf16) return load_group(static_cast<const bf16*>(from), first, count, whole, values);
  if (dtype == DType::f16) return load_group(static_cast<const f16*>(from), first, count, whole, values);
  if (dtype == DType::f32) return load_group(static_cast<const float*>(from), first, count, whole, values);
  if constexpr (sizeof(Real) == sizeof(double)) load_group(static_cast<const double*>(from), first, count, whole, values);
}
__device__ inline void store_half(void* to, DType dtype, std::int64_t first, int count, bool whole,
                                  const float (&values)[kGroup]) {
  if (dtype == DType::bf16) return store_group(static_cast<bf16*>(to), first, count, whole, values);
  store_group(static_cast<f16*>(to), first, count, whole, values);
}

/// The entry that block `block` belongs to: the last one that begins at or before it and is not empty.
template <class Entry>
__device__ const Entry& entry_of_block(const Entry* entries, int num_entries, std::int64_t block) {
  int low = 0, high = num_entries;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (entries[middle].first_block <= block ? low : high) = middle;
  }
  return entries[low];
}

template <class Real>
struct AdamWNumbers {
  Real gradient_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, decay, rate, second_correction, epsilon;

  __device__ explicit AdamWNumbers(const AdamWEntry& e)
      : gradient_scale(static_cast<Real>(e.gradient_scale)),
        beta1(static_cast<Real>(e.beta1)),
        one_minus_beta1(static_cast<Real>(e.one_minus_beta1)),
        beta2(static_cast<Real>(e.beta2)),
        one_minus_beta2(static_cast<Real>(e.one_minus_beta2)),
        decay(static_cast<Real>(e.decay)),
        rate(static_cast<Real>(e.rate)),
        second_correction(static_cast<Real>(e.second_correction)),
        epsilon(static_cast<Real>(e.epsilon)) {}

  template <bool kInsideRoot>
  __device__ void update(Real gradient, Real& parameter, Real& m, Real& v) const {
    const Real g = gradient * gradient_scale;
    m = beta1 * m + one_minus_beta1 * g;
    v = beta2 * v + one_minus_beta2 * (g * g);
    const Real corrected = v * second_correction;
    const Real denominator = kInsideRoot ? sqrt(corrected + epsilon) : sqrt(corrected) + epsilon;
    parameter = parameter * decay - rate * (m / denominator);
  }
};

template <class Real, bool kInsideRoot>
__global__ void __launch_bounds__(kThreads) adamw_kernel(const AdamWEntry* entries, int num_entries) {
  const AdamWEntry& entry = entry_of_block(entries, num_entries, blockIdx.x);
  const AdamWNumbers<Real> numbers(entry);
  auto* const parameter = static_cast<Real*>(entry.parameter);
  auto* const m = static_cast<Real*>(entry.m);
  auto* const v = static_cast<Real*>(entry.v);
  const void* const gradient = entry.gradient;
  void* const stored = entry.stored;
  const DType gradient_dtype = entry.gradient_dtype, stored_dtype = entry.stored_dtype;
  const bool aligned = is_aligned<Real>(parameter) && is_aligned<Real>(m) && is_aligned<Real>(v) &&
                       is_aligned_group(gradient, gradient_dtype) && (stored == nullptr || is_aligned<bf16>(stored));
  const std::int64_t begin = (blockIdx.x - entry.first_block) * kUpdateBlock;
  const std::int64_t end = begin + kUpdateBlock < entry.count ? begin + kUpdateBlock : entry.count;
  for (std::int64_t first = begin + threadIdx.x * kGroup; first < end; first += kThreads * kGroup) {
    const int count = end - first < kGroup ? static_cast<int>(end - first) : kGroup;
    const bool whole = aligned && count == kGroup;
    Real p[kGroup], first_moment[kGroup], second_moment[kGroup], g[kGroup];
    load_group(parameter, first, count, whole, p);
    load_group(m, first, count, whole, first_moment);
    load_group(v, first, count, whole, second_moment);
    load_any(gradient, gradient_dtype, first, count, whole, g);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) numbers.template update<kInsideRoot>(g[j], p[j], first_moment[j], second_moment[j]);
    store_group(parameter, first, count, whole, p);
    store_group(m, first, count, whole, first_moment);
    store_group(v, first, count, whole, second_moment);
    if constexpr (sizeof(Real) == sizeof(float)) {
      if (stored != nullptr) store_half(stored, stored_dtype, first, count, whole, p);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) sgd_kernel(SgdArguments arguments) {
  using Real = Wide<T>;
  auto* const parameter = static_cast<T*>(arguments.parameter);
  const bool aligned = is_aligned<T>(parameter) && is_aligned_group(arguments.gradient, arguments.gradient_dtype) &&
                       (arguments.stored == nullptr || is_aligned<bf16>(arguments.stored));
  const auto decay = static_cast<Real>(arguments.decay), rate = static_cast<Real>(arguments.rate);
  const std::int64_t begin = blockIdx.x * kUpdateBlock;
  const std::int64_t end = begin + kUpdateBlock < arguments.count ? begin + kUpdateBlock : arguments.count;
  for (std::int64_t first = begin + threadIdx.x * kGroup; first < end; first += kThreads * kGroup) {
    const int count = end - first < kGroup ? static_cast<int>(end - first) : kGroup;
    const bool whole = aligned && count == kGroup;
    Real p[kGroup], g[kGroup];
    load_group(parameter, first, count, whole, p);
    load_any(arguments.gradient, arguments.gradient_dtype, first, count, whole, g);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) p[j] = p[j] * decay - rate * g[j];
    store_group(parameter, first, count, whole, p);
    if constexpr (sizeof(Real) == sizeof(float)) {
      if (arguments.stored != nullptr) store_half(arguments.stored, arguments.stored_dtype, first, count, whole, p);
    }
  }
}

/// Of elements [begin, end) of x. Thread t adds the squares of its groups in order, wherever x lies.
template <class T>
__device__ double squares_of(const T* x, std::int64_t begin, std::int64_t end) {
  const bool aligned = is_aligned<T>(x);
  double sum = 0;
#pragma unroll 4
  for (std::int64_t first = begin + threadIdx.x * kGroup; first < end; first += kThreads * kGroup) {
    const int count = end - first < kGroup ? static_cast<int>(end - first) : kGroup;
    Wide<T> values[kGroup];
    load_group(x, first, count, aligned && count == kGroup, values);
#pragma unroll
    for (int j = 0; j < kGroup; ++j) sum += static_cast<double>(values[j]) * static_cast<double>(values[j]);
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads) squares_kernel(const NormEntry* entries, int num_entries, double* parts) {
  const NormEntry& entry = entry_of_block(entries, num_entries, blockIdx.x);
  const std::int64_t begin = (blockIdx.x - entry.first_block) * kNormBlock;
  const std::int64_t end = begin + kNormBlock < entry.count ? begin + kNormBlock : entry.count;
  double sum = 0;
  switch (entry.dtype) {
    case DType::f64: sum = squares_of(static_cast<const double*>(entry.data), begin, end); break;
    case DType::f32: sum = squares_of(static_cast<const float*>(entry.data), begin, end); break;
    case DType::bf16: sum = squares_of(static_cast<const bf16*>(entry.data), begin, end); break;
    default: sum = squares_of(static_cast<const f16*>(entry.data), begin, end); break;
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// One block a tensor; thread t adds a run of parts in order.
__global__ void __launch_bounds__(kThreads) add_squares_kernel(const NormEntry* entries, const double* parts, double* norms) {
  const NormEntry& entry = entries[blockIdx.x];
  const std::int64_t count = (entry.count + kNormBlock - 1) / kNormBlock, run = (count + kThreads - 1) / kThreads;
  const std::int64_t begin = threadIdx.x * run, end = begin + run < count ? begin + run : count;
  double sum = 0;
  for (std::int64_t i = begin; i < end; ++i) sum += parts[entry.first_block + i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) norms[blockIdx.x] = sum;
}

dim3 grid_of(std::int64_t blocks) { return dim3(static_cast<unsigned>(blocks)); }

}  // namespace

void launch_adamw(DType dtype, const AdamWEntry* entries, int num_entries, std::int64_t blocks, Epsilon epsilon,
                  StreamHandle stream) {
  const auto start = [&](auto kernel) { launch(kernel, grid_of(blocks), dim3(kThreads), 0, stream, entries, num_entries); };
  if (dtype == DType::f64) {
    epsilon == Epsilon::inside_root ? start(adamw_kernel<double, true>) : start(adamw_kernel<double, false>);
  } else {
    epsilon == Epsilon::inside_root ? start(adamw_kernel<float, true>) : start(adamw_kernel<float, false>);
  }
}

void launch_sgd(DType dtype, const SgdArguments& arguments, StreamHandle stream) {
  with_storage(dtype, [&]<class T>(T) {
    launch(sgd_kernel<T>, grid_of(blocks_of(arguments.count, kUpdateBlock)), dim3(kThreads), 0, stream, arguments);
  });
}

void launch_squares(const NormEntry* entries, int num_entries, std::int64_t blocks, double* parts, StreamHandle stream) {
  launch(squares_kernel, grid_of(blocks), dim3(kThreads), 0, stream, entries, num_entries, parts);
}

void launch_add_squares(const NormEntry* entries, int num_entries, const double* parts, double* norms, StreamHandle stream) {
  launch(add_squares_kernel, grid_of(num_entries), dim3(kThreads), 0, stream, entries, parts, norms);
}

}  // namespace tandem::TANDEM_GPU
