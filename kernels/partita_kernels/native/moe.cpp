// Mixture of experts: routing, sorting of choices by expert, rows to experts and back with gates.
#include "common.h"
#include "exponential.h"

struct Choosing { int64_t experts, k, groups, kept; float scale; int gate; };  // gate: 0 softmax_all, 1 softmax_chosen, 2 sigmoid

static const float SMALL = 1e-20f;

static inline float key_of(float x) { return x != x ? INFINITY : x; }  // NaN is above all, as in torch

// Index of the largest of the values that are free, the first of equal ones; -1 if none is.
static inline int64_t best_of(const float *x, const uint8_t *taken, int64_t n) {
  int64_t at = -1;
  for (int64_t i = 0; i < n; i++) if (!taken[i] && (at < 0 || x[i] > x[at])) at = i;
  return at;
}

// The same among values of which those that are taken are -inf, in vectors; what is left may be -inf as well.
static inline int64_t largest_of(const float *x, const uint8_t *taken, int64_t n) {
  float top = -INFINITY;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < n; i++) top = x[i] > top ? x[i] : top;
  if (top == -INFINITY) return best_of(x, taken, n);
  int64_t at = n;
#pragma omp simd reduction(min : at)
  for (int64_t i = 0; i < n; i++) at = x[i] == top && i < at ? i : at;
  return at;
}

// Scores of a row, and their sum for sigmoid (for softmax they sum to 1).
template <class X> static float scores_of(const X *x, int64_t n, int gate, float *s) {
  float total = 0, peak = -INFINITY;
  if (gate == 2) {
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < n; i++) { s[i] = sigmoid(widen(x[i])); total += s[i]; }
    return total;
  }
#pragma omp simd reduction(max : peak)
  for (int64_t i = 0; i < n; i++) { float value = widen(x[i]); peak = value > peak ? value : peak; }
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; i++) { s[i] = exponential(widen(x[i]) - peak); total += s[i]; }
  for (int64_t i = 0; i < n; i++) s[i] /= total;
  return 1.f;
}

// Experts outside of the best groups are taken.
static void close_groups(const float *wanted, uint8_t *taken, const Choosing &o, float *strength, uint8_t *closed) {
  const int64_t members = o.experts / o.groups;
  for (int64_t g = 0; g < o.groups; g++) {
    float first = -INFINITY, second = -INFINITY;
    for (int64_t i = g * members; i < (g + 1) * members; i++) {
      if (wanted[i] > first) { second = first; first = wanted[i]; } else if (wanted[i] > second) second = wanted[i];
    }
    strength[g] = members > 1 ? first + second : first;
    closed[g] = 0;
  }
  std::fill(taken, taken + o.experts, 1);
  for (int64_t j = 0; j < o.kept; j++) {
    const int64_t g = best_of(strength, closed, o.groups);
    closed[g] = 1;
    std::fill(taken + g * members, taken + (g + 1) * members, 0);
  }
}

template <class X>
static void route_row(const X *x, const float *bias, int64_t *experts, float *gates, float *p, const Choosing &o, float *room, uint8_t *taken) {
  const int64_t n = o.experts;
  float *s = room, *wanted = room + n;
  const float total = scores_of(x, n, o.gate, s) + (o.gate == 2 ? SMALL : 0.f);
  for (int64_t i = 0; i < n; i++) { p[i] = s[i] / total; wanted[i] = key_of(s[i] + (bias ? bias[i] : 0.f)); }
  std::fill(taken, taken + n, 0);
  if (o.groups > 1) {
    close_groups(wanted, taken, o, room + 2 * n, taken + n);
    for (int64_t i = 0; i < n; i++) wanted[i] = taken[i] ? -INFINITY : wanted[i];
  }
  float chosen = 0;
  for (int64_t j = 0; j < o.k; j++) {
    const int64_t at = largest_of(wanted, taken, n);
    taken[at] = 1;
    wanted[at] = -INFINITY;
    experts[j] = at;
    gates[j] = s[at];
    chosen += s[at];
  }
  const float divisor = o.gate == 0 ? 1.f : chosen + SMALL;
  for (int64_t j = 0; j < o.k; j++) gates[j] = gates[j] / divisor * o.scale;
}

template <class X>
static void route_backward_row(const float *dg, const float *dp, const X *x, const float *p, const int64_t *experts, X *dx, const Choosing &o,
                               float *room) {
  const int64_t n = o.experts;
  float *d = room, *s = room + n;
  float along = 0, total = 0;
  if (o.gate == 2) {
#pragma omp simd reduction(+ : total, along)
    for (int64_t i = 0; i < n; i++) { s[i] = sigmoid(widen(x[i])); total += s[i]; along += dp[i] * p[i]; }
    for (int64_t i = 0; i < n; i++) d[i] = (dp[i] - along) / (total + SMALL);
  } else {
    for (int64_t i = 0; i < n; i++) { s[i] = p[i]; d[i] = dp[i]; }
  }
  float chosen = 0, gated = 0;
  for (int64_t j = 0; j < o.k; j++) { chosen += s[experts[j]]; gated += s[experts[j]] * dg[j]; }
  chosen += SMALL;
  for (int64_t j = 0; j < o.k; j++) d[experts[j]] += o.scale * (o.gate == 0 ? dg[j] : (dg[j] - gated / chosen) / chosen);
  if (o.gate == 2) {
    for (int64_t i = 0; i < n; i++) narrow(d[i] * s[i] * (1.f - s[i]), dx[i]);
    return;
  }
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) sum += d[i] * s[i];
  for (int64_t i = 0; i < n; i++) narrow(s[i] * (d[i] - sum), dx[i]);
}

