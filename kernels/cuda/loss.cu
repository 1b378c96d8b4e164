// SPDX-License-Identifier: Apache-2.0
// Cross-entropy: a block takes a row of logits. Element i of a row belongs to thread i % kThreads, wherever the row lies in
// memory, so that equal rows give equal bits. A row of a vocabulary of 50 thousand is 100 KB in 16 bits and fits a
// multiprocessor's shared memory twice: it is copied there in the pieces of 16 bytes that its address allows, turned into
// gradients there, and copied back, one block computing while the other one waits for memory.
#include "core/batch.h"
#include "kernels/cuda/block.cuh"
#include "kernels/cuda/loss_kernels.h"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/vector_access.cuh"

namespace tandem::TANDEM_GPU {
namespace {

/// Elements of a thread that are under way together, and share one look at the running maximum.
template <class Real>
constexpr int kBatchOf = sizeof(Real) == 8 ? 4 : 8;
constexpr int kPieceBytes = 16;
constexpr int kReservedShared = 2048;  // of reductions, beside the row
constexpr int kTotalThreads = 1024;

// NaN is left out: it ends up in the sum.
__device__ inline float maximum(float a, float b) { return fmaxf(a, b); }
__device__ inline double maximum(double a, double b) { return fmax(a, b); }

/// -inf has no place in the running maximum, since -inf - -inf is no number; the least finite number serves as well.
template <class Real>
struct Least;
template <>
struct Least<float> {
  static constexpr float value = -3.402823466e38F;
};
template <>
struct Least<double> {
  static constexpr double value = -1.7976931348623157e308;
};

/// exp(x) for x <= 0. What is stored in 16 bits takes the hardware's 2^x: a relative error of 2^-21 |x|, a third of the
/// instructions.
template <class T>
struct Exponential {
  __device__ static float of(float x) {
    constexpr float kLog2E = 1.44269504F;
#ifdef __CUDA_ARCH__
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * kLog2E));
    return result;
#else
    return exp2f(x * kLog2E);
#endif
  }
};
template <>
struct Exponential<float> {
  __device__ static float of(float x) { return expf(x); }
};
template <>
struct Exponential<double> {
  __device__ static double of(double x) { return exp(x); }
};

template <class Real>
struct SoftmaxSum {
  Real largest = Least<Real>::value;
  double sum = 0;  // of exp(x - largest)
};

/// Over the block; every thread gets it. NaN and infinity end up in the sum as NaN.
template <int kThreads, class T>
__device__ SoftmaxSum<Wide<T>> softmax_sum(const T* row, int columns) {
  using Real = Wide<T>;
  constexpr int kBatch = kBatchOf<Real>;
  Real largest = Least<Real>::value, sum = 0;
  const auto take = [&](const Real(&x)[kBatch]) {
    Real most = largest;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) most = maximum(most, x[j]);
    Real part = 0;
#pragma unroll
    for (int j = 0; j < kBatch; ++j) part += Exponential<T>::of(x[j] - most);
    sum = sum * Exponential<T>::of(largest - most) + part;
    largest = most;
  };
  Real x[kBatch];
  int first = 0;
  for (; first + kBatch * kThreads <= columns; first += kBatch * kThreads) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) x[j] = to_wide(row[first + j * kThreads + static_cast<int>(threadIdx.x)]);
    take(x);
  }
  if (first < columns) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = first + j * kThreads + static_cast<int>(threadIdx.x);
      x[j] = i < columns ? to_wide(row[i]) : -static_cast<Real>(INFINITY);
    }
    take(x);
  }
  SoftmaxSum<Real> result;
  result.largest = block_max(largest);
  result.sum = block_sum(static_cast<double>(sum * Exponential<T>::of(largest - result.largest)));
  return result;
}

