// Optimizer updates in one pass. Formulas work on float32 in pieces that stay in the innermost cache; other formats are widened before and
// narrowed after, so that a formula is compiled once.
#include "common.h"

static const int64_t BLOCK = 32768;
static const int64_t PIECE = 1024;
static const int64_t BLOCK8 = 256;  // elements with one scale of 8-bit states
enum Format { FLOAT32, BFLOAT16, FLOAT16, NONE, SIGNED8, UNSIGNED8 };

struct Noise { uint32_t key0, key1; bool on; };

static inline uint32_t mix(uint32_t x) {  // lowbias32
  x ^= x >> 16; x *= 0x7feb352du; x ^= x >> 15; x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

static void random_bits(uint32_t *bits, int64_t first, int64_t n, const Noise &noise, uint32_t stream) {
  const uint32_t low = uint32_t(first), high = uint32_t(uint64_t(first) >> 32);
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    uint32_t at = low + uint32_t(i), above = high + (at < low ? 1u : 0u);
    bits[i] = mix(mix(at ^ noise.key0) ^ (above * 0x9e3779b9u + noise.key1 + stream * 0x85ebca6bu));
  }
}

static inline uint16_t stochastic(float x, uint32_t random) {
  const uint32_t raw = bit_cast<uint32_t>(x);
  const uint32_t add = (raw & 0x7f800000u) == 0x7f800000u ? 0u : random & 0xffffu;
  return uint16_t((x != x ? 0x7fc00000u : raw + add) >> 16);
}

template <bool SIGNED> static void decode8(const uint8_t *codes, float scale, float *x, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    uint32_t code = codes[i], size = SIGNED ? code & 127u : code, sign = SIGNED ? (code >> 7) << 31 : 0;
    uint32_t bits = size ? (size + (SIGNED ? 889u : 761u)) << 20 : 0;
    x[i] = bit_cast<float>(bits | sign) * scale;
  }
}

template <bool SIGNED, bool RANDOM>
static void encode8(const float *x, const uint32_t *random, uint8_t *codes, float *scale, int64_t n) {
  float peak = 0, spoiled = 0;
#pragma omp simd reduction(max : peak) reduction(+ : spoiled)
  for (int64_t i = 0; i < n; i++) {
    float size = std::fabs(x[i]);
    peak = size > peak ? size : peak;
    spoiled += x[i] * 0.f;
  }
  const float inverse = peak > 1e-37f ? 1.f / peak : 0.f;
  *scale = peak + spoiled;
  const int32_t base = SIGNED ? 889 : 761, top = SIGNED ? 127 : 255;
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    float t = x[i] * inverse, size = std::fabs(t);
    int32_t raw = size < 2.f ? bit_cast<int32_t>(size) : 0;
    int32_t add = RANDOM ? int32_t(random[i] & 0xfffffu) : 0x7ffff + ((raw >> 20) & 1);
    int32_t code = ((raw + add) >> 20) - base;
    code = code < 0 ? 0 : (code > top ? top : code);
    if (SIGNED) code += (t < 0 && code > 0) ? 128 : 0;
    else code = raw > 0 ? (code > 1 ? code : 1) : 0;
    codes[i] = uint8_t(code);
  }
}

// A piece of a tensor as float32: the tensor's own memory, or `room` that it is widened into.
static float *read(void *data, float *scales, int format, int64_t at, int64_t n, float *room) {
  if (format == FLOAT32) return static_cast<float *>(data) + at;
  if (format == SIGNED8 || format == UNSIGNED8) {
    const uint8_t *codes = static_cast<const uint8_t *>(data) + at;
    for (int64_t i = 0; i < n; i += BLOCK8) {
      const int64_t size = std::min(BLOCK8, n - i);
      if (format == SIGNED8) decode8<true>(codes + i, scales[(at + i) / BLOCK8], room + i, size);
      else decode8<false>(codes + i, scales[(at + i) / BLOCK8], room + i, size);
    }
    return room;
  }
  with_type(format, [&](auto kind) {
    const auto *x = static_cast<const decltype(kind) *>(data) + at;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) room[i] = widen(x[i]);
  });
  return room;
}

static void write(const float *x, void *data, float *scales, int format, int64_t at, int64_t n, const uint32_t *random) {
  if (format == SIGNED8 || format == UNSIGNED8) {
    uint8_t *codes = static_cast<uint8_t *>(data) + at;
    for (int64_t i = 0; i < n; i += BLOCK8) {
      const int64_t size = std::min(BLOCK8, n - i);
      float *scale = scales + (at + i) / BLOCK8;
      if (random && format == SIGNED8) encode8<true, true>(x + i, random + i, codes + i, scale, size);
      else if (random) encode8<false, true>(x + i, random + i, codes + i, scale, size);
      else if (format == SIGNED8) encode8<true, false>(x + i, nullptr, codes + i, scale, size);
      else encode8<false, false>(x + i, nullptr, codes + i, scale, size);
    }
  } else if (format == BFLOAT16 && random) {
    bf16 *out = static_cast<bf16 *>(data) + at;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) out[i].bits = stochastic(x[i], random[i]);
  } else {
    with_type(format, [&](auto kind) {
      auto *out = static_cast<decltype(kind) *>(data) + at;
#pragma omp simd
      for (int64_t i = 0; i < n; i++) narrow(x[i], out[i]);
    });
  }
}

