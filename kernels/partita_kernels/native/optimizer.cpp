// Optimizer updates in one pass: low-precision gradients read, low-precision copies written.
#include "common.h"

static const int64_t BLOCK = 32768;

template <class C> static inline void put(C *copy, int64_t i, float x) { narrow(x, copy[i]); }
static inline void put(none *, int64_t, float) {}

// one1, one2: 1 - beta, from doubles: in float32 1 - 0.999 is off by 2e-5 of itself.
struct Adam { float keep, one1, beta2, one2, eps, decay, step_size, root_correction, scale; bool decoupled; };

template <class G, class C, bool DECOUPLED>
static void adam_block(float *__restrict p, const G *__restrict g, float *__restrict m, float *__restrict v, C *__restrict copy,
                       int64_t begin, int64_t end, const Adam &a) {
  const float keep = a.keep, one1 = a.one1, beta2 = a.beta2, one2 = a.one2, eps = a.eps, decay = a.decay;
  const float step = a.step_size, root = a.root_correction, scale = a.scale;
#pragma omp simd
  for (int64_t i = begin; i < end; i++) {
    float grad = widen(g[i]) * scale, weight = p[i];
    if (DECOUPLED) weight *= keep; else grad += decay * weight;
    float first = m[i] + one1 * (grad - m[i]);
    float second = beta2 * v[i] + one2 * grad * grad;
    weight -= step * first / (std::sqrt(second) / root + eps);
    m[i] = first; v[i] = second; p[i] = weight;
    put(copy, i, weight);
  }
}

template <class G, class C>
static void adam_all(int64_t count, const int64_t *sizes, float **p, const void **g, float **m, float **v, void **copies, const Adam &a, int threads) {
  const std::vector<Block> blocks = cut(count, sizes, BLOCK);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (size_t b = 0; b < blocks.size(); b++) {
    const int64_t t = blocks[b].tensor, begin = blocks[b].begin, end = blocks[b].end;
    const G *grad = static_cast<const G *>(g[t]);
    C *copy = static_cast<C *>(copies[t]);
    if (a.decoupled) adam_block<G, C, true>(p[t], grad, m[t], v[t], copy, begin, end, a);
    else adam_block<G, C, false>(p[t], grad, m[t], v[t], copy, begin, end, a);
  }
}

struct Sgd { float lr, momentum, decay, scale; int nesterov; };

template <class G, class C, bool MOMENTUM>
static void sgd_block(float *__restrict p, const G *__restrict g, float *__restrict m, C *__restrict copy, int64_t begin, int64_t end, const Sgd &s) {
  const float lr = s.lr, momentum = s.momentum, decay = s.decay, scale = s.scale;
  const bool nesterov = s.nesterov;
#pragma omp simd
  for (int64_t i = begin; i < end; i++) {
    float weight = p[i], grad = widen(g[i]) * scale + decay * weight;
    if (MOMENTUM) {
      float moved = momentum * m[i] + grad;
      m[i] = moved;
      grad = nesterov ? grad + momentum * moved : moved;
    }
    weight -= lr * grad;
    p[i] = weight;
    put(copy, i, weight);
  }
}

template <class G, class C>
static void sgd_all(int64_t count, const int64_t *sizes, float **p, const void **g, float **m, void **copies, const Sgd &s, int threads) {
  const std::vector<Block> blocks = cut(count, sizes, BLOCK);
#pragma omp parallel for schedule(static) num_threads(threads)
  for (size_t b = 0; b < blocks.size(); b++) {
    const int64_t t = blocks[b].tensor, begin = blocks[b].begin, end = blocks[b].end;
    const G *grad = static_cast<const G *>(g[t]);
    C *copy = static_cast<C *>(copies[t]);
    if (m) sgd_block<G, C, true>(p[t], grad, m[t], copy, begin, end, s);
    else sgd_block<G, C, false>(p[t], grad, nullptr, copy, begin, end, s);
  }
}

template <class F> static void with_copy_type(int dtype, F f) {
  if (dtype == 3) f(none{}); else with_type(dtype, f);
}

extern "C" void adamw(int64_t count, const int64_t *sizes, float **p, const void **g, int g_type, float **m, float **v, void **copies,
                      int c_type, double lr, double beta1, double beta2, double eps, double decay, double step_size,
                      double root_correction, double scale, int decoupled, int threads) {
  const Adam a{float(1 - lr * decay), float(1 - beta1), float(beta2), float(1 - beta2), float(eps), float(decay),
               float(step_size), float(root_correction), float(scale), decoupled != 0};
  with_type(g_type, [&](auto grad) {
    with_copy_type(c_type, [&](auto copy) { adam_all<decltype(grad), decltype(copy)>(count, sizes, p, g, m, v, copies, a, threads); });
  });
}

extern "C" void sgd(int64_t count, const int64_t *sizes, float **p, const void **g, int g_type, float **m, void **copies, int c_type,
                    double lr, double momentum, double decay, double scale, int nesterov, int threads) {
  const Sgd s{float(lr), float(momentum), float(decay), float(scale), nesterov};
  with_type(g_type, [&](auto grad) {
    with_copy_type(c_type, [&](auto copy) { sgd_all<decltype(grad), decltype(copy)>(count, sizes, p, g, m, copies, s, threads); });
  });
}
