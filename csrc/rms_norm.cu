// C functions of rms normalisation. All return a cudaError_t; arguments are described at their structs.
#include "norm.cuh"
#include "norm_backward.cuh"

using namespace megapipe;

// y = weight * s / sqrt(mean(s * s) + epsilon), with s = x, or x + residual.
MEGAPIPE_EXPORT int32_t megapipe_rms_norm_forward(const void* x, const void* residual, const void* weight, void* y,
                                                  void* sum, float* rstd, int64_t rows, int64_t width, float epsilon,
                                                  int32_t dtype, int64_t stream) {
  if (!valid_rows(rows, width)) return cudaErrorInvalidValue;
  const NormForward p{x, residual, weight, nullptr, y, sum, nullptr, rstd, rows, static_cast<int>(width), epsilon};
  return dispatch_norm<false>(p, dtype, reinterpret_cast<cudaStream_t>(stream));
}

// partial: fp32 [1, megapipe_norm_slabs(rows, width), width]. dx, or partial with dweight, may be null.
MEGAPIPE_EXPORT int32_t megapipe_rms_norm_backward(const void* dy, const void* x, const float* rstd, const void* weight,
                                                   const void* upstream, void* dx, float* partial, void* dweight,
                                                   int64_t rows, int64_t width, int32_t dtype, int64_t stream) {
  if (!valid_rows(rows, width)) return cudaErrorInvalidValue;
  const NormBackward p{dy, x,       nullptr, rstd,    weight, upstream,
                       dx, partial, dweight, nullptr, rows,   static_cast<int>(width), num_slabs(rows, width)};
  return dispatch_backward<false>(p, dtype, reinterpret_cast<cudaStream_t>(stream));
}
