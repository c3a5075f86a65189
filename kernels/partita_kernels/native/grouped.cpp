// Products of rows that lie in groups with a matrix of each group, in float32, for groups of few rows. Then a matrix is used a few times
// only, and the products take as long as it takes to read it: it is read as it lies, without a copy in another order, and prefetched.
// A weight gradient is written past the cache, which need not read first what is overwritten.
// Numbers of columns are multiples of LANES. Each sum runs in the same order whatever the number of threads.
#include "common.h"

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>

#ifdef __AVX512F__
constexpr int LANES = 16, ROWS = 14, VECTORS = 2;  // of a tile: ROWS * VECTORS sums, VECTORS and a factor fit into 32 registers
#else
constexpr int LANES = 8, ROWS = 6, VECTORS = 2;  // into 16 registers
#endif
constexpr int64_t LINE = 16;         // floats of a cache line
constexpr int64_t WIDE = VECTORS * LANES;  // columns of a tile
constexpr int64_t DEPTH = 256;       // products that are summed before a tile is written, so that what all tiles of a group read stays in the cache
constexpr int64_t DOT_DEPTH = 512;   // the same of dot products
constexpr int64_t AHEAD = 1 << 16;   // bytes by which rows are prefetched
constexpr int64_t CACHED = 1 << 20;  // bytes of a result that stays in the cache
constexpr int DOTS = 4, DOT_ROWS = LANES / DOTS;  // of a tile of dot products: their sums fill one vector

typedef float vec __attribute__((vector_size(LANES * sizeof(float))));
typedef float loose __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));  // anywhere in memory
typedef float four __attribute__((vector_size(DOTS * sizeof(float)), aligned(4)));
typedef int lanes __attribute__((vector_size(LANES * sizeof(int))));

#define INLINE static inline __attribute__((always_inline))

INLINE vec load(const float *p) { return *reinterpret_cast<const loose *>(p); }
INLINE void store(float *p, vec v) { *reinterpret_cast<loose *>(p) = v; }

enum class Write { SET, ADD, STREAM };

template <Write W> INLINE void write(float *p, vec v) {
  if constexpr (W == Write::SET) store(p, v);
  if constexpr (W == Write::ADD) store(p, load(p) + v);
#ifdef __AVX512F__
  if constexpr (W == Write::STREAM) _mm512_stream_ps(p, reinterpret_cast<__m512>(v));
#else
  if constexpr (W == Write::STREAM) _mm256_stream_ps(p, reinterpret_cast<__m256>(v));
#endif
}

// Lines of the cache that are fetched for later while something else is computed, two at each step. Without a branch: one that is
// mispredicted costs more than what it saves. Step 0: the same line again and again.
struct Later { const float *one, *other; int64_t step; };

