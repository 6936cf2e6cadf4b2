// How rows are dealt out to blocks, and the launch itself. Everything here runs on the host.
#pragma once

#include "element.cuh"
#include "team.cuh"
#include "tile.cuh"

#define MEGAPIPE_EXPORT extern "C" __attribute__((visibility("default")))

namespace megapipe {

enum Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

struct Geometry {
  int threads;
  int rows_per_block;
  int blocks_per_row;
};

inline cudaError_t has_clusters(bool* answer) {
  int device = 0, value = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, cudaDevAttrClusterLaunch, device);
  *answer = value != 0;
  return error;
}

// As few threads as hold the row with `elements` each: a warp at least, then a block, then a cluster of blocks where the
// GPU has those. What does not fit is walked tile by tile.
inline Geometry row_geometry(int width, int elements, int max_threads, bool clusters) {
  const int needed = (width + elements - 1) / elements;
  if (needed <= kWarp) return {kWarp, 4, 1};
  const int rounded = (needed + kWarp - 1) / kWarp * kWarp;
  Geometry geometry{rounded < max_threads ? rounded : max_threads, 1, 1};
  while (clusters && geometry.blocks_per_row < kMaxClusterBlocks &&
         needed > geometry.threads * geometry.blocks_per_row) {
    geometry.blocks_per_row *= 2;
  }
  return geometry;
}

// Launches kernel(problem) on `teams` teams.
template <typename Problem>
cudaError_t launch_teams(void (*kernel)(Problem), const Problem& problem, const Geometry& geometry, int64_t teams,
                         cudaStream_t stream) {
  const int64_t groups = (teams + geometry.rows_per_block - 1) / geometry.rows_per_block;
  if (groups * geometry.blocks_per_row > INT32_MAX) return cudaErrorInvalidValue;

  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(groups * geometry.blocks_per_row));
  config.blockDim = dim3(geometry.threads, geometry.rows_per_block);
  config.stream = stream;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = geometry.blocks_per_row;
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  config.attrs = &cluster;
  config.numAttrs = geometry.blocks_per_row > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, problem);
}

// Launches kernel(problem) on one team for each of problem.rows rows.
template <typename T, bool kVector, typename Problem>
cudaError_t launch_rows(void (*kernel)(Problem), const Problem& problem, int max_threads, cudaStream_t stream) {
  bool clusters = false;
  const cudaError_t error = has_clusters(&clusters);
  if (error != cudaSuccess) return error;
  const Geometry geometry = row_geometry(problem.width, kPacks * kPackSize<T, kVector>, max_threads, clusters);
  return launch_teams(kernel, problem, geometry, problem.rows, stream);
}

template <typename Problem>
cudaError_t launch_grid(void (*kernel)(Problem), const Problem& problem, dim3 grid, dim3 block,
                        cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, problem);
}

// Whether rows of `width` elements behind these pointers can be accessed 16 bytes at a time; null is left out.
template <typename T, typename... Pointers>
bool takes_vectors(int64_t width, const Pointers*... pointers) {
  if (width % kPackSize<T, true> != 0) return false;
  return (true && ... && (reinterpret_cast<uintptr_t>(pointers) % kAccessBytes == 0));
}

// Columns are counted in int, with room for the tile that runs over the end of a row.
constexpr int64_t kMaxWidth = int64_t{1} << 30;

inline bool valid_rows(int64_t rows, int64_t width) { return rows >= 0 && width >= 0 && width <= kMaxWidth; }

}  // namespace megapipe
