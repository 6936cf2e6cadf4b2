// The threads that share one row: a warp, a block, or a cluster of blocks. Sums have one order, so results are
// bitwise reproducible.
#pragma once

#include <cooperative_groups.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>

namespace megapipe {

constexpr int kWarp = 32;
constexpr int kMaxClusterBlocks = 8;  // the largest size that every GPU with clusters can schedule

struct Sum {
  static __device__ float identity() { return 0.0f; }
  static __device__ float combine(float a, float b) { return a + b; }
};

// fmaxf would drop a NaN.
struct Max {
  static __device__ float identity() { return -INFINITY; }
  static __device__ float combine(float a, float b) { return isnan(a) || a > b ? a : b; }
};

template <typename Operation>
__device__ inline float warp_reduce(float value) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value = Operation::combine(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

// Launched as grid (row groups * blocks a row), block (threads of a row in this block, rows a block). Rows share a
// block only if each is one warp's.
struct Team {
  int64_t row;
  int thread;   // this thread's number among those of the row
  int threads;  // of the whole row
  int blocks;   // of the whole row

  static __device__ Team here() {
    int blocks = 1, rank = 0;
#if __CUDA_ARCH__ >= 900
    const auto cluster = cooperative_groups::this_cluster();
    blocks = static_cast<int>(cluster.num_blocks());
    rank = static_cast<int>(cluster.block_rank());
#endif
    Team team;
    team.row = static_cast<int64_t>(blockIdx.x) / blocks * blockDim.y + threadIdx.y;
    team.thread = static_cast<int>(rank * blockDim.x + threadIdx.x);
    team.threads = static_cast<int>(blocks * blockDim.x);
    team.blocks = blocks;
    return team;
  }

  // Reduces kCount values over the row's threads; every thread gets the results.
  template <typename Operation, int kCount>
  __device__ void reduce(float (&values)[kCount]) const {
    for (int i = 0; i < kCount; ++i) values[i] = warp_reduce<Operation>(values[i]);
    if (blockDim.x == kWarp && blocks == 1) return;
    block_reduce<Operation>(values);
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) cluster_reduce<Operation>(values);
#endif
  }

  template <typename Operation>
  __device__ float reduce(float value) const {
    float values[1] = {value};
    reduce<Operation>(values);
    return values[0];
  }

 private:
  template <typename Operation, int kCount>
  __device__ void block_reduce(float (&values)[kCount]) const {
    __shared__ float partial[kCount][kWarp];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
    __syncthreads();  // the reduction before this one has been read
    if (lane == 0) {
      for (int i = 0; i < kCount; ++i) partial[i][warp] = values[i];
    }
    __syncthreads();
    for (int i = 0; i < kCount; ++i) {
      values[i] = warp_reduce<Operation>(lane < warps ? partial[i][lane] : Operation::identity());
    }
  }

#if __CUDA_ARCH__ >= 900
  template <typename Operation, int kCount>
  __device__ void cluster_reduce(float (&values)[kCount]) const {
    __shared__ float total[kCount];
    const auto cluster = cooperative_groups::this_cluster();
    if (threadIdx.x == 0) {
      for (int i = 0; i < kCount; ++i) total[i] = values[i];
    }
    cluster.sync();
    for (int i = 0; i < kCount; ++i) {
      values[i] = Operation::identity();
      for (int rank = 0; rank < blocks; ++rank) {
        values[i] = Operation::combine(values[i], *cluster.map_shared_rank(&total[i], rank));
      }
    }
    cluster.sync();  // no block may leave, or write its total again, while another reads it
  }
#endif
};

}  // namespace megapipe