extern "C" void route(const void *x, const float *bias, int64_t *experts, float *gates, float *p, int64_t tokens, int64_t n, int64_t stride,
                      int64_t k, int64_t groups, int64_t kept, float scale, int gate, int type, int threads) {
  const Choosing o{n, k, groups, kept, scale, gate};
  with_type(type, [&](auto kind) {
    using X = decltype(kind);
#pragma omp parallel num_threads(threads)
    {
      std::vector<float> room(3 * n);
      std::vector<uint8_t> taken(2 * n);
#pragma omp for schedule(static)
      for (int64_t t = 0; t < tokens; t++)
        route_row(static_cast<const X *>(x) + t * stride, bias, experts + t * k, gates + t * k, p + t * n, o, room.data(), taken.data());
    }
  });
}

extern "C" void route_backward(const float *dg, const float *dp, const void *x, const float *p, const int64_t *experts, void *dx, int64_t tokens,
                               int64_t n, int64_t stride, int64_t k, float scale, int gate, int type, int threads) {
  const Choosing o{n, k, 1, 1, scale, gate};
  with_type(type, [&](auto kind) {
    using X = decltype(kind);
#pragma omp parallel num_threads(threads)
    {
      std::vector<float> room(2 * n);
#pragma omp for schedule(static)
      for (int64_t t = 0; t < tokens; t++)
        route_backward_row(dg + t * k, dp + t * n, static_cast<const X *>(x) + t * stride, p + t * n, experts + t * k,
                           static_cast<X *>(dx) + t * n, o, room.data());
    }
  });
}

// A counting sort that keeps the order within an expert; what has no expert comes last.
extern "C" void expert_order(const int64_t *experts, int64_t *slots, int64_t *places, int64_t *sizes, int64_t n, int64_t count) {
  auto group = [&](int64_t e) { return e < 0 || e >= count ? count : e; };
  std::vector<int64_t> next(count + 2, 0);
  for (int64_t i = 0; i < n; i++) next[group(experts[i]) + 1]++;
  std::copy(next.begin() + 1, next.begin() + 1 + count, sizes);
  for (int64_t e = 0; e <= count; e++) next[e + 1] += next[e];
  for (int64_t i = 0; i < n; i++) {
    const int64_t e = group(experts[i]), row = next[e]++;
    slots[row] = i;
    places[i] = e == count ? -1 : row;
  }
}

extern "C" void gather_rows(const void *x, const int64_t *slots, const int64_t *places, const float *gates, void *y, int64_t rows, int64_t n,
                            int64_t k, int64_t stride, int type, int threads) {
  with_type(type, [&](auto kind) {
    using X = decltype(kind);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
      const int64_t slot = slots[r];
      const X *from = static_cast<const X *>(x) + slot / k * stride;
      X *to = static_cast<X *>(y) + r * n;
      if (places[slot] < 0) { std::memset(static_cast<void *>(to), 0, n * sizeof(X)); continue; }
      if (!gates) { std::memcpy(static_cast<void *>(to), from, n * sizeof(X)); continue; }
      const float gate = gates[slot];
#pragma omp simd
      for (int64_t i = 0; i < n; i++) narrow(widen(from[i]) * gate, to[i]);
    }
  });
}

extern "C" void combine_rows(const void *rows, const int64_t *places, const float *gates, void *y, int64_t tokens, int64_t k, int64_t n,
                             int64_t count, int64_t stride, int type, int threads) {
  with_type(type, [&](auto kind) {
    using X = decltype(kind);
#pragma omp parallel num_threads(threads)
    {
      std::vector<float> total(n);
#pragma omp for schedule(static)
      for (int64_t t = 0; t < tokens; t++) {
        std::fill(total.begin(), total.end(), 0.f);
        float *sum = total.data();
        for (int64_t j = t * k; j < (t + 1) * k; j++) {
          if (places[j] < 0 || places[j] >= count) continue;
          const X *from = static_cast<const X *>(rows) + places[j] * stride;
          const float gate = gates ? gates[j] : 1.f;
#pragma omp simd
          for (int64_t i = 0; i < n; i++) sum[i] += widen(from[i]) * gate;
        }
        X *to = static_cast<X *>(y) + t * n;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) narrow(sum[i], to[i]);
      }
    }
  });
}

extern "C" void row_dots(const void *x, const void *rows, const int64_t *places, float *out, int64_t tokens, int64_t k, int64_t n, int64_t count,
                         int64_t x_stride, int64_t stride, int type, int threads) {
  with_type(type, [&](auto kind) {
    using X = decltype(kind);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t c = 0; c < tokens * k; c++) {
      float total = 0;
      if (places[c] >= 0 && places[c] < count) {
        const X *a = static_cast<const X *>(x) + c / k * x_stride, *b = static_cast<const X *>(rows) + places[c] * stride;
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < n; i++) total += widen(a[i]) * widen(b[i]);
      }
      out[c] = total;
    }
  });
}
