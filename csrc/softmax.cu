// Softmax of scaled and masked attention scores over the last axis, and its gradient. Statistics are fp32.
#include "launch.cuh"
#include "tile.cuh"

using namespace megapipe;

namespace {

struct SoftmaxForward {
  const void* scores;   // [batch, heads, queries, width]; rows = batch * heads * queries
  const uint8_t* mask;  // not 0 where a key is seen; null where all are
  void* weights;        // [batch, heads, queries, width]; may be the scores
  int64_t rows;
  int width;
  float scale;
  int heads;
  int queries;
  int64_t batch_stride;  // of the mask, in elements; its keys lie next to each other
  int64_t head_stride;
  int64_t query_stride;
  int window;  // keys that a query sees, itself and those before it; 0: all keys

  __device__ const uint8_t* mask_row(int64_t row) const {
    if (mask == nullptr) return nullptr;
    const int64_t query = row % queries, head = row / queries % heads, sample = row / queries / heads;
    return mask + sample * batch_stride + head * head_stride + query * query_stride;
  }

  // Query i of q stands at key i + width - q. A query before the first key sees none.
  __device__ Columns seen(int64_t row) const {
    if (window == 0) return {0, width};
    const int64_t stop = row % queries + width - queries + 1;
    const int64_t first = stop - window;
    return {first > 0 ? static_cast<int>(first) : 0, stop > 0 ? static_cast<int>(stop) : 0};
  }
};

struct SoftmaxBackward {
  const void* dy;       // [rows, width]
  const void* weights;  // [rows, width]
  void* dscores;        // [rows, width]; may be dy or the weights
  int64_t rows;
  int width;
  float scale;
};

// A thread's scores of a tile in fp32, scaled; minus infinity where the key is hidden.
template <typename T, bool kVector>
struct Scores {
  using RowTile = Tile<T, kVector>;
  float values[kPacks][RowTile::kSize];

  __device__ void load(const T* row, const uint8_t* mask, Columns seen, float scale, const Team& team, int tile) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const auto pack = RowTile::load_pack(row, seen, team, tile, p);
      Pack<uint8_t, RowTile::kSize> visible;
      if (mask != nullptr) visible = Tile<uint8_t, kVector, RowTile::kSize>::load_pack(mask, seen, team, tile, p);
#pragma unroll
      for (int e = 0; e < RowTile::kSize; ++e) {
        const bool shown = seen.contains(RowTile::column(team, tile, p, e)) && (mask == nullptr || visible.values[e]);
        values[p][e] = shown ? widen(pack.values[e]) * scale : -INFINITY;
      }
    }
  }

  template <typename Visit>
  __device__ void each(Visit visit) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int e = 0; e < RowTile::kSize; ++e) visit(values[p][e]);
    }
  }

  __device__ void store(T* row, int width, const Team& team, int tile) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      typename RowTile::TilePack pack;
#pragma unroll
      for (int e = 0; e < RowTile::kSize; ++e) pack.values[e] = narrow<T>(values[p][e]);
      RowTile::store_pack(row, width, team, tile, p, pack);
    }
  }
};

template <typename T, bool kVector>
__global__ void __launch_bounds__(kOneTileThreads, 1) softmax_forward(SoftmaxForward p) {
  const Team team = Team::here();
  if (team.row >= p.rows) return;
  const int tiles = Tile<T, kVector>::count(p.width, team);
  const T* row = static_cast<const T*>(p.scores) + team.row * p.width;
  const uint8_t* mask = p.mask_row(team.row);
  const Columns seen = p.seen(team.row);

  Scores<T, kVector> scores;
  float largest = -INFINITY;
  for (int tile = 0; tile < tiles; ++tile) {
    scores.load(row, mask, seen, p.scale, team, tile);
    scores.each([&](float value) { largest = Max::combine(largest, value); });
  }
  largest = team.reduce<Max>(largest);
  // A row that sees nothing, or only minus infinity: every exponential is 0 then.
  if (largest == -INFINITY) largest = 0.0f;

  float total = 0.0f;
  for (int tile = 0; tile < tiles; ++tile) {
    if (tiles > 1) scores.load(row, mask, seen, p.scale, team, tile);
    scores.each([&](float& value) {
      value = expf(value - largest);
      total += value;
    });
  }
  total = team.reduce<Sum>(total);
  const float factor = total == 0.0f ? 0.0f : 1.0f / total;

  for (int tile = 0; tile < tiles; ++tile) {
    if (tiles > 1) {
      scores.load(row, mask, seen, p.scale, team, tile);
      scores.each([&](float& value) { value = expf(value - largest); });
    }
    scores.each([&](float& value) { value *= factor; });
    scores.store(static_cast<T*>(p.weights) + team.row * p.width, p.width, team, tile);
  }
}

