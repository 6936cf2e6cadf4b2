// Layer and root-mean-square normalisation over the last axis, forward.
// kCentered: subtract the mean (layer normalisation, Ba et al. 2016). Without: RMSNorm (Zhang and Sennrich 2019).
#pragma once

#include "launch.cuh"
#include "tile.cuh"

namespace megapipe {

struct NormForward {
  const void* x;         // [rows, width]
  const void* residual;  // [rows, width] added to x first, or null
  const void* weight;    // [width]
  const void* bias;      // [width], or null
  void* y;               // [rows, width]
  void* sum;             // [rows, width]: x + residual in their dtype, which is what is normalised; null without one
  float* mean;           // [rows]; null unless centred
  float* rstd;           // [rows]
  int64_t rows;
  int width;
  float epsilon;
};

template <typename T>
__device__ inline const T* row_of(const void* base, int64_t row, int width) {
  return static_cast<const T*>(base) + row * width;
}

template <typename T, int kSize>
__device__ inline void add(Pack<T, kSize>& to, const Pack<T, kSize>& other) {
#pragma unroll
  for (int e = 0; e < kSize; ++e) to.values[e] = narrow<T>(widen(to.values[e]) + widen(other.values[e]));
}

template <typename T>
__device__ inline T* row_of(void* base, int64_t row, int width) {
  return static_cast<T*>(base) + row * width;
}

template <typename T, bool kVector, bool kCentered>
__global__ void __launch_bounds__(kOneTileThreads, 1) norm_forward(NormForward p) {
  using RowTile = Tile<T, kVector>;
  using RowPack = typename RowTile::TilePack;
  const Team team = Team::here();
  if (team.row >= p.rows) return;
  const Columns all{0, p.width};
  const int tiles = RowTile::count(p.width, team);
  const T* row = row_of<T>(p.x, team.row, p.width);
  T* sum = row_of<T>(p.sum, team.row, p.width);

  RowTile x;
  float total = 0.0f;
  for (int tile = 0; tile < tiles; ++tile) {
    x.load(row, all, team, tile);
    if (p.residual != nullptr) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const RowPack added = RowTile::load_pack(row_of<T>(p.residual, team.row, p.width), all, team, tile, i);
        add(x.packs[i], added);
        RowTile::store_pack(sum, p.width, team, tile, i, x.packs[i]);
      }
    }
    x.each(team, tile, [&](float value, int) { total = kCentered ? total + value : fmaf(value, value, total); });
  }
  // Each thread wrote the elements of the sum that it reads again.
  if (p.residual != nullptr) row = sum;

  x.stay_packed();
  total = team.reduce<Sum>(total);
  float mean = 0.0f, square = total;
  if (kCentered) {
    // Deviations from the mean, not the difference of two large sums.
    mean = total / p.width;
    square = 0.0f;
    for (int tile = 0; tile < tiles; ++tile) {
      if (tiles > 1) x.load(row, all, team, tile);
      x.each(team, tile, [&](float value, int column) {
        const float deviation = column < p.width ? value - mean : 0.0f;
        square = fmaf(deviation, deviation, square);
      });
    }
    x.stay_packed();
    square = team.reduce<Sum>(square);
  }
  const float rstd = 1.0f / sqrtf(square / p.width + p.epsilon);
  if (team.thread == 0) {
    if (kCentered) p.mean[team.row] = mean;
    p.rstd[team.row] = rstd;
  }

  for (int tile = 0; tile < tiles; ++tile) {
    if (tiles > 1) x.load(row, all, team, tile);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const RowPack weight = RowTile::load_pack(static_cast<const T*>(p.weight), all, team, tile, i);
      RowPack bias, y;
      if (kCentered) bias = RowTile::load_pack(static_cast<const T*>(p.bias), all, team, tile, i);
#pragma unroll
      for (int e = 0; e < RowTile::kSize; ++e) {
        const float scaled = (widen(x.packs[i].values[e]) - mean) * rstd * widen(weight.values[e]);
        y.values[e] = narrow<T>(kCentered ? scaled + widen(bias.values[e]) : scaled);
      }
      RowTile::store_pack(row_of<T>(p.y, team.row, p.width), p.width, team, tile, i, y);
    }
  }
}

template <typename T, bool kCentered>
cudaError_t launch_norm(const NormForward& p, cudaStream_t stream) {
  const bool vectors = takes_vectors<T>(p.width, p.x, p.residual, p.weight, p.bias, p.y, p.sum);
  return vectors ? launch_rows<T, true>(norm_forward<T, true, kCentered>, p, kOneTileThreads, stream)
                 : launch_rows<T, false>(norm_forward<T, false, kCentered>, p, kOneTileThreads, stream);
}

// Runs launch_norm for the dtype; cudaErrorInvalidValue for an unknown one.
template <bool kCentered>
cudaError_t dispatch_norm(const NormForward& p, int32_t dtype, cudaStream_t stream) {
  if (p.rows == 0 || p.width == 0) return cudaSuccess;
  switch (dtype) {
    case kFloat32:
      return launch_norm<float, kCentered>(p, stream);
    case kBFloat16:
      return launch_norm<__nv_bfloat16, kCentered>(p, stream);
    case kFloat16:
      return launch_norm<__half, kCentered>(p, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace megapipe