// c[R, C * LANES] = sum over t of a(r, t) b[t, :], where a(r, t) lies at a[r * row + t * column].
// W is no argument: a branch on it after the loop was seen to make the whole 15 % slower.
template <int R, int C, Write W>
INLINE void tile(const float *a, int64_t row, int64_t column, const float *b, int64_t ldb, float *c, int64_t ldc, int64_t depth, Later later) {
  vec sum[R][C] = {};
#pragma GCC unroll 2
  for (int64_t t = 0; t < depth; t++) {
    vec v[C];
    __builtin_prefetch(later.one + t * later.step, 0, 2);
    __builtin_prefetch(later.other + t * later.step, 0, 2);
#pragma GCC unroll 4
    for (int j = 0; j < C; j++) v[j] = load(b + t * ldb + j * LANES);
#pragma GCC unroll 16
    for (int i = 0; i < R; i++) {
      const float factor = a[i * row + t * column];
#pragma GCC unroll 4
      for (int j = 0; j < C; j++) sum[i][j] += factor * v[j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; i++)
#pragma GCC unroll 4
    for (int j = 0; j < C; j++) write<W>(c + i * ldc + j * LANES, sum[i][j]);
}

// A tile of `rows` <= R rows.
template <int C, Write W, int R = ROWS>
static void tile_of(int64_t rows, const float *a, int64_t row, int64_t column, const float *b, int64_t ldb, float *c, int64_t ldc, int64_t depth,
                    Later later) {
  if (rows == R) return tile<R, C, W>(a, row, column, b, ldb, c, ldc, depth, later);
  if constexpr (R > 1) tile_of<C, W, R - 1>(rows, a, row, column, b, ldb, c, ldc, depth, later);
}

template <Write W>
static void tile_of(int64_t rows, int64_t width, const float *a, int64_t row, int64_t column, const float *b, int64_t ldb, float *c, int64_t ldc,
                    int64_t depth, Later later) {
  if (width == WIDE) tile_of<VECTORS, W>(rows, a, row, column, b, ldb, c, ldc, depth, later);
  else tile_of<1, W>(rows, a, row, column, b, ldb, c, ldc, depth, later);
}

// Calls f(begin, rows, number, count) for tiles of about equal height.
template <class F> static void tiles(int64_t rows, F f) {
  const int64_t count = (rows + ROWS - 1) / ROWS;
  for (int64_t i = 0; i < count; i++) f(rows * i / count, rows * (i + 1) / count - rows * i / count, i, count);
}

struct Group { const float *x, *w; float *y; int64_t rows; const float *next; };  // next: the matrix that is read after w
struct Sizes { int64_t depth, width, ldx, ldw; };

// y = x w for the columns begin..end of w [depth, width].
static void straight(const Group &g, const Sizes &s, int64_t begin, int64_t end) {
  for (int64_t k = 0; k < s.depth; k += DEPTH) {
    const int64_t depth = std::min(DEPTH, s.depth - k);
    const float *after = k + DEPTH < s.depth ? g.w + (k + DEPTH) * s.ldw + begin : g.next + begin;
    for (int64_t n = begin, width; n < end; n += width) {
      width = end - n < WIDE ? LANES : WIDE;
      const float *panel = n + width < end ? g.w + k * s.ldw + n + width : after;
      tiles(g.rows, [&](int64_t r, int64_t rows, int64_t i, int64_t count) {
        const float *x = g.x + r * s.ldx + k, *w = g.w + k * s.ldw + n;
        const Later later = i ? Later{w, w, 0} : Later{panel, panel + LINE, s.ldw};
        float *y = g.y + r * s.width + n;
        if (k) tile_of<Write::ADD>(rows, width, x, s.ldx, 1, w, s.ldw, y, s.width, depth, later);
        else tile_of<Write::SET>(rows, width, x, s.ldx, 1, w, s.ldw, y, s.width, depth, later);
      });
    }
  }
}

#ifdef __AVX512F__
template <int STEP> INLINE void halve(vec *v) {
  lanes low, high;
  for (int l = 0; l < LANES; l++) {
    low[l] = l & STEP ? LANES + l - STEP : l;
    high[l] = l & STEP ? LANES + l : l + STEP;
  }
#pragma GCC unroll 8
  for (int i = 0; i < STEP; i++) {
    const __m512 a = reinterpret_cast<__m512>(v[i]), b = reinterpret_cast<__m512>(v[i + STEP]);
    v[i] = reinterpret_cast<vec>(_mm512_permutex2var_ps(a, reinterpret_cast<__m512i>(low), b)) +
           reinterpret_cast<vec>(_mm512_permutex2var_ps(a, reinterpret_cast<__m512i>(high), b));
  }
}

// The sum of each of LANES vectors.
INLINE vec sums_of(vec *v) {
  halve<8>(v); halve<4>(v); halve<2>(v); halve<1>(v);
  return v[0];
}
#else
INLINE vec sums_of(vec *v) {
  __m256 pair[4], four[2];
  for (int i = 0; i < 4; i++) pair[i] = _mm256_hadd_ps(reinterpret_cast<__m256>(v[2 * i]), reinterpret_cast<__m256>(v[2 * i + 1]));
  for (int i = 0; i < 2; i++) four[i] = _mm256_hadd_ps(pair[2 * i], pair[2 * i + 1]);
  const __m256 low = _mm256_permute2f128_ps(four[0], four[1], 0x20), high = _mm256_permute2f128_ps(four[0], four[1], 0x31);
  return reinterpret_cast<vec>(low) + reinterpret_cast<vec>(high);
}
#endif

// y[R, DOTS]: products of R rows of x with rows of w. LINES: how many rows of w are fetched for later. Not inlined, as its pointers take the
// registers there are.
template <int R, int LINES>
static __attribute__((noinline)) void dots(const float *x, int64_t ldx, const float *w, int64_t ldw, float *y, int64_t ldy, int64_t depth, bool add,
                                           const float *later) {
  vec sum[DOT_ROWS * DOTS] = {};
#pragma GCC unroll 2
  for (int64_t k = 0; k < depth; k += LANES) {
    vec a[R];
#pragma GCC unroll 4
    for (int j = 0; j < LINES; j++) __builtin_prefetch(later + j * ldw + k, 0, 2);
#pragma GCC unroll 4
    for (int i = 0; i < R; i++) a[i] = load(x + i * ldx + k);
#pragma GCC unroll 4
    for (int j = 0; j < DOTS; j++) {
      const vec b = load(w + j * ldw + k);
#pragma GCC unroll 4
      for (int i = 0; i < R; i++) sum[i * DOTS + j] += a[i] * b;
    }
  }
  const vec all = sums_of(sum);
  four part[DOT_ROWS];
  std::memcpy(part, &all, sizeof part);
#pragma GCC unroll 4
  for (int i = 0; i < R; i++) {
    four *to = reinterpret_cast<four *>(y + i * ldy);
    *to = add ? *to + part[i] : part[i];
  }
}

template <int LINES, int R = DOT_ROWS>
static void dots_of(int64_t rows, const float *x, int64_t ldx, const float *w, int64_t ldw, float *y, int64_t ldy, int64_t depth, bool add,
                    const float *later) {
  if (rows >= R) return dots<R, LINES>(x, ldx, w, ldw, y, ldy, depth, add, later);
  if constexpr (R > 1) dots_of<LINES, R - 1>(rows, x, ldx, w, ldw, y, ldy, depth, add, later);
}

// y = x w for the columns begin..end of w [depth, width], whose columns lie in memory one after the other.
static void turned(const Group &g, const Sizes &s, int64_t begin, int64_t end) {
  for (int64_t k = 0; k < s.depth; k += DOT_DEPTH) {
    const int64_t depth = std::min(DOT_DEPTH, s.depth - k), ahead = (AHEAD / 4 / depth + DOTS - 1) / DOTS * DOTS;
    const float *after = k + DOT_DEPTH < s.depth ? g.w + k + DOT_DEPTH : g.next;
    const int64_t count = (g.rows + DOT_ROWS - 1) / DOT_ROWS;
    for (int64_t n = begin; n < end; n += DOTS) {
      const float *rows = n + ahead < end ? g.w + (n + ahead) * s.ldw + k : after + (n + ahead - end + begin) * s.ldw;
      for (int64_t i = 0; i < count; i++) {
        const int64_t r = i * DOT_ROWS;
        const float *x = g.x + r * s.ldx + k, *w = g.w + n * s.ldw + k;
        float *y = g.y + r * s.width + n;
        if (count >= DOTS && i < DOTS) dots_of<1>(g.rows - r, x, s.ldx, w, s.ldw, y, s.width, depth, k > 0, rows + i * s.ldw);
        else if (i) dots_of<0>(g.rows - r, x, s.ldx, w, s.ldw, y, s.width, depth, k > 0, rows);
        else dots_of<DOTS>(g.rows - r, x, s.ldx, w, s.ldw, y, s.width, depth, k > 0, rows);
      }
    }
  }
}

// dw = x^T dy for the rows begin..end of dw [depth, width]; w of the group is dy, whose rows are ldw apart, and y is dw.
static void outer(const Group &g, const Sizes &s, int64_t begin, int64_t end, bool stream) {
  const Later nothing{g.x, g.x, 0};
  if (!g.rows) return void(std::memset(g.y + begin * s.width, 0, (end - begin) * s.width * sizeof(float)));
  for (int64_t t = 0; t < g.rows; t += DEPTH) {
    const int64_t depth = std::min(DEPTH, g.rows - t);
    tiles(end - begin, [&](int64_t r, int64_t rows, int64_t, int64_t) {
      for (int64_t n = 0, width; n < s.width; n += width) {
        width = s.width - n < WIDE ? LANES : WIDE;
        const float *x = g.x + t * s.ldx + begin + r, *dy = g.w + t * s.ldw + n;
        float *dw = g.y + (begin + r) * s.width + n;
        if (t) tile_of<Write::ADD>(rows, width, x, 1, s.ldx, dy, s.ldw, dw, s.width, depth, nothing);
        else if (stream && g.rows <= DEPTH) tile_of<Write::STREAM>(rows, width, x, 1, s.ldx, dy, s.ldw, dw, s.width, depth, nothing);
        else tile_of<Write::SET>(rows, width, x, 1, s.ldx, dy, s.ldw, dw, s.width, depth, nothing);
      }
    });
  }
  if (stream) _mm_sfence();
}

// Calls f(group, begin, end) for parts of 0..length, a multiple of WIDE, of each group: enough of them that threads end at about the same time.
template <class F> static void shared_out(const std::vector<Group> &groups, int64_t length, int threads, F f) {
  const int64_t units = (length + WIDE - 1) / WIDE, most = 8 * threads / std::max<int64_t>(1, groups.size()) + 1;
  const int64_t parts = threads == 1 ? 1 : std::min(units, most), count = groups.size() * parts;
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t i = 0; i < count; i++) {
    const int64_t part = i % parts;
    f(groups[i / parts], std::min(length, units * part / parts * WIDE), std::min(length, units * (part + 1) / parts * WIDE));
  }
}

extern "C" int64_t grouped_lanes() { return LANES; }

static bool fit(const int64_t *sizes, int64_t count, int64_t n) {
  for (int64_t g = 0; g < count; g++) {
    if (sizes[g] < 0 || sizes[g] > n) return false;
    n -= sizes[g];
  }
  return true;
}

// Both return 0 where groups don't fit into n rows, and 1 otherwise.
// x [n, depth], w [count, depth, width] whose rows are ldw apart, or its columns, if they lie in memory one after the other -> y [n, width].
extern "C" int grouped_product(const float *x, const float *w, float *y, const int64_t *sizes, int64_t n, int64_t depth, int64_t width,
                               int64_t count, int64_t ldx, int64_t w_group, int64_t ldw, int by_column, int threads) {
  if (!fit(sizes, count, n)) return 0;
  const Sizes s{depth, width, ldx, ldw};
  std::vector<Group> groups;
  int64_t row = 0;
  for (int64_t g = 0; g < count; row += sizes[g++]) {
    const float *own = w + g * w_group;
    if (!groups.empty()) groups.back().next = own;
    if (sizes[g]) groups.push_back({x + row * ldx, own, y + row * width, sizes[g], own});
  }
  std::memset(y + row * width, 0, (n - row) * width * sizeof(float));
  shared_out(groups, width, threads, [&](const Group &g, int64_t begin, int64_t end) {
    by_column ? turned(g, s, begin, end) : straight(g, s, begin, end);
  });
  return 1;
}

// x [n, depth], dy [n, width] -> dw [count, depth, width]: x_g^T dy_g of each group.
extern "C" int grouped_outer(const float *x, const float *dy, float *dw, const int64_t *sizes, int64_t n, int64_t depth, int64_t width,
                             int64_t count, int64_t ldx, int64_t ldy, int threads) {
  if (!fit(sizes, count, n)) return 0;
  const Sizes s{depth, width, ldx, ldy};
  std::vector<Group> groups;
  for (int64_t g = 0, row = 0; g < count; row += sizes[g++])
    groups.push_back({x + row * ldx, dy + row * ldy, dw + g * depth * width, sizes[g], nullptr});
  const bool aligned = reinterpret_cast<uintptr_t>(dw) % sizeof(vec) == 0, large = count * depth * width * int64_t(sizeof(float)) > CACHED;
  shared_out(groups, depth, threads, [&](const Group &g, int64_t begin, int64_t end) { outer(g, s, begin, end, aligned && large); });
  return 1;
}

#else
extern "C" int64_t grouped_lanes() { return 0; }  // torch's products are used
#endif
