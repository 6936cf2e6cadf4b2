// bf16 as its 16 bits.
#pragma once

#include <stdint.h>
#include <string.h>

struct __nv_bfloat16 {
  uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 value) {
  const uint32_t word = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  memcpy(&wide, &word, 4);
  return wide;
}

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  uint32_t word;
  memcpy(&word, &value, 4);
  if (value != value) return {0x7fff};
  return {static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16)};
}
