// AdamW (Loshchilov and Hutter 2019, algorithm 2) on flat buffers. Every element is computed alone and in one order of
// roundings, so that the result does not depend on where a buffer is cut.
#include "element.cuh"
#include "launch.cuh"

using namespace megapipe;

namespace {

constexpr int kThreads = 256;
constexpr int kElements = 8;  // of each buffer per thread: 16 bytes of the narrowest

struct AdamW {
  float* master;
  const float* gradient;
  void* first;               // moments in fp32 or bf16
  void* second;
  __nv_bfloat16* parameter;  // the master's rounded copy; or null
  int64_t count;
  float decay;               // 1 - learning rate * weight decay
  float keep_second;         // beta2
  float take_first;          // 1 - beta1
  float take_second;         // 1 - beta2
  float step_size;           // learning rate / (1 - beta1^step)
  float root_correction;     // sqrt(1 - beta2^step)
  float epsilon;
  const float* gradient_scale;  // multiplies every gradient; or null
  const float* skip;            // nothing changes where it is not 0; or null
};

// One element's step; the products that are fused are those that torch fuses on CPUs.
template <typename Moment>
__device__ inline void update(const AdamW& p, float scale, float gradient, float& master, Moment& first,
                              Moment& second) {
  gradient *= scale;
  const float old_first = widen(first);
  const float new_first = fmaf(p.take_first, gradient - old_first, old_first);
  const float new_second = fmaf(p.take_second * gradient, gradient, widen(second) * p.keep_second);
  const float denominator = sqrtf(new_second) / p.root_correction + p.epsilon;
  master = master * p.decay + -p.step_size * new_first / denominator;
  first = narrow<Moment>(new_first);
  second = narrow<Moment>(new_second);
}

template <typename Moment, bool kVector>
__global__ void __launch_bounds__(kThreads) adamw(AdamW p) {
  if (p.skip != nullptr && *p.skip != 0.0f) return;
  const float scale = p.gradient_scale == nullptr ? 1.0f : *p.gradient_scale;
  Moment* first_moments = static_cast<Moment*>(p.first);
  Moment* second_moments = static_cast<Moment*>(p.second);
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if constexpr (kVector) {
    const int64_t start = thread * kElements;
    if (start >= p.count) return;
    using Wide = Pack<float, kElements>;
    using Moments = Pack<Moment, kElements>;
    const Wide gradient = *reinterpret_cast<const Wide*>(p.gradient + start);
    Wide master = *reinterpret_cast<const Wide*>(p.master + start);
    Moments first = *reinterpret_cast<const Moments*>(first_moments + start);
    Moments second = *reinterpret_cast<const Moments*>(second_moments + start);
    Pack<__nv_bfloat16, kElements> rounded;
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
      update(p, scale, gradient.values[e], master.values[e], first.values[e], second.values[e]);
      rounded.values[e] = narrow<__nv_bfloat16>(master.values[e]);
    }
    *reinterpret_cast<Wide*>(p.master + start) = master;
    *reinterpret_cast<Moments*>(first_moments + start) = first;
    *reinterpret_cast<Moments*>(second_moments + start) = second;
    if (p.parameter != nullptr) *reinterpret_cast<Pack<__nv_bfloat16, kElements>*>(p.parameter + start) = rounded;
  } else {
    if (thread >= p.count) return;
    float master = p.master[thread];
    update(p, scale, p.gradient[thread], master, first_moments[thread], second_moments[thread]);
    p.master[thread] = master;
    if (p.parameter != nullptr) p.parameter[thread] = narrow<__nv_bfloat16>(master);
  }
}

template <typename Moment>
cudaError_t launch(AdamW p, cudaStream_t stream) {
  const int64_t whole = p.count / kElements * kElements;
  if (takes_vectors<__nv_bfloat16>(whole, p.master, p.gradient, p.first, p.second, p.parameter) && whole > 0) {
    AdamW body = p;
    body.count = whole;
    const int64_t blocks = (whole / kElements + kThreads - 1) / kThreads;
    if (blocks > INT32_MAX) return cudaErrorInvalidValue;
    const cudaError_t error = launch_grid(adamw<Moment, true>, body, dim3(static_cast<unsigned>(blocks)),
                                          dim3(kThreads), stream);
    if (error != cudaSuccess) return error;
    p.master += whole;
    p.gradient += whole;
    p.first = static_cast<Moment*>(p.first) + whole;
    p.second = static_cast<Moment*>(p.second) + whole;
    if (p.parameter != nullptr) p.parameter += whole;
    p.count -= whole;
  }
  if (p.count == 0) return cudaSuccess;
  const int64_t blocks = (p.count + kThreads - 1) / kThreads;
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  return launch_grid(adamw<Moment, false>, p, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), stream);
}

}  // namespace

// Arguments are described at the struct. bf16_moments: whether both moments are bf16; fp32 otherwise.
MEGAPIPE_EXPORT int32_t megapipe_adamw(float* master, const float* gradient, void* first, void* second,
                                       void* parameter, int64_t count, float decay, float keep_second,
                                       float take_first, float take_second, float step_size, float root_correction,
                                       float epsilon, const float* gradient_scale, const float* skip,
                                       int32_t bf16_moments, int64_t stream) {
  if (count < 0) return cudaErrorInvalidValue;
  const AdamW p{master,      gradient,  first,           second,  static_cast<__nv_bfloat16*>(parameter),
                count,       decay,     keep_second,     take_first, take_second,
                step_size,   root_correction, epsilon,   gradient_scale, skip};
  const cudaStream_t target = reinterpret_cast<cudaStream_t>(stream);
  return bf16_moments ? launch<__nv_bfloat16>(p, target) : launch<float>(p, target);
}