/// x = exp(x - largest) * factor, each thread its own elements.
template <int kThreads, class T>
__device__ void to_gradient(T* x, int columns, Wide<T> largest, Wide<T> factor) {
  constexpr int kBatch = kBatchOf<Wide<T>>;
  const auto gradient = [&](Wide<T> logit) { return from_wide<T>(Exponential<T>::of(logit - largest) * factor); };
  int i = static_cast<int>(threadIdx.x);
  for (; i + (kBatch - 1) * kThreads < columns; i += kBatch * kThreads) {
    Wide<T> logits[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) logits[j] = to_wide(x[i + j * kThreads]);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) x[i + j * kThreads] = gradient(logits[j]);
  }
  for (; i < columns; i += kThreads) x[i] = gradient(to_wide(x[i]));
}

/// A row where the block works on it: itself in global memory, or a copy in shared memory that lies at the same address modulo
/// 16, so that whole pieces can be copied.
template <bool kHeld, class T>
class Row {
 public:
  __device__ Row(T* global, int columns, uint4* shared) : global_(global), columns_(columns) {
    if constexpr (kHeld) {
      const int shift = static_cast<int>(reinterpret_cast<std::uintptr_t>(global) % kPieceBytes);
      local_ = reinterpret_cast<T*>(reinterpret_cast<unsigned char*>(shared) + shift);
      const int head = (kPieceBytes - shift) % kPieceBytes / static_cast<int>(sizeof(T));
      head_ = head < columns ? head : columns;
      pieces_ = (columns - head_) / kPerVector<T>;
    } else {
      local_ = global;
    }
  }
  [[nodiscard]] __device__ T* data() const { return local_; }

  __device__ void load() const {
    if constexpr (kHeld) {
      for (int p = static_cast<int>(threadIdx.x); p < pieces_; p += static_cast<int>(blockDim.x)) {
        copy_async_16(local_ + head_ + p * kPerVector<T>, global_ + head_ + p * kPerVector<T>);
      }
      copy_async_commit();
      for_ends([&](int i) { local_[i] = global_[i]; });
      copy_async_wait<0>();
      __syncthreads();
    }
  }
  __device__ void store() const {
    if constexpr (kHeld) {
      __syncthreads();
      for (int p = static_cast<int>(threadIdx.x); p < pieces_; p += static_cast<int>(blockDim.x)) {
        store_pack(global_ + head_ + p * kPerVector<T>, load_pack<kPerVector<T>>(local_ + head_ + p * kPerVector<T>));
      }
      for_ends([&](int i) { global_[i] = local_[i]; });
    }
  }

 private:
  template <class Use>
  __device__ void for_ends(const Use& use) const {
    const int thread = static_cast<int>(threadIdx.x), tail = head_ + pieces_ * kPerVector<T>;
    if (thread < head_) use(thread);
    if (tail + thread < columns_) use(tail + thread);
  }

  T* global_;
  int columns_;
  T* local_ = nullptr;
  int head_ = 0, pieces_ = 0;
};

template <class T>
__device__ void set_zero(T* row, std::int64_t begin, std::int64_t end) {
  for (std::int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) row[i] = from_wide<T>(Wide<T>(0));
}

struct LossArguments {
  std::int64_t width;
  const std::int32_t* targets;
  double scale;
  double* losses;
};

// One block a row.
template <class T, int kThreads, bool kHeld, bool kGradient>
__global__ void __launch_bounds__(kThreads) cross_entropy_kernel(T* logits, LossArguments arguments) {
  using Real = Wide<T>;
  GPU_DYNAMIC_SHARED(uint4, shared);
  const std::int64_t row_index = blockIdx.x;
  const int columns = static_cast<int>(arguments.width);
  T* const global = logits + row_index * arguments.width;
  const std::int32_t target = arguments.targets[row_index];
  if (target == kIgnoredTarget) {
    if (threadIdx.x == 0) arguments.losses[row_index] = 0;
    if constexpr (kGradient) set_zero(global, 0, columns);
    return;
  }
  const Row<kHeld, T> row(global, columns, shared);
  row.load();
  T* const x = row.data();
  const Real target_logit = to_wide(x[target]);
  const SoftmaxSum<Real> softmax = softmax_sum<kThreads>(x, columns);
  if (threadIdx.x == 0) {
    arguments.losses[row_index] = log(softmax.sum) + static_cast<double>(softmax.largest) - static_cast<double>(target_logit);
  }
  if constexpr (kGradient) {
    const auto scale = static_cast<Real>(arguments.scale);
    const auto factor = static_cast<Real>(static_cast<double>(scale) / softmax.sum);
    to_gradient<kThreads>(x, columns, softmax.largest, factor);
    if (target % kThreads == static_cast<int>(threadIdx.x)) {  // its own element, once more
      x[target] = from_wide<T>(Exponential<T>::of(target_logit - softmax.largest) * factor - scale);
    }
    row.store();
  }
}

