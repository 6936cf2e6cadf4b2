// Backward of the norms: gradients of the input, the weight and the bias.
//
// Rows are cut into slabs. A team walks one: it reads each row of dy and x once, writes the row's dx, and adds the slab's
// part of the weight's gradients up in registers, while the next row is on its way. A second kernel adds the parts. Rows
// that do not fit into registers take one kernel for each half. All sums have one order and no atomics; the gradients of
// the parameters have it on every path, so that either half alone has the bits of both together.
#pragma once

#include "norm.cuh"
#include "weight_gradient.cuh"

namespace megapipe {

// Packs of a thread: x and dy twice, and an fp32 sum or two of each element, in 128 registers.
template <bool kVector>
constexpr int kBackwardPacks = kVector ? 2 : 4;

template <typename T, bool kVector>
using BackwardTile = Tile<T, kVector, kPackSize<T, kVector>, kBackwardPacks<kVector>>;

// What a thread holds of one row.
template <typename T, bool kVector, bool kCentered>
struct BackwardRow {
  BackwardTile<T, kVector> x, dy;
  float mean, rstd;

  __device__ void load(const NormBackward& p, int64_t row, const Team& team) {
    const Columns all{0, p.width};
    x.load(row_of<T>(p.x, row, p.width), all, team, 0);
    dy.load(row_of<T>(p.dy, row, p.width), all, team, 0);
    mean = kCentered ? p.mean[row] : 0.0f;
    rstd = p.rstd[row];
  }

  __device__ void stay_packed() {
    x.stay_packed();
    dy.stay_packed();
  }
};

// dx = rstd * (w dy - mean(w dy) - n mean(w dy n)) with n = (x - mean) rstd; without the second term if not centred.
template <typename T, bool kVector, bool kCentered>
__global__ void __launch_bounds__(kTwoTileThreads, 1) norm_backward(NormBackward p) {
  using RowTile = BackwardTile<T, kVector>;
  constexpr int kCount = kBackwardPacks<kVector>;
  constexpr bool kAhead = kVector;  // single elements take too many registers for a second row
  const Team team = Team::here();  // its row is a slab
  if (team.row >= p.slabs) return;
  const Columns all{0, p.width};
  const T* weights = static_cast<const T*>(p.weight);
  const int64_t first = p.rows * team.row / p.slabs, stop = p.rows * (team.row + 1) / p.slabs;

  float weight_sums[kCount][RowTile::kSize] = {}, bias_sums[kCount][RowTile::kSize] = {};
  BackwardRow<T, kVector, kCentered> now = {}, next = {};
  if (kAhead && first < stop) next.load(p, first, team);
#pragma unroll 1
  for (int64_t row = first; row < stop; ++row) {
    if (kAhead) {
      now = next;
      if (row + 1 < stop) next.load(p, row + 1, team);
    } else {
      now.load(p, row, team);
    }
    now.stay_packed();
    float sums[2] = {0.0f, 0.0f};  // of w dy, and of w dy n
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const auto weight = RowTile::load_pack(weights, all, team, 0, i);
#pragma unroll
      for (int e = 0; e < RowTile::kSize; ++e) {
        // dy and the weight are zero beyond the row's end.
        const float gradient = widen(now.dy.packs[i].values[e]);
        const float normalised = (widen(now.x.packs[i].values[e]) - now.mean) * now.rstd;
        const float scaled = gradient * widen(weight.values[e]);
        if (kCentered) sums[0] += scaled;
        sums[1] = fmaf(scaled, normalised, sums[1]);
        weight_sums[i][e] = fmaf(gradient, normalised, weight_sums[i][e]);
        if (kCentered) bias_sums[i][e] += gradient;
      }
    }
    if (p.dx == nullptr) continue;
    now.stay_packed();
    team.reduce<Sum>(sums);
    const float offset = sums[0] / p.width, slope = sums[1] / p.width;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const auto weight = RowTile::load_pack(weights, all, team, 0, i);
      typename RowTile::TilePack upstream = {}, dx;
      if (p.upstream != nullptr) {
        upstream = RowTile::load_pack(row_of<T>(p.upstream, row, p.width), all, team, 0, i);
      }
#pragma unroll
      for (int e = 0; e < RowTile::kSize; ++e) {
        const float normalised = (widen(now.x.packs[i].values[e]) - now.mean) * now.rstd;
        const float centred = fmaf(widen(now.dy.packs[i].values[e]), widen(weight.values[e]), -offset);
        const float gradient = fmaf(-normalised, slope, centred) * now.rstd;
        dx.values[e] = narrow<T>(p.upstream == nullptr ? gradient : gradient + widen(upstream.values[e]));
      }
      RowTile::store_pack(row_of<T>(p.dx, row, p.width), p.width, team, 0, i, dx);
    }
  }

  if (p.partial == nullptr) return;
  using SumTile = Tile<float, kVector, RowTile::kSize, kCount>;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    typename SumTile::TilePack pack;
#pragma unroll
    for (int e = 0; e < RowTile::kSize; ++e) pack.values[e] = weight_sums[i][e];
    SumTile::store_pack(row_of<float>(p.partial, team.row, p.width), p.width, team, 0, i, pack);
    if constexpr (kCentered) {
#pragma unroll
      for (int e = 0; e < RowTile::kSize; ++e) pack.values[e] = bias_sums[i][e];
      SumTile::store_pack(row_of<float>(p.partial, p.slabs + team.row, p.width), p.width, team, 0, i, pack);
    }
  }
}

