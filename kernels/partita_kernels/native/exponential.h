// exp in float32 that the compiler can turn into vectors: relative error about 1e-7, 0 below -87, Inf above 88, NaN stays NaN.
#pragma once
#include "common.h"

static inline float exponential(float x) {
  const float magic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, which then stands in the low bits
  float bounded = x < -87.f ? -87.f : (x > 88.f ? 88.f : x);
  float shifted = bounded * 1.44269504f + magic;
  float whole = shifted - magic;
  float r = (bounded - whole * 0.693359375f) - whole * -2.12194440e-4f;  // ln 2 in two parts: the first product is exact
  float p = 1.f / 5040;  // Taylor's series: |r| <= 0.35, so the first missing term is below 6e-9
  p = p * r + 1.f / 720; p = p * r + 1.f / 120; p = p * r + 1.f / 24; p = p * r + 1.f / 6;
  p = p * r + 0.5f; p = p * r + 1.f; p = p * r + 1.f;
  float scaled = p * bit_cast<float>((bit_cast<uint32_t>(shifted) - bit_cast<uint32_t>(magic) + 127u) << 23);
  float low = x < -87.f ? 0.f : scaled;
  return x > 88.f ? INFINITY : low;
}

static inline float sigmoid(float x) { return 1.f / (1.f + exponential(-x)); }
