// Formats for the wire: 8 and 4 bits with block scales, and one bit with block scales. A block is read from memory once.
#include "common.h"
#include <type_traits>

enum Format { INT8, INT4, E4M3, E5M2 };

template <int FORMAT> struct Code;
template <> struct Code<INT8> {
  static constexpr float TOP = 127;
  static inline uint32_t encode(float t) { return bit_cast<uint32_t>(t + 12582912.f); }  // 1.5 * 2^23: rounds to nearest, ties to even
  static inline float decode(uint32_t code) { return float(int32_t(code << 24) >> 24); }
};
template <> struct Code<INT4> {
  static constexpr float TOP = 7;
  static inline uint32_t encode(float t) { return bit_cast<uint32_t>(t + 12582912.f) & 15; }
  static inline float decode(uint32_t code) { return float(int32_t(code << 28) >> 28); }
};
template <int FRACTION, int BIAS> struct Float8 {
  // Adding 2^(e + 23 - FRACTION) to a size of exponent e (at least that of normal numbers) leaves its rounded fraction in the last bits.
  static inline uint32_t encode(float t) {
    constexpr uint32_t least = uint32_t(128 - BIAS) << 23, up = uint32_t(23 - FRACTION) << 23;
    const uint32_t bits = bit_cast<uint32_t>(t), size = bits & 0x7fffffffu;
    const uint32_t exponent = (size > least ? size : least) & 0x7f800000u;
    const uint32_t fraction = bit_cast<uint32_t>(bit_cast<float>(size) + bit_cast<float>(exponent + up)) - (exponent + up);
    return (bits >> 24 & 128) | (fraction + ((exponent - least) >> (23 - FRACTION)));
  }
  static inline float decode(uint32_t code) {
    const uint32_t size = code & 127, sign = (code & 128) << 24;
    const float denormal = float(int32_t(size)) * bit_cast<float>(uint32_t(128 - BIAS - FRACTION) << 23);
    const uint32_t normal = (size + (uint32_t(127 - BIAS) << FRACTION)) << (23 - FRACTION);
    return bit_cast<float>((size < (1u << FRACTION) ? bit_cast<uint32_t>(denormal) : normal) | sign);
  }
};
template <> struct Code<E4M3> : Float8<3, 7> { static constexpr float TOP = 448; };
template <> struct Code<E5M2> : Float8<2, 15> { static constexpr float TOP = 57344; };

// Bits of |x| sort like numbers, and NaN and Inf come after all others: one integer maximum finds the peak and what spoils it.
static inline uint32_t largest(const float *x, int64_t n) {
  uint32_t most = 0;
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < n; i++) {
    const uint32_t size = bit_cast<uint32_t>(x[i]) & 0x7fffffffu;
    most = size > most ? size : most;
  }
  return most;
}
template <class X> static inline uint32_t largest(const X *x, int64_t n) {  // 16 bits: twice as many in a vector
  uint16_t most = 0;
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < n; i++) {
    const uint16_t size = x[i].bits & 0x7fff;
    most = size > most ? size : most;
  }
  return bit_cast<uint32_t>(widen(X{most}));
}