// Rows that do not stay on chip are read twice. dx = rstd * (w dy - mean(w dy) - n mean(w dy n)) with n = (x - mean) rstd; without the second term if not centred.
template <typename T, bool kVector, bool kCentered>
__global__ void __launch_bounds__(kTwoTileThreads, 1) norm_long_input_gradient(NormBackward p) {
  using RowTile = Tile<T, kVector>;
  using RowPack = typename RowTile::TilePack;
  const Team team = Team::here();
  if (team.row >= p.rows) return;
  const Columns all{0, p.width};
  const int tiles = RowTile::count(p.width, team);
  const T* weights = static_cast<const T*>(p.weight);
  const float mean = kCentered ? p.mean[team.row] : 0.0f;
  const float rstd = p.rstd[team.row];

  RowTile x, dy;
  float sums[2] = {0.0f, 0.0f};  // of w dy, and of w dy n
  for (int tile = 0; tile < tiles; ++tile) {
    x.load(row_of<T>(p.x, team.row, p.width), all, team, tile);
    dy.load(row_of<T>(p.dy, team.row, p.width), all, team, tile);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const RowPack weight = RowTile::load_pack(weights, all, team, tile, i);
#pragma unroll
      for (int e = 0; e < RowTile::kSize; ++e) {
        // Zero beyond the row's end, where dy is.
        const float scaled = widen(dy.packs[i].values[e]) * widen(weight.values[e]);
        if (kCentered) sums[0] += scaled;
        sums[1] = fmaf(scaled, (widen(x.packs[i].values[e]) - mean) * rstd, sums[1]);
      }
    }
  }
  x.stay_packed();
  dy.stay_packed();
  team.reduce<Sum>(sums);
  const float offset = sums[0] / p.width, slope = sums[1] / p.width;

  for (int tile = 0; tile < tiles; ++tile) {
    if (tiles > 1) {
      x.load(row_of<T>(p.x, team.row, p.width), all, team, tile);
      dy.load(row_of<T>(p.dy, team.row, p.width), all, team, tile);
    }
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const RowPack weight = RowTile::load_pack(weights, all, team, tile, i);
      RowPack upstream = {}, dx;
      if (p.upstream != nullptr) {
        upstream = RowTile::load_pack(row_of<T>(p.upstream, team.row, p.width), all, team, tile, i);
      }
#pragma unroll
      for (int e = 0; e < RowTile::kSize; ++e) {
        const float normalised = (widen(x.packs[i].values[e]) - mean) * rstd;
        const float centred = fmaf(widen(dy.packs[i].values[e]), widen(weight.values[e]), -offset);
        const float gradient = fmaf(-normalised, slope, centred) * rstd;
        dx.values[e] = narrow<T>(gradient + widen(upstream.values[e]));
      }
      RowTile::store_pack(row_of<T>(p.dx, team.row, p.width), p.width, team, tile, i, dx);
    }
  }
}

template <typename T, bool kVector, bool kCentered>
cudaError_t launch_backward(const NormBackward& p, cudaStream_t stream) {
  constexpr int kElements = kBackwardPacks<kVector> * kPackSize<T, kVector>;
  bool clusters = false;
  cudaError_t error = has_clusters(&clusters);
  if (error != cudaSuccess) return error;
  const Geometry geometry = row_geometry(p.width, kElements, kTwoTileThreads, clusters);
  if (geometry.threads * geometry.blocks_per_row * kElements >= p.width) {
    error = launch_teams(norm_backward<T, kVector, kCentered>, p, geometry, p.slabs, stream);
  } else {
    if (p.dx != nullptr && p.rows > 0) {
      error = launch_rows<T, kVector>(norm_long_input_gradient<T, kVector, kCentered>, p, kTwoTileThreads, stream);
    }
    if (error == cudaSuccess && p.partial != nullptr) error = launch_partial_sums<T, kVector, kCentered>(p, stream);
  }
  if (error != cudaSuccess || p.partial == nullptr) return error;
  return launch_add_slabs<T, kCentered>(p, stream);
}

template <typename T, bool kCentered>
cudaError_t launch_backward(const NormBackward& p, cudaStream_t stream) {
  return takes_vectors<T>(p.width, p.dy, p.x, p.weight, p.upstream, p.dx, p.partial)
             ? launch_backward<T, true, kCentered>(p, stream)
             : launch_backward<T, false, kCentered>(p, stream);
}

// Runs launch_backward for the dtype; cudaErrorInvalidValue for an unknown one.
template <bool kCentered>
cudaError_t dispatch_backward(const NormBackward& p, int32_t dtype, cudaStream_t stream) {
  if (p.width == 0) return cudaSuccess;
  switch (dtype) {
    case kFloat32:
      return launch_backward<float, kCentered>(p, stream);
    case kBFloat16:
      return launch_backward<__nv_bfloat16, kCentered>(p, stream);
    case kFloat16:
      return launch_backward<__half, kCentered>(p, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace megapipe
