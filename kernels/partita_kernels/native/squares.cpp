// Sum of squares of flat ranges: products and sums in double, so that it is exact to about 1e-15 and finite numbers never overflow.
#include "common.h"

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