// dscores = scale * weights * (dy - sum(weights * dy))
template <typename T, bool kVector>
__global__ void __launch_bounds__(kTwoTileThreads, 1) softmax_backward(SoftmaxBackward p) {
  using RowTile = Tile<T, kVector>;
  const Team team = Team::here();
  if (team.row >= p.rows) return;
  const Columns all{0, p.width};
  const int tiles = RowTile::count(p.width, team);
  const T* dy_row = static_cast<const T*>(p.dy) + team.row * p.width;
  const T* weight_row = static_cast<const T*>(p.weights) + team.row * p.width;

  RowTile dy, weights;
  float dot = 0.0f;
  for (int tile = 0; tile < tiles; ++tile) {
    dy.load(dy_row, all, team, tile);
    weights.load(weight_row, all, team, tile);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
#pragma unroll
      for (int e = 0; e < RowTile::kSize; ++e) {
        dot = fmaf(widen(weights.packs[i].values[e]), widen(dy.packs[i].values[e]), dot);
      }
    }
  }
  dot = team.reduce<Sum>(dot);

  for (int tile = 0; tile < tiles; ++tile) {
    if (tiles > 1) {
      dy.load(dy_row, all, team, tile);
      weights.load(weight_row, all, team, tile);
    }
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      typename RowTile::TilePack gradient;
#pragma unroll
      for (int e = 0; e < RowTile::kSize; ++e) {
        const float scaled = p.scale * widen(weights.packs[i].values[e]);
        gradient.values[e] = narrow<T>(scaled * (widen(dy.packs[i].values[e]) - dot));
      }
      RowTile::store_pack(static_cast<T*>(p.dscores) + team.row * p.width, p.width, team, tile, i, gradient);
    }
  }
}

template <typename T>
cudaError_t launch(const SoftmaxForward& p, cudaStream_t stream) {
  const bool mask_vectors =
      (reinterpret_cast<uintptr_t>(p.mask) | p.batch_stride | p.head_stride | p.query_stride) % kPackSize<T, true> == 0;
  const bool vectors = mask_vectors && takes_vectors<T>(p.width, p.scores, p.weights);
  return vectors ? launch_rows<T, true>(softmax_forward<T, true>, p, kOneTileThreads, stream)
                 : launch_rows<T, false>(softmax_forward<T, false>, p, kOneTileThreads, stream);
}

template <typename T>
cudaError_t launch(const SoftmaxBackward& p, cudaStream_t stream) {
  const bool vectors = takes_vectors<T>(p.width, p.dy, p.weights, p.dscores);
  return vectors ? launch_rows<T, true>(softmax_backward<T, true>, p, kTwoTileThreads, stream)
                 : launch_rows<T, false>(softmax_backward<T, false>, p, kTwoTileThreads, stream);
}

template <typename Problem>
cudaError_t dispatch(const Problem& p, int32_t dtype, cudaStream_t stream) {
  if (p.rows == 0 || p.width == 0) return cudaSuccess;
  switch (dtype) {
    case kFloat32:
      return launch<float>(p, stream);
    case kBFloat16:
      return launch<__nv_bfloat16>(p, stream);
    case kFloat16:
      return launch<__half>(p, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

// Arguments are described at the struct; those that count keys or queries are 64 bits wide here.
MEGAPIPE_EXPORT int32_t megapipe_softmax_forward(const void* scores, const uint8_t* mask, void* weights, int64_t batch,
                                                 int64_t heads, int64_t queries, int64_t width, float scale,
                                                 int64_t batch_stride, int64_t head_stride, int64_t query_stride,
                                                 int64_t window, int32_t dtype, int64_t stream) {
  const int64_t rows = batch * heads * queries;
  if (!valid_rows(rows, width) || heads > INT32_MAX || queries > INT32_MAX || window < 0) return cudaErrorInvalidValue;
  const SoftmaxForward p{scores,
                         mask,
                         weights,
                         rows,
                         static_cast<int>(width),
                         scale,
                         static_cast<int>(heads),
                         static_cast<int>(queries),
                         batch_stride,
                         head_stride,
                         query_stride,
                         static_cast<int>(window < kMaxWidth ? window : kMaxWidth)};
  return dispatch(p, dtype, reinterpret_cast<cudaStream_t>(stream));
}

MEGAPIPE_EXPORT int32_t megapipe_softmax_input_gradient(const void* dy, const void* weights, void* dscores,
                                                        int64_t rows, int64_t width, float scale, int32_t dtype,
                                                        int64_t stream) {
  if (!valid_rows(rows, width)) return cudaErrorInvalidValue;
  const SoftmaxBackward p{dy, weights, dscores, rows, static_cast<int>(width), scale};
  return dispatch(p, dtype, reinterpret_cast<cudaStream_t>(stream));
}
