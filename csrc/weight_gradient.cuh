// Gradients of a norm's weight and bias: sums over rows in two stages. A slab of rows is added up in fp32 registers; a
// second kernel adds the slabs. Both have one order and no atomics, so the bits never change.
#pragma once

#include "launch.cuh"
#include "norm.cuh"

namespace megapipe {

constexpr int kRowsInFlight = 4;
constexpr int kColumnThreads = 128;
constexpr int kSlabLanes = 32;  // slabs that a block reads side by side

struct NormBackward {
  const void* dy;        // [rows, width]
  const void* x;         // [rows, width]: what was normalised
  const float* mean;     // [rows]; null unless centred
  const float* rstd;     // [rows]
  const void* weight;    // [width]
  const void* upstream;  // [rows, width]: gradient that reaches x past the norm, added to dx; or null
  void* dx;              // [rows, width]; null where the gradients of the parameters alone are wanted
  float* partial;        // [gradients, slabs, width], gradients = 2 with a bias, else 1; null where dx alone is wanted
  void* dweight;         // [width]
  void* dbias;           // [width]; null unless centred
  int64_t rows;
  int width;
  int slabs;
};

// A function of the shape alone: threads for one wave on today's GPUs at 16 elements a thread, and at least 8 rows for
// each part, which is written and read in fp32.
inline int num_slabs(int64_t rows, int64_t width) {
  constexpr int64_t kTargetThreads = 65536, kMostSlabs = 1024, kLeastRows = 8;
  const int64_t threads = (width + 16 * kWarp - 1) / (16 * kWarp) * kWarp;
  const int64_t most = (rows + kLeastRows - 1) / kLeastRows, wanted = kTargetThreads / (threads > 0 ? threads : kWarp);
  const int64_t slabs = wanted < most ? wanted : most;
  return static_cast<int>(slabs > kMostSlabs ? kMostSlabs : slabs > 1 ? slabs : 1);
}

// A thread adds up the rows of a slab for one pack of columns, in the order in which norm_backward does.
template <typename T, bool kVector, bool kCentered>
__global__ void __launch_bounds__(kColumnThreads) norm_partial_sums(NormBackward p) {
  constexpr int kColumns = kVector ? kPackSize<T, true> : 1;
  using ColumnPack = Pack<T, kColumns>;
  constexpr int kGradients = kCentered ? 2 : 1;
  const int column = (static_cast<int>(blockIdx.x) * kColumnThreads + static_cast<int>(threadIdx.x)) * kColumns;
  const int64_t first = p.rows * blockIdx.y / p.slabs, stop = p.rows * (blockIdx.y + 1) / p.slabs;
  if (column >= p.width) return;

  Pack<float, kColumns> sums[kGradients] = {};
  for (int64_t start = first; start < stop; start += kRowsInFlight) {
    ColumnPack x[kRowsInFlight], dy[kRowsInFlight];
    float mean[kRowsInFlight], rstd[kRowsInFlight];
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      const int64_t row = start + i;
      if (row >= stop) continue;
      x[i] = *reinterpret_cast<const ColumnPack*>(row_of<T>(p.x, row, p.width) + column);
      dy[i] = *reinterpret_cast<const ColumnPack*>(row_of<T>(p.dy, row, p.width) + column);
      mean[i] = kCentered ? p.mean[row] : 0.0f;
      rstd[i] = p.rstd[row];
    }
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      if (start + i >= stop) continue;
#pragma unroll
      for (int e = 0; e < kColumns; ++e) {
        const float gradient = widen(dy[i].values[e]);
        const float normalised = (widen(x[i].values[e]) - mean[i]) * rstd[i];
        sums[0].values[e] = fmaf(gradient, normalised, sums[0].values[e]);
        if (kCentered) sums[kGradients - 1].values[e] += gradient;
      }
    }
  }
  for (int g = 0; g < kGradients; ++g) {
    float* part = row_of<float>(p.partial, static_cast<int64_t>(g) * p.slabs + blockIdx.y, p.width);
    *reinterpret_cast<Pack<float, kColumns>*>(part + column) = sums[g];
  }
}

template <typename T>
__global__ void __launch_bounds__(kWarp* kSlabLanes) norm_add_slabs(NormBackward p) {
  __shared__ float lanes[kSlabLanes][kWarp];
  const int column = static_cast<int>(blockIdx.x) * kWarp + static_cast<int>(threadIdx.x);
  const float* slab = p.partial + static_cast<int64_t>(blockIdx.y) * p.slabs * p.width + column;
  float total = 0.0f;
#pragma unroll 4
  for (int i = threadIdx.y; column < p.width && i < p.slabs; i += kSlabLanes) {
    total += slab[static_cast<int64_t>(i) * p.width];
  }
  lanes[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0 || column >= p.width) return;
  for (int lane = 1; lane < kSlabLanes; ++lane) total += lanes[lane][threadIdx.x];
  static_cast<T*>(blockIdx.y == 0 ? p.dweight : p.dbias)[column] = narrow<T>(total);
}

template <typename T, bool kVector, bool kCentered>
cudaError_t launch_partial_sums(const NormBackward& p, cudaStream_t stream) {
  constexpr int kColumns = kColumnThreads * (kVector ? kPackSize<T, true> : 1);
  return launch_grid(norm_partial_sums<T, kVector, kCentered>, p,
                     dim3((p.width + kColumns - 1) / kColumns, p.slabs), dim3(kColumnThreads), stream);
}

template <typename T, bool kCentered>
cudaError_t launch_add_slabs(const NormBackward& p, cudaStream_t stream) {
  const dim3 grid((p.width + kWarp - 1) / kWarp, kCentered ? 2 : 1);
  return launch_grid(norm_add_slabs<T>, p, grid, dim3(kWarp, kSlabLanes), stream);
}

}  // namespace megapipe
