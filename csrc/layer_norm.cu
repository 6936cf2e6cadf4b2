// C functions of layer normalisation. All return a cudaError_t; arguments are described at their structs.
#include "norm.cuh"
#include "norm_backward.cuh"

using namespace megapipe;

// y = weight * (s - mean(s)) / sqrt(variance(s) + epsilon) + bias, with s = x, or x + residual.
MEGAPIPE_EXPORT int32_t megapipe_layer_norm_forward(const void* x, const void* residual, const void* weight,
                                                    const void* bias, void* y, void* sum, float* mean, float* rstd,
                                                    int64_t rows, int64_t width, float epsilon, int32_t dtype,
                                                    int64_t stream) {
  if (!valid_rows(rows, width)) return cudaErrorInvalidValue;
  const NormForward p{x, residual, weight, bias, y, sum, mean, rstd, rows, static_cast<int>(width), epsilon};
  return dispatch_norm<true>(p, dtype, reinterpret_cast<cudaStream_t>(stream));
}

// partial: fp32 [2, megapipe_norm_slabs(rows, width), width]. dx, or partial with dweight and dbias, may be null.
MEGAPIPE_EXPORT int32_t megapipe_layer_norm_backward(const void* dy, const void* x, const float* mean,
                                                     const float* rstd, const void* weight, const void* upstream,
                                                     void* dx, float* partial, void* dweight, void* dbias, int64_t rows,
                                                     int64_t width, int32_t dtype, int64_t stream) {
  if (!valid_rows(rows, width)) return cudaErrorInvalidValue;
  const NormBackward p{dy,      x,     mean, rstd, weight,                  upstream,
                       dx,      partial, dweight, dbias, rows, static_cast<int>(width), num_slabs(rows, width)};
  return dispatch_backward<true>(p, dtype, reinterpret_cast<cudaStream_t>(stream));
}

// Slabs of rows whose partial weight gradients a norm writes: a function of the shape alone.
MEGAPIPE_EXPORT int32_t megapipe_norm_slabs(int64_t rows, int64_t width) { return num_slabs(rows, width); }

// Text of an error code that a function here returned.
MEGAPIPE_EXPORT const char* megapipe_error_string(int32_t code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
