// Gradients of a norm's weight and bias: sums over rows in two stages. A block adds the rows of a slab for its columns
// in fp32 registers; a second kernel adds the slabs. Both have one order and no atomics, so the bits never change.
#pragma once

#include "launch.cuh"
#include "norm.cuh"

namespace megapipe {

constexpr int kRowLanes = 8;  // rows that a block reads side by side
constexpr int kRowsInFlight = 4;
constexpr int kTargetBlocks = 1024;

struct NormWeightGradient {
  const void* dy;     // [rows, width]
  const void* x;      // [rows, width]
  const float* mean;  // [rows]; null unless centred
  const float* rstd;  // [rows]
  float* partial;     // [gradients, slabs, width], gradients = 2 with a bias, else 1
  void* dweight;      // [width]
  void* dbias;        // [width]; null unless centred
  int64_t rows;
  int width;
  int slabs;
};

// A function of the shape alone: enough blocks for any GPU, slabs of at least 32 rows.
inline int num_slabs(int64_t rows, int64_t width) {
  const int64_t column_blocks = (width + 255) / 256;
  const int64_t most = (rows + 31) / 32, wanted = kTargetBlocks / (column_blocks > 0 ? column_blocks : 1);
  const int64_t slabs = wanted < most ? wanted : most;
  return static_cast<int>(slabs > 1 ? slabs : 1);
}

template <typename T, bool kVector, bool kCentered>
__global__ void __launch_bounds__(kWarp* kRowLanes) norm_partial_sums(NormWeightGradient p) {
  constexpr int kColumns = kVector ? kPackSize<T, true> : 1;
  using ColumnPack = Pack<T, kColumns>;
  constexpr int kGradients = kCentered ? 2 : 1;
  __shared__ float lanes[kGradients][kRowLanes][kWarp * kColumns];
  const int column = (static_cast<int>(blockIdx.x) * kWarp + static_cast<int>(threadIdx.x)) * kColumns;
  const int64_t first = p.rows * blockIdx.y / p.slabs, stop = p.rows * (blockIdx.y + 1) / p.slabs;
  const bool inside = column < p.width;

  float sums[kGradients][kColumns] = {};
  for (int64_t start = first + threadIdx.y; inside && start < stop; start += kRowLanes * kRowsInFlight) {
    ColumnPack x[kRowsInFlight], dy[kRowsInFlight];
    float mean[kRowsInFlight], rstd[kRowsInFlight];
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      const int64_t row = start + i * kRowLanes;
      if (row >= stop) continue;
      x[i] = *reinterpret_cast<const ColumnPack*>(row_of<T>(p.x, row, p.width) + column);
      dy[i] = *reinterpret_cast<const ColumnPack*>(row_of<T>(p.dy, row, p.width) + column);
      mean[i] = kCentered ? p.mean[row] : 0.0f;
      rstd[i] = p.rstd[row];
    }
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      if (start + i * kRowLanes >= stop) continue;
#pragma unroll
      for (int e = 0; e < kColumns; ++e) {
        const float gradient = widen(dy[i].values[e]);
        sums[0][e] = fmaf(gradient, (widen(x[i].values[e]) - mean[i]) * rstd[i], sums[0][e]);
        if (kCentered) sums[kGradients - 1][e] += gradient;
      }
    }
  }

  for (int g = 0; g < kGradients; ++g) {
    for (int e = 0; e < kColumns; ++e) lanes[g][threadIdx.y][threadIdx.x * kColumns + e] = sums[g][e];
  }
  __syncthreads();
  // The block's columns are dealt out anew, so that neighbouring threads write neighbouring columns.
  for (int c = threadIdx.y * kWarp + threadIdx.x; c < kWarp * kColumns; c += kWarp * kRowLanes) {
    const int target = static_cast<int>(blockIdx.x) * kWarp * kColumns + c;
    if (target >= p.width) continue;
    for (int g = 0; g < kGradients; ++g) {
      float total = 0.0f;
      for (int lane = 0; lane < kRowLanes; ++lane) total += lanes[g][lane][c];
      p.partial[(static_cast<int64_t>(g) * p.slabs + blockIdx.y) * p.width + target] = total;
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kWarp* kRowLanes) norm_add_slabs(NormWeightGradient p) {
  __shared__ float lanes[kRowLanes][kWarp];
  const int column = static_cast<int>(blockIdx.x) * kWarp + static_cast<int>(threadIdx.x);
  const float* slab = p.partial + static_cast<int64_t>(blockIdx.y) * p.slabs * p.width + column;
  float total = 0.0f;
  for (int i = threadIdx.y; column < p.width && i < p.slabs; i += kRowLanes) {
    total += slab[static_cast<int64_t>(i) * p.width];
  }
  lanes[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0 || column >= p.width) return;
  for (int lane = 1; lane < kRowLanes; ++lane) total += lanes[lane][threadIdx.x];
  static_cast<T*>(blockIdx.y == 0 ? p.dweight : p.dbias)[column] = narrow<T>(total);
}

template <typename T, bool kCentered>
cudaError_t launch_weight_gradient(const NormWeightGradient& p, cudaStream_t stream) {
  const bool vectors = takes_vectors<T>(p.width, p.dy, p.x);
  const int columns = kWarp * (vectors ? kPackSize<T, true> : 1);
  const dim3 block(kWarp, kRowLanes);
  const dim3 partial_grid((p.width + columns - 1) / columns, p.slabs);
  const cudaError_t error =
      launch_grid(vectors ? norm_partial_sums<T, true, kCentered> : norm_partial_sums<T, false, kCentered>, p,
                  partial_grid, block, stream);
  if (error != cudaSuccess) return error;
  return launch_grid(norm_add_slabs<T>, p, dim3((p.width + kWarp - 1) / kWarp, kCentered ? 2 : 1), block, stream);
}

template <bool kCentered>
cudaError_t dispatch_weight_gradient(const NormWeightGradient& p, int32_t dtype, cudaStream_t stream) {
  if (p.width == 0) return cudaSuccess;
  switch (dtype) {
    case kFloat32:
      return launch_weight_gradient<float, kCentered>(p, stream);
    case kBFloat16:
      return launch_weight_gradient<__nv_bfloat16, kCentered>(p, stream);
    case kFloat16:
      return launch_weight_gradient<__half, kCentered>(p, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace megapipe
