// Cross entropy: a row of logits is read twice forward (the second time from the cache) and once backward.
#include "common.h"
#include "exponential.h"

struct Loss { float smoothing, z_loss, shift; int64_t ignore; };  // shift: smoothing over the number of classes

template <class X> static void loss_row(const X *x, int64_t label, int64_t n, const Loss &o, float *loss, float *lse) {
  float peak = -INFINITY;
#pragma omp simd reduction(max : peak)
  for (int64_t i = 0; i < n; i++) { float value = widen(x[i]); peak = value > peak ? value : peak; }
  double total = 0, plain = 0;
  for (int64_t from = 0; from < n; from += 4096) {  // pieces in float32, their sum in double
    const int64_t to = std::min(n, from + 4096);
    float part = 0, part_plain = 0;
#pragma omp simd reduction(+ : part, part_plain)
    for (int64_t i = from; i < to; i++) { float value = widen(x[i]); part += exponential(value - peak); part_plain += value; }
    total += part; plain += part_plain;
  }
  // A NaN anywhere makes total NaN; -Inf everywhere makes peak - peak NaN, as it should be.
  *lse = peak + float(std::log(total));
  const bool known = label >= 0 && label < n;
  float value = *lse - (1.f - o.smoothing) * (known ? widen(x[label]) : NAN) + o.z_loss * *lse * *lse;
  if (o.smoothing != 0.f) value -= o.smoothing * float(plain / n);
  *loss = label == o.ignore ? 0.f : value;
}

template <class X>
static void backward_row(const X *x, int64_t label, int64_t n, const Loss &o, float d, float lse, X *out) {
  if (label == o.ignore) {
    for (int64_t i = 0; i < n; i++) narrow(0.f, out[i]);
    return;
  }
  const float factor = d * (1.f + 2.f * o.z_loss * lse), shift = d * o.shift;
  const float chosen = label >= 0 && label < n ? widen(x[label]) : 0.f;  // read before out, which may be x, is written
#pragma omp simd
  for (int64_t i = 0; i < n; i++) narrow(factor * exponential(widen(x[i]) - lse) - shift, out[i]);
  if (label >= 0 && label < n) narrow(factor * exponential(chosen - lse) - shift - d * (1.f - o.smoothing), out[label]);
}

extern "C" void cross_entropy(const void *x, const int64_t *labels, float *losses, float *lse, int64_t rows, int64_t n, int64_t stride,
                              int64_t ignore, float smoothing, float z_loss, int type, int threads) {
  const Loss o{smoothing, z_loss, smoothing / n, ignore};
  with_type(type, [&](auto k) {
    using X = decltype(k);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) loss_row(static_cast<const X *>(x) + r * stride, labels[r], n, o, losses + r, lse + r);
  });
}

extern "C" void cross_entropy_backward(const float *d, const void *x, const int64_t *labels, const float *lse, void *out, int64_t rows, int64_t n,
                                       int64_t stride, int64_t out_stride, int64_t d_stride, int64_t ignore, float smoothing, float z_loss,
                                       float shift, int type, int threads) {
  const Loss o{smoothing, z_loss, shift, ignore};
  with_type(type, [&](auto k) {
    using X = decltype(k);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++)
      backward_row(static_cast<const X *>(x) + r * stride, labels[r], n, o, d[r * d_stride], lse[r], static_cast<X *>(out) + r * out_stride);
  });
}
