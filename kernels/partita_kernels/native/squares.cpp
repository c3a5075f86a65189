// Sum of squares of flat ranges: products and sums in double, so that it is exact to about 1e-15 and finite numbers never overflow.
#include "common.h"
#if defined(__AVX__)
#include <immintrin.h>
#endif

static const int64_t BLOCK = 32768;
static const int LANES = 32;

template <class T> static double block_sum(const T *x, int64_t begin, int64_t end) {
  double lanes[LANES] = {};
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES)
    for (int j = 0; j < LANES; j++) {
      double value = widen(x[i + j]);
      lanes[j] += value * value;
    }
  for (; i < end; i++) {
    double value = widen(x[i]);
    lanes[0] += value * value;
  }
  double total = 0;
  for (double lane : lanes) total += lane;
  return total;
}

extern "C" double squared_norm(int64_t count, const int64_t *sizes, const void **x, int type, int threads) {
  const std::vector<Block> blocks = cut(count, sizes, BLOCK);
  std::vector<double> sums(blocks.size());
  with_type(type, [&](auto kind) {
    using T = decltype(kind);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (size_t b = 0; b < blocks.size(); b++)
      sums[b] = block_sum(static_cast<const T *>(x[blocks[b].tensor]), blocks[b].begin, blocks[b].end);
  });
  double total = 0;  // in order: the same bits for any number of threads
  for (double sum : sums) total += sum;
  return total;
}

// into = x, or into + x, and the sum of the squares of the result. Written past the caches where the CPU can: a whole model's gradients
// would only drive out what backward reads next.
template <bool ADD> static double put(float *into, const float *x, int64_t n) {
  double lanes[LANES] = {}, rest = 0;
  int64_t i = 0;
  const auto one = [&](int64_t at) {
    const float value = ADD ? into[at] + x[at] : x[at];
    into[at] = value;
    rest += double(value) * value;
  };
  for (; i < n && (reinterpret_cast<uintptr_t>(into + i) & 63); i++) one(i);
  for (; i + LANES <= n; i += LANES) {
    float values[LANES];
    for (int j = 0; j < LANES; j++) values[j] = ADD ? into[i + j] + x[i + j] : x[i + j];
    for (int j = 0; j < LANES; j++) lanes[j] += double(values[j]) * values[j];
#if defined(__AVX__)
    for (int j = 0; j < LANES && !ADD; j += 8) _mm256_stream_ps(into + i + j, _mm256_loadu_ps(values + j));
    if (ADD) std::memcpy(into + i, values, sizeof values);
#else
    std::memcpy(into + i, values, sizeof values);
#endif
  }
  for (; i < n; i++) one(i);
#if defined(__AVX__)
  _mm_sfence();
#endif
  double total = rest;
  for (double lane : lanes) total += lane;
  return total;
}

extern "C" double put_squared(float *into, const float *x, int64_t n, int add, int threads) {
  const std::vector<Block> blocks = cut(1, &n, BLOCK);
  std::vector<double> sums(blocks.size());
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (size_t b = 0; b < blocks.size(); b++) {
    const Block &k = blocks[b];
    sums[b] = add ? put<true>(into + k.begin, x + k.begin, k.end - k.begin) : put<false>(into + k.begin, x + k.begin, k.end - k.begin);
  }
  double total = 0;
  for (double sum : sums) total += sum;
  return total;
}
