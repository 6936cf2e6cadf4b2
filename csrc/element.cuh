// Element types: packs of them, and their conversion to and from fp32, in which all arithmetic is done.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace megapipe {

constexpr int kAccessBytes = 16;  // the widest access of a thread

// kVector: accesses are of 16 bytes. Otherwise of single elements, and a pack is smaller, so that addresses and
// conditions of its elements fit into registers too.
template <typename T, bool kVector>
constexpr int kPackSize = kVector ? kAccessBytes / static_cast<int>(sizeof(T)) : 2;

template <typename T, int kSize>
struct alignas(sizeof(T) * kSize < kAccessBytes ? sizeof(T) * kSize : kAccessBytes) Pack {
  T values[kSize];
};

__device__ inline float widen(float value) { return value; }
__device__ inline float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float widen(__half value) { return __half2float(value); }

// Rounds to nearest, ties to even.
template <typename T>
__device__ T narrow(float value);
template <>
__device__ inline float narrow<float>(float value) { return value; }
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float value) { return __float2bfloat16_rn(value); }
template <>
__device__ inline __half narrow<__half>(float value) { return __float2half_rn(value); }

}  // namespace megapipe
