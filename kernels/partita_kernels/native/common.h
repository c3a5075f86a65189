// Number formats and work sharing of the native kernels. Plain loops that the compiler turns into vectors.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };
struct none {};  // no tensor of this kind

template <class To, class From> static inline To bit_cast(From from) { To to; std::memcpy(&to, &from, sizeof to); return to; }

static inline float widen(float x) { return x; }
static inline float widen(bf16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }
// By integers and not _Float16, whose conversions GCC leaves one by one: scaling by 2^112 moves the exponent, denormals included;
// what was Inf or NaN is put back.
static inline float widen(fp16 x) {
  uint32_t shifted = uint32_t(x.bits & 0x7fff) << 13;
  float scaled = bit_cast<float>(shifted) * 0x1p112f;
  uint32_t magnitude = shifted >= 0x0f800000u ? (shifted | 0x7f800000u) : bit_cast<uint32_t>(scaled);
  return bit_cast<float>(magnitude | uint32_t(x.bits & 0x8000) << 16);
}

// Round to nearest, ties to even; NaN stays NaN.
static inline void narrow(float x, float &out) { out = x; }
static inline void narrow(float x, bf16 &out) {
  uint32_t u = bit_cast<uint32_t>(x);
  uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  out.bits = uint16_t(x != x ? 0x7fc0u : rounded);
}
static inline void narrow(float x, fp16 &out) {
  uint32_t u = bit_cast<uint32_t>(x), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
  uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
  uint32_t denormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;  // the addition rounds
  uint32_t finite = magnitude < 0x38800000u ? denormal : normal;
  uint32_t result = magnitude >= 0x47800000u ? 0x7c00u : finite;
  out.bits = uint16_t(sign | (x != x ? 0x7e00u : result));
}

// A list of ranges cut into blocks, so that threads share them evenly however many ranges there are.
struct Block { int64_t tensor, begin, end; };

static inline std::vector<Block> cut(int64_t count, const int64_t *sizes, int64_t block) {
  std::vector<Block> blocks;
  for (int64_t t = 0; t < count; t++)
    for (int64_t begin = 0; begin < sizes[t]; begin += block) blocks.push_back({t, begin, std::min(sizes[t], begin + block)});
  return blocks;
}

// Calls f with a value of the C++ type for a dtype code: 0 float32, 1 bfloat16, 2 float16, 3 none.
template <class F> static inline void with_type(int dtype, F f) {
  if (dtype == 0) f(float{}); else if (dtype == 1) f(bf16{}); else if (dtype == 2) f(fp16{});
}
