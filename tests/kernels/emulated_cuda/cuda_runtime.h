// A CUDA of this processor, for tests of csrc where there is no GPU: the part of the runtime that csrc uses.
//
// Every thread of a block is a fiber, run one after the other up to a barrier or a shuffle; the blocks of a cluster are
// operating-system threads, and blocks of a grid follow one another. A static __shared__ variable is one of its
// operating-system thread, so each block has its own. Threads that wait for each other for ever end the process.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmath>
#include <functional>

#define __device__
#define __global__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define __CUDA_ARCH__ 900

using std::isnan;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace emulated {

// The cluster of the running block, and the block's place in it.
struct Place {
  unsigned rank, size;
};
Place in_cluster();
// Wait for every thread of the block; of its cluster.
void block_barrier();
void cluster_barrier();
// This fiber's warp: the value that lane (own lane ^ mask) passed in the same call.
float shuffle_xor(float value, int mask);
// The variable of another block of the cluster that stands where `address` does in this one.
void* in_block(void* address, unsigned rank);
void run(dim3 grid, dim3 block, unsigned cluster_size, const std::function<void()>& thread);

}  // namespace emulated

// Of the running fiber; the scheduler keeps them up to date.
inline thread_local dim3 threadIdx, blockIdx, blockDim;

inline void __syncthreads() { emulated::block_barrier(); }
inline float __shfl_xor_sync(unsigned, float value, int mask) { return emulated::shuffle_xor(value, mask); }

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaDeviceAttr { cudaDevAttrClusterLaunch = 120 };
enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension = 4 };
using cudaStream_t = struct CUstream_st*;

struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

// Set by tests: a GPU without clusters walks long rows tile by tile.
extern "C" int32_t emulated_clusters;

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = emulated_clusters;
  return cudaSuccess;
}

inline const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "invalid argument"; }

template <typename Argument>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Argument), const Argument& argument) {
  const unsigned cluster = config->numAttrs ? config->attrs[0].val.clusterDim.x : 1;
  if (config->blockDim.x * config->blockDim.y > 1024 || config->gridDim.y > 65535) return cudaErrorInvalidValue;
  emulated::run(config->gridDim, config->blockDim, cluster, [&] { kernel(argument); });
  return cudaSuccess;
}
