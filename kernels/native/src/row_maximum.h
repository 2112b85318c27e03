// The largest value of a row.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"

namespace baton {

// Finds the largest value, NaN if one is NaN, and its first index; -1 if that value is not finite.
inline void find_maximum(const float* values, int64_t size, float* maximum_found, int64_t* index) {
  Floats best = broadcast(-std::numeric_limits<float>::infinity());
  Masks has_nan{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Floats lanes = load<Floats>(values + i);
    best = larger(lanes, best);
    has_nan |= lanes != lanes;
  }
  float found = maximum(best);
  bool is_nan = false;
  for (int lane = 0; lane < kLanes; ++lane) is_nan |= has_nan[lane] != 0;
  for (; i < size; ++i) {
    found = values[i] > found ? values[i] : found;
    is_nan |= values[i] != values[i];
  }
  if (is_nan) found = std::numeric_limits<float>::quiet_NaN();
  *maximum_found = found;
  const bool is_finite = std::abs(found) <= std::numeric_limits<float>::max();
  *index = is_finite ? std::find(values, values + size, found) - values : -1;
}

}  // namespace baton