template <class T, int kThreads, bool kHeld>
__global__ void __launch_bounds__(kThreads)
    statistics_kernel(T* logits, std::int64_t width, int columns, const std::int32_t* targets, Wide<T>* statistics) {
  using Real = Wide<T>;
  GPU_DYNAMIC_SHARED(uint4, shared);
  const std::int64_t row_index = blockIdx.x;
  const Row<kHeld, T> row(logits + row_index * width, columns, shared);
  row.load();
  const SoftmaxSum<Real> softmax = softmax_sum<kThreads>(row.data(), columns);
  if (threadIdx.x == 0) {
    const std::int32_t target = targets[row_index];
    const bool none = softmax.sum == 0;
    statistics[3 * row_index] = none ? -static_cast<Real>(INFINITY) : softmax.largest;
    statistics[3 * row_index + 1] = static_cast<Real>(softmax.sum);
    statistics[3 * row_index + 2] = target < 0 ? Real(0) : to_wide(row.data()[target]);
  }
}

struct GradientArguments {
  std::int64_t width;
  int columns;
  const std::int32_t* targets;
  const std::uint8_t* valid;
  double scale;
};

// One block a row; pieces of 16 bytes where the row's address allows.
template <class T>
__global__ void __launch_bounds__(512) softmax_gradient_kernel(T* logits, const Wide<T>* logsumexp, GradientArguments arguments) {
  using Real = Wide<T>;
  constexpr int kPiece = kPerVector<T>;
  const std::int64_t row_index = blockIdx.x;
  T* const row = logits + row_index * arguments.width;
  const int columns = arguments.valid[row_index] != 0 ? arguments.columns : 0;
  const Real shift = logsumexp[row_index];
  const auto scale = static_cast<Real>(arguments.scale);
  const std::int32_t target = arguments.targets[row_index];
  const auto gradient = [&](T logit, int column) {
    const Real share = scale * Exponential<T>::of(to_wide(logit) - shift);
    return from_wide<T>(column == target ? share - scale : share);
  };
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int misaligned = static_cast<int>(reinterpret_cast<std::uintptr_t>(row) % kPieceBytes);
  const int head_wanted = (kPieceBytes - misaligned) % kPieceBytes / static_cast<int>(sizeof(T));
  const int head = head_wanted < columns ? head_wanted : columns, pieces = (columns - head) / kPiece;
  const int tail = head + pieces * kPiece;
  for (int p = thread; p < pieces; p += threads) {
    Pack<T, kPiece> piece = load_pack<kPiece>(row + head + p * kPiece);
#pragma unroll
    for (int j = 0; j < kPiece; ++j) piece.set(j, gradient(piece.get(j), head + p * kPiece + j));
    store_pack(row + head + p * kPiece, piece);
  }
  if (thread < head) row[thread] = gradient(row[thread], thread);
  if (tail + thread < columns) row[tail + thread] = gradient(row[tail + thread], tail + thread);
  set_zero(row, columns, arguments.width);
}

__global__ void __launch_bounds__(kTotalThreads) add_losses_kernel(const double* losses, std::int64_t rows, double* total) {
  const std::int64_t run = (rows + kTotalThreads - 1) / kTotalThreads, begin = threadIdx.x * run;
  const std::int64_t end = begin + run < rows ? begin + run : rows;
  double sum = 0;
  for (std::int64_t row = begin; row < end; ++row) sum += losses[row];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *total = sum;
}