template <class X, int FORMAT> static void quantize_block(const X *x, uint8_t *q, float *scale, int64_t n) {
  constexpr float top = Code<FORMAT>::TOP;
  const uint32_t most = largest(x, n);
  const float peak = bit_cast<float>(most), inverse = peak > 1e-36f && most < 0x7f800000u ? top / peak : 0.f;
  *scale = most < 0x7f800000u ? peak / top : NAN;
  if (inverse == 0.f) {  // zeros, or spoiled: the scale says which
    std::fill(q, q + (FORMAT == INT4 ? (n + 1) / 2 : n), uint8_t(0));
    return;
  }
  if (FORMAT != INT4) {  // the products are at most two float32 steps above top, which is less than rounding takes off
#pragma omp simd
    for (int64_t i = 0; i < n; i++) q[i] = uint8_t(Code<FORMAT>::encode(widen(x[i]) * inverse));
    return;
  }
  uint8_t codes[4096];  // the largest block
#pragma omp simd
  for (int64_t i = 0; i < n; i++) codes[i] = uint8_t(Code<FORMAT>::encode(widen(x[i]) * inverse));
  if (n & 1) codes[n] = 0;  // there is room: the largest block is even
#pragma omp simd
  for (int64_t i = 0; i < (n + 1) / 2; i++) q[i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
}

template <class X, int FORMAT, bool ADD> static void dequantize_block(const uint8_t *q, float scale, X *out, int64_t n) {
  uint8_t codes[4096];
  if (FORMAT == INT4) {
#pragma omp simd
    for (int64_t i = 0; i < n / 2; i++) { codes[2 * i] = q[i] & 15; codes[2 * i + 1] = q[i] >> 4; }
    if (n & 1) codes[n - 1] = q[n / 2] & 15;
    q = codes;
  }
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    const float value = Code<FORMAT>::decode(q[i]) * scale;
    narrow(ADD ? widen(out[i]) + value : value, out[i]);
  }
}

// Calls f with the format as a type.
template <class F> static void with_format(int format, F f) {
  if (format == INT8) f(std::integral_constant<int, INT8>{});
  else if (format == INT4) f(std::integral_constant<int, INT4>{});
  else if (format == E4M3) f(std::integral_constant<int, E4M3>{});
  else f(std::integral_constant<int, E5M2>{});
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

static const int64_t SHARE = 65536;  // elements that a thread takes at once: whole blocks
static const int64_t AHEAD = 2048;   // elements between what is computed and what is fetched

extern "C" void quantize(int64_t count, const int64_t *sizes, const void **x, uint8_t **q, float **scales, int64_t block, int format, int type,
                         int threads) {
  const std::vector<Block> shares = cut(count, sizes, SHARE);
  with_type(type, [&](auto kind) {
    with_format(format, [&](auto number) {
      using X = decltype(kind);
      constexpr int F = decltype(number)::value;
#pragma omp parallel for schedule(static) num_threads(threads)
      for (size_t s = 0; s < shares.size(); s++) {
        const Block b = shares[s];
        for (int64_t at = b.begin; at < b.end; at += block) {
          // A block is read, then computed: memory would idle meanwhile.
          const char *next = static_cast<const char *>(x[b.tensor]) + (at + AHEAD) * int64_t(sizeof(X));
          for (int64_t line = 0; line < block * int64_t(sizeof(X)); line += 64) __builtin_prefetch(next + line);
          quantize_block<X, F>(static_cast<const X *>(x[b.tensor]) + at, q[b.tensor] + (F == INT4 ? at / 2 : at), scales[b.tensor] + at / block,
                               std::min(block, b.end - at));
        }
      }
    });
  });
}

extern "C" void dequantize(int64_t count, const int64_t *sizes, void **out, const uint8_t **q, const float **scales, int64_t block, int format,
                           int add, int type, int threads) {
  const std::vector<Block> shares = cut(count, sizes, SHARE);
  with_type(type, [&](auto kind) {
    with_format(format, [&](auto number) {
      using X = decltype(kind);
      constexpr int F = decltype(number)::value;
#pragma omp parallel for schedule(static) num_threads(threads)
      for (size_t s = 0; s < shares.size(); s++) {
        const Block b = shares[s];
        for (int64_t at = b.begin; at < b.end; at += block) {
          const uint8_t *codes = q[b.tensor] + (F == INT4 ? at / 2 : at);
          X *to = static_cast<X *>(out[b.tensor]) + at;
          const float scale = scales[b.tensor][at / block];
          if (add) dequantize_block<X, F, true>(codes, scale, to, std::min(block, b.end - at));
          else dequantize_block<X, F, false>(codes, scale, to, std::min(block, b.end - at));
        }
      }
    });
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
