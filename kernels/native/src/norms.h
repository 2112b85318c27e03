// Root-mean-square norms of rows.
#pragma once

#include <cmath>

#include "commands.h"
#include "element.h"

namespace baton {

// A normalized value times the norm's factor.
template <class E, NormKind kind>
Floats times_weight(Floats normed, Floats weight) {
  if constexpr (kind == NormKind::kWide) return normed * weight;
  if constexpr (kind == NormKind::kOffset) return normed * (broadcast(1.0f) + weight);
  return rounded<E>(normed) * weight;
}

template <class E, NormKind kind>
float times_weight(float normed, float weight) {
  if constexpr (kind == NormKind::kWide) return normed * weight;
  if constexpr (kind == NormKind::kOffset) return normed * (1.0f + weight);
  return E::widen_one(E::narrow_one(normed)) * weight;
}

// The factor that makes the mean of a row's squares 1.
template <class E>
float norm_factor(const typename E::Stored* input, int64_t size, double eps) {
  Floats squares{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Floats values = E::widen_lanes(input + i);
    squares += values * values;
  }
  float total = sum(squares);
  for (; i < size; ++i) total += E::widen_one(input[i]) * E::widen_one(input[i]);
  return 1.0f / std::sqrt(total / static_cast<float>(size) + static_cast<float>(eps));
}

// `out` may be `input`.
template <class E, NormKind kind>
void normalize(const typename E::Stored* input, const typename E::Stored* weight, int64_t size,
               double eps, typename E::Stored* out) {
  const float factor = norm_factor<E>(input, size, eps);
  int64_t i;
  for (i = 0; i + kLanes <= size; i += kLanes) {
    const Floats normed = E::widen_lanes(input + i) * broadcast(factor);
    E::narrow_lanes(out + i, times_weight<E, kind>(normed, E::widen_lanes(weight + i)));
  }
  for (; i < size; ++i) {
    const float normed = E::widen_one(input[i]) * factor;
    out[i] = E::narrow_one(times_weight<E, kind>(normed, E::widen_one(weight[i])));
  }
}

// Multiplies a row by a norm's factor, in place.
template <class E>
void scale_row(typename E::Stored* row, int64_t size, float factor) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    E::narrow_lanes(row + i, E::widen_lanes(row + i) * broadcast(factor));
  }
  for (; i < size; ++i) row[i] = E::narrow_one(E::widen_one(row[i]) * factor);
}

template <class E>
void normalize_as(NormKind kind, const typename E::Stored* input,
                  const typename E::Stored* weight, int64_t size, double eps,
                  typename E::Stored* out) {
  switch (kind) {
    case NormKind::kRounded:
      return normalize<E, NormKind::kRounded>(input, weight, size, eps, out);
    case NormKind::kWide: return normalize<E, NormKind::kWide>(input, weight, size, eps, out);
    case NormKind::kOffset: return normalize<E, NormKind::kOffset>(input, weight, size, eps, out);
  }
}

}  // namespace baton