template <int kValue>
struct Threads {
  static constexpr int value = kValue;
};
template <bool kValue>
struct Held {
  static constexpr bool value = kValue;
};

/// use(T{}, Threads<>, Held<>, bytes of shared memory) for rows of `columns` elements. Two blocks of 512 threads share a
/// multiprocessor where rows have 16 bits; one of 1024 has it alone where they have more.
template <class Use>
void with_row_shape(const LogitRows& rows, std::int64_t columns, int shared_limit, const Use& use) {
  with_storage(rows.dtype, [&]<class T>(T) {
    constexpr std::int64_t kFew = 4096;
    const std::int64_t bytes = (columns * static_cast<std::int64_t>(sizeof(T)) + kPieceBytes - 1) / kPieceBytes * kPieceBytes +
                               kPieceBytes;  // a row may begin anywhere in its first piece
    if (bytes + kReservedShared > shared_limit) {
      use(T{}, Threads<1024>{}, Held<false>{}, 0);
    } else if (columns <= kFew) {
      use(T{}, Threads<128>{}, Held<true>{}, static_cast<int>(bytes));
    } else {
      use(T{}, Threads < sizeof(T) == 2 ? 512 : 1024 > {}, Held<true>{}, static_cast<int>(bytes));
    }
  });
}

dim3 one_block_each(std::int64_t rows) { return dim3(static_cast<unsigned>(rows)); }

}  // namespace

void launch_cross_entropy(const LogitRows& rows, const std::int32_t* targets, Gradient gradient, double scale, double* losses,
                          int shared_limit, StreamHandle stream) {
  const LossArguments arguments{rows.width, targets, scale, losses};
  with_row_shape(rows, rows.width, shared_limit, [&]<class T, class Count, class Hold>(T, Count, Hold, int shared) {
    constexpr int kThreads = Count::value;
    auto* const logits = static_cast<T*>(rows.logits);
    if (gradient == Gradient::in_place) {
      launch(cross_entropy_kernel<T, kThreads, Hold::value, true>, one_block_each(rows.rows), dim3(kThreads), shared, stream,
             logits, arguments);
    } else {
      launch(cross_entropy_kernel<T, kThreads, Hold::value, false>, one_block_each(rows.rows), dim3(kThreads), shared, stream,
             logits, arguments);
    }
  });
}

void launch_add_losses(const double* losses, std::int64_t rows, double* total, StreamHandle stream) {
  launch(add_losses_kernel, dim3(1), dim3(kTotalThreads), 0, stream, losses, rows, total);
}

void launch_softmax_statistics(const LogitRows& rows, const std::int32_t* targets, void* statistics, int shared_limit,
                               StreamHandle stream) {
  with_row_shape(rows, rows.columns, shared_limit, [&]<class T, class Count, class Hold>(T, Count, Hold, int shared) {
    constexpr int kThreads = Count::value;
    launch(statistics_kernel<T, kThreads, Hold::value>, one_block_each(rows.rows), dim3(kThreads), shared, stream,
           static_cast<T*>(rows.logits), rows.width, static_cast<int>(rows.columns), targets, static_cast<Wide<T>*>(statistics));
  });
}

void launch_softmax_gradient(const LogitRows& rows, const std::int32_t* targets, const std::uint8_t* valid, const void* logsumexp,
                             double scale, StreamHandle stream) {
  const GradientArguments arguments{rows.width, static_cast<int>(rows.columns), targets, valid, scale};
  const int threads = rows.columns <= 4096 ? 128 : 512;
  with_storage(rows.dtype, [&]<class T>(T) {
    launch(softmax_gradient_kernel<T>, one_block_each(rows.rows), dim3(static_cast<unsigned>(threads)), 0, stream,
           static_cast<T*>(rows.logits), static_cast<const Wide<T>*>(logsumexp), arguments);
  });
}

}  // namespace tandem::TANDEM_GPU
