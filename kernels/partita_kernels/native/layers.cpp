// Norms, gated activations, rotary positions: a row is read from memory once and stays in the cache.
#include "common.h"
#include "exponential.h"

template <class X, class W>
static void norm_row(const X *x, const X *res, const W *w, const W *b, X *y, X *total, float *mean, float *rstd, int64_t n, float eps, float *row) {
  float sum = 0, squares = 0;
  if (res) {
    for (int64_t i = 0; i < n; i++) narrow(widen(x[i]) + widen(res[i]), total[i]);
    x = total;
  }
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; i++) { row[i] = widen(x[i]); sum += row[i]; }
  const float center = mean ? sum / n : 0.f;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < n; i++) { float d = row[i] - center; row[i] = d; squares += d * d; }
  const float scale = 1.f / std::sqrt(squares / n + eps);
  if (mean) *mean = center;
  *rstd = scale;
  if (b) for (int64_t i = 0; i < n; i++) narrow(row[i] * scale * widen(w[i]) + widen(b[i]), y[i]);
  else for (int64_t i = 0; i < n; i++) narrow(row[i] * scale * widen(w[i]), y[i]);
}

template <class X, class W>
static void norm_backward_row(const X *dy, const X *t, const W *w, const float *mean, float rstd, X *dt, float *dw, float *db, int64_t n,
                              float *norm, float *d) {
  const float center = mean ? *mean : 0.f;
  float along = 0, sum = 0;
#pragma omp simd reduction(+ : along, sum)
  for (int64_t i = 0; i < n; i++) {
    float g = widen(dy[i]);
    norm[i] = (widen(t[i]) - center) * rstd;
    d[i] = g * widen(w[i]);
    along += norm[i] * d[i];
    sum += d[i];
    dw[i] += g * norm[i];
  }
  if (db) for (int64_t i = 0; i < n; i++) db[i] += widen(dy[i]);
  along /= n;
  sum = mean ? sum / n : 0.f;
  for (int64_t i = 0; i < n; i++) narrow((d[i] - norm[i] * along - sum) * rstd, dt[i]);
}

// Types of activations and weights: alike, or weights in float32.
template <class F> static void with_types(int x, int w, F f) {
  with_type(x, [&](auto a) { if (w == 0) f(a, float{}); else f(a, a); });
}

extern "C" void norm_forward(const void *x, const void *res, const void *w, const void *b, void *y, void *total, float *mean, float *rstd,
                             int64_t rows, int64_t n, int64_t x_stride, int64_t res_stride, float eps, int x_type, int w_type, int threads) {
  with_types(x_type, w_type, [&](auto kx, auto kw) {
    using X = decltype(kx); using W = decltype(kw);
#pragma omp parallel num_threads(threads)
    {
      std::vector<float> row(n);
#pragma omp for schedule(static)
      for (int64_t r = 0; r < rows; r++)
        norm_row(static_cast<const X *>(x) + r * x_stride, res ? static_cast<const X *>(res) + r * res_stride : nullptr, static_cast<const W *>(w),
                 static_cast<const W *>(b), static_cast<X *>(y) + r * n, res ? static_cast<X *>(total) + r * n : nullptr,
                 mean ? mean + r : nullptr, rstd + r, n, eps, row.data());
    }
  });
}

extern "C" void norm_backward(const void *dy, const void *t, const void *w, const float *mean, const float *rstd, void *dt, float *dw, float *db,
                              int64_t rows, int64_t n, int64_t dy_stride, int64_t t_stride, int64_t parts, int x_type, int w_type, int threads) {
  with_types(x_type, w_type, [&](auto kx, auto kw) {
    using X = decltype(kx); using W = decltype(kw);
#pragma omp parallel num_threads(threads)
    {
      std::vector<float> norm(n), d(n);
#pragma omp for schedule(static)
      for (int64_t p = 0; p < parts; p++) {
        float *own = dw + p * n, *bias = db ? db + p * n : nullptr;
        std::fill(own, own + n, 0.f);
        if (bias) std::fill(bias, bias + n, 0.f);
        for (int64_t r = rows * p / parts; r < rows * (p + 1) / parts; r++)
          norm_backward_row(static_cast<const X *>(dy) + r * dy_stride, static_cast<const X *>(t) + r * t_stride, static_cast<const W *>(w),
                            mean ? mean + r : nullptr, rstd[r], static_cast<X *>(dt) + r * n, own, bias, n, norm.data(), d.data());
      }
    }
  });
}

