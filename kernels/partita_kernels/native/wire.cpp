// Formats for the wire: int8 with block scales, and one bit with block scales. A block is read from memory once.
#include "common.h"

template <class X> static void quantize_block(const X *x, int8_t *q, float *scale, int64_t n) {
  float peak = 0, spoiled = 0;
#pragma omp simd reduction(max : peak) reduction(+ : spoiled)
  for (int64_t i = 0; i < n; i++) {
    float value = widen(x[i]), size = std::fabs(value);
    peak = size > peak ? size : peak;
    spoiled += value * 0.f;  // NaN for NaN and Inf
  }
  const float inverse = peak > 1e-36f ? 127.f / peak : 0.f;
  const float magic = 12582912.f;  // 1.5 * 2^23: adding it rounds to nearest, ties to even
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    float t = widen(x[i]) * inverse;
    t = t != t ? 0.f : t;
    t = t < -127.f ? -127.f : (t > 127.f ? 127.f : t);
    q[i] = int8_t(bit_cast<int32_t>(t + magic) - bit_cast<int32_t>(magic));
  }
  *scale = peak / 127.f + spoiled;
}

template <class X> static void dequantize_block(const int8_t *q, float scale, X *out, int64_t n, bool add) {
  if (add) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) narrow(widen(out[i]) + q[i] * scale, out[i]);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) narrow(q[i] * scale, out[i]);
  }
}

// v: the block in float32. Bits of whole bytes; those after the end are 0.
static void sign_bits(const float *v, uint8_t *bits, int64_t n) {
  for (int64_t from = 0; from < n; from += 8) {
    const int64_t count = std::min<int64_t>(8, n - from);
    uint32_t packed = 0;
    if (count == 8) for (int j = 0; j < 8; j++) packed |= uint32_t(v[from + j] >= 0) << j;
    else for (int64_t j = 0; j < count; j++) packed |= uint32_t(v[from + j] >= 0) << j;
    bits[from / 8] = uint8_t(packed);
  }
}

template <class X> static void pack_block(const X *x, float *error, uint8_t *bits, float *scale, int64_t n, float *v) {
  float sum = 0;
  if (error) for (int64_t i = 0; i < n; i++) v[i] = widen(x[i]) + error[i];
  else for (int64_t i = 0; i < n; i++) v[i] = widen(x[i]);
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) sum += std::fabs(v[i]);
  const float size = sum / n;
  *scale = size;
  sign_bits(v, bits, n);
  if (error) for (int64_t i = 0; i < n; i++) error[i] = v[i] - (v[i] >= 0 ? size : -size);
}

template <class X> static void unpack_block(const uint8_t *bits, float scale, X *out, int64_t n, bool add) {
  // Eight lanes with fixed shifts, so that the inner loop becomes one vector. The sign bit of the scale is flipped where a bit is 0.
  const uint32_t up = bit_cast<uint32_t>(scale);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const uint32_t packed = bits[i / 8];
    for (int j = 0; j < 8; j++) {
      const float value = bit_cast<float>(up ^ ((~packed >> j & 1u) << 31));
      narrow(add ? widen(out[i + j]) + value : value, out[i + j]);
    }
  }
  for (; i < n; i++) {
    const float value = bit_cast<float>(up ^ ((~uint32_t(bits[i / 8]) >> (i % 8) & 1u) << 31));
    narrow(add ? widen(out[i]) + value : value, out[i]);
  }
}

// Calls f(number, first element, length) for the blocks of n elements.
template <class F> static void each_block(int64_t n, int64_t block, int threads, F f) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t b = 0; b < (n + block - 1) / block; b++) f(b, b * block, std::min(block, n - b * block));
}

extern "C" void quantize(const void *x, int8_t *q, float *scales, int64_t n, int64_t block, int type, int threads) {
  with_type(type, [&](auto k) {
    using X = decltype(k);
    each_block(n, block, threads, [=](int64_t b, int64_t at, int64_t size) { quantize_block(static_cast<const X *>(x) + at, q + at, scales + b, size); });
  });
}

extern "C" void dequantize(const int8_t *q, const float *scales, void *out, int64_t n, int64_t block, int add, int type, int threads) {
  with_type(type, [&](auto k) {
    using X = decltype(k);
    each_block(n, block, threads, [=](int64_t b, int64_t at, int64_t size) { dequantize_block(q + at, scales[b], static_cast<X *>(out) + at, size, add != 0); });
  });
}

extern "C" void pack_signs(const void *x, float *error, uint8_t *bits, float *scales, int64_t n, int64_t block, int type, int threads) {
  with_type(type, [&](auto k) {
    using X = decltype(k);
    each_block(n, block, threads, [=](int64_t b, int64_t at, int64_t size) {
      float v[4096];  // the largest block
      pack_block(static_cast<const X *>(x) + at, error ? error + at : nullptr, bits + at / 8, scales + b, size, v);
    });
  });
}

extern "C" void unpack_signs(const uint8_t *bits, const float *scales, void *out, int64_t n, int64_t block, int add, int type, int threads) {
  with_type(type, [&](auto k) {
    using X = decltype(k);
    each_block(n, block, threads, [=](int64_t b, int64_t at, int64_t size) { unpack_block(bits + at / 8, scales[b], static_cast<X *>(out) + at, size, add != 0); });
  });
}