// The formulas. numbers: as partita_kernels/<rule>.py lists them.

static void adamw(float *__restrict p, const float *__restrict g, float *__restrict m, float *__restrict v, int64_t n, const float *a, int flag) {
  const float keep = a[0], one1 = a[1], beta2 = a[2], one2 = a[3], eps = a[4], decay = flag ? 0.f : a[5], step = a[6], unbias = 1.f / a[7];
  const float shrink = flag ? keep : 1.f;
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    float weight = p[i], grad = g[i] + decay * weight;
    float first = m[i] + one1 * (grad - m[i]);
    float second = beta2 * v[i] + one2 * grad * grad;
    m[i] = first; v[i] = second;
    p[i] = weight * shrink - step * first / (std::sqrt(second) * unbias + eps);
  }
}

static void sgd(float *__restrict p, const float *__restrict g, float *__restrict b, int64_t n, const float *a, int flag) {
  const float lr = a[0], momentum = a[1], decay = a[2];
  if (!flag) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) p[i] -= lr * (g[i] + decay * p[i]);
    return;
  }
  const bool nesterov = flag == 3;
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    float grad = g[i] + decay * p[i], moved = momentum * b[i] + grad;
    b[i] = moved;
    p[i] -= lr * (nesterov ? grad + momentum * moved : moved);
  }
}

static void lion(float *__restrict p, const float *__restrict g, float *__restrict m, int64_t n, const float *a) {
  const float lr = a[0], keep = a[1], one1 = a[2], one2 = a[3];
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    float apart = g[i] - m[i], mixed = m[i] + one1 * apart;
    float sign = mixed > 0 ? 1.f : (mixed < 0 ? -1.f : mixed);  // of NaN it is NaN
    m[i] += one2 * apart;
    p[i] = p[i] * keep - lr * sign;
  }
}

struct Tensors { void **data; float **scales; const int64_t *formats; };  // of states: one list after the other

struct Update {
  int rule, flag;
  int64_t count, states, width;
  const int64_t *starts;
  void **params, **grads, **copies;
  int p_format, g_format, c_format;
  Tensors state;
  const double *numbers;
  float scale;
  Noise noise;
};

static void piece(const Update &u, int64_t t, int64_t at, int64_t n, const float *numbers) {
  alignas(64) float room[4][PIECE];
  alignas(64) uint32_t random[PIECE];
  float *p = read(u.params[t], nullptr, u.p_format, at, n, room[0]);
  const float *g = read(u.grads[t], nullptr, u.g_format, at, n, room[1]);
#pragma omp simd
  for (int64_t i = 0; i < n; i++) room[1][i] = g[i] * u.scale;
  float *s[2] = {nullptr, nullptr};
  for (int64_t k = 0; k < u.states; k++)
    s[k] = read(u.state.data[k * u.count + t], u.state.scales[k * u.count + t], int(u.state.formats[k]), at, n, room[2 + k]);
  if (u.rule == 0) adamw(p, room[1], s[0], s[1], n, numbers, u.flag);
  else if (u.rule == 1) sgd(p, room[1], s[0], n, numbers, u.flag);
  else lion(p, room[1], s[0], n, numbers);
  for (int64_t k = 0; k < u.states; k++) {
    if (u.state.formats[k] == FLOAT32) continue;
    if (u.noise.on) random_bits(random, u.starts[t] + at, n, u.noise, uint32_t(k + 1));
    write(s[k], u.state.data[k * u.count + t], u.state.scales[k * u.count + t], int(u.state.formats[k]), at, n, u.noise.on ? random : nullptr);
  }
  if (u.c_format != NONE) write(p, u.copies[t], nullptr, u.c_format, at, n, nullptr);
  if (u.p_format != FLOAT32) {
    if (u.noise.on) random_bits(random, u.starts[t] + at, n, u.noise, 0);
    write(p, u.params[t], nullptr, u.p_format, at, n, u.noise.on ? random : nullptr);
  }
}

extern "C" void update(int rule, int64_t count, const int64_t *sizes, const int64_t *starts, void **params, int p_format, void **grads,
                       int g_format, void **copies, int c_format, void **states, float **state_scales, const int64_t *state_formats,
                       int64_t state_count, const double *numbers, int64_t width, float scale, int flag, uint32_t key0, uint32_t key1,
                       int stochastic, int threads) {
  const Update u{rule, flag, count, state_count, width, starts, params, grads, copies, p_format, g_format, c_format,
                 {states, state_scales, state_formats}, numbers, scale, {key0, key1, stochastic != 0}};
  const std::vector<Block> blocks = cut(count, sizes, BLOCK);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (size_t b = 0; b < blocks.size(); b++) {
    const int64_t t = blocks[b].tensor, end = blocks[b].end;
    float own[16];
    for (int64_t i = 0; i < std::min<int64_t>(width, 16); i++) own[i] = float(numbers[t * width + i]);
    for (int64_t at = blocks[b].begin; at < end; at += PIECE) piece(u, t, at, std::min(PIECE, end - at), own);
  }
}