// kind 0: x sigmoid(x). kind 1: the tanh form of GELU, which is x sigmoid(2u).
struct Gate { float value, slope; };

template <int KIND> static inline Gate gate_of(float x) {
  if (KIND == 0) {
    float s = sigmoid(x);
    return {x * s, s * (1.f + x * (1.f - s))};
  }
  const float root = 1.5957691216057308f, cubic = 0.044715f;  // 2 sqrt(2 / pi)
  float square = x * x, s = sigmoid(root * x * (1.f + cubic * square));
  return {x * s, s + x * s * (1.f - s) * root * (1.f + 3.f * cubic * square)};
}

template <class X, int KIND> static void glu_row(const X *g, const X *u, X *y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) narrow(gate_of<KIND>(widen(g[i])).value * widen(u[i]), y[i]);
}

template <class X, int KIND> static void glu_backward_row(const X *dy, const X *g, const X *u, X *dg, X *du, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; i++) {
    float d = widen(dy[i]);
    Gate gate = gate_of<KIND>(widen(g[i]));
    narrow(d * widen(u[i]) * gate.slope, dg[i]);
    narrow(d * gate.value, du[i]);
  }
}

extern "C" void glu_forward(const void *g, const void *u, void *y, int64_t rows, int64_t n, int64_t g_stride, int64_t u_stride, int kind, int type,
                            int threads) {
  with_type(type, [&](auto k) {
    using X = decltype(k);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
      const X *gate = static_cast<const X *>(g) + r * g_stride, *up = static_cast<const X *>(u) + r * u_stride;
      X *out = static_cast<X *>(y) + r * n;
      if (kind == 0) glu_row<X, 0>(gate, up, out, n); else glu_row<X, 1>(gate, up, out, n);
    }
  });
}

extern "C" void glu_backward(const void *dy, const void *g, const void *u, void *dg, void *du, int64_t rows, int64_t n, int64_t dy_stride,
                             int64_t g_stride, int64_t u_stride, int64_t out_stride, int kind, int type, int threads) {
  with_type(type, [&](auto k) {
    using X = decltype(k);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
      const X *d = static_cast<const X *>(dy) + r * dy_stride;
      const X *gate = static_cast<const X *>(g) + r * g_stride, *up = static_cast<const X *>(u) + r * u_stride;
      X *dgate = static_cast<X *>(dg) + r * out_stride, *dup = static_cast<X *>(du) + r * out_stride;
      if (kind == 0) glu_backward_row<X, 0>(d, gate, up, dgate, dup, n); else glu_backward_row<X, 1>(d, gate, up, dgate, dup, n);
    }
  });
}

// Halves of the last dimension are the pairs. strides: of batch, head, time, for input and output.
extern "C" void rope(const void *x, const float *cos, const float *sin, void *y, int64_t batch, int64_t heads, int64_t time, int64_t half,
                     const int64_t *xs, const int64_t *ys, int64_t angle_batch, int backward, int type, int threads) {
  const float sign = backward ? -1.f : 1.f;
  with_type(type, [&](auto k) {
    using X = decltype(k);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t bt = 0; bt < batch * time; bt++) {
      const int64_t b = bt / time, t = bt % time;
      const float *c = cos + b * angle_batch + t * half, *s = sin + b * angle_batch + t * half;
      for (int64_t h = 0; h < heads; h++) {
        const X *in = static_cast<const X *>(x) + b * xs[0] + h * xs[1] + t * xs[2];
        X *out = static_cast<X *>(y) + b * ys[0] + h * ys[1] + t * ys[2];
#pragma omp simd
        for (int64_t i = 0; i < half; i++) {
          float a = widen(in[i]), z = widen(in[half + i]), turn = sign * s[i];
          narrow(a * c[i] - z * turn, out[i]);
          narrow(z * c[i] + a * turn, out[half + i]);
        }
      }
    }
  });
}
