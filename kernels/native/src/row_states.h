// Attention of rows to some of their positions.
#pragma once

#include <algorithm>

#include "tile.h"

namespace baton {

// Sums of values by their weights, which are not divided by the sums of the weights yet; both are
// relative to 2^maximum of the scores so far.
struct RowStates {
  int64_t width = 0;
  float* outputs = nullptr;  // [rows][width]
  float* maxima = nullptr;   // [rows]
  float* sums = nullptr;     // [rows][kLanes]: partial sums of the weights

  static constexpr float kLowest = -1e30f;  // in place of -inf, whose differences may be NaN

  static int64_t num_bytes(int64_t num_rows, int64_t width) {
    return 4 * (num_rows * (width + 1 + kLanes)) + 64 * 3;
  }

  // Rows in memory that begins at a cache line.
  static RowStates at(void* memory, int64_t num_rows, int64_t width) {
    auto* outputs = static_cast<float*>(memory);
    float* sums = outputs + round_up(num_rows * width, 16);
    return {width, outputs, sums + round_up(num_rows * kLanes, 16), sums};
  }

  RowStates from(int64_t row) const {
    return {width, outputs + row * width, maxima + row, sums + row * kLanes};
  }

  // Nothing has been attended to.
  void clear(int64_t row) const {
    std::fill_n(outputs + row * width, width, 0.0f);
    std::fill_n(sums + row * kLanes, kLanes, 0.0f);
    maxima[row] = kLowest;
  }

  void copy(int64_t row, const RowStates& other) const {
    std::copy_n(other.outputs, width, outputs + row * width);
    std::copy_n(other.sums, kLanes, sums + row * kLanes);
    maxima[row] = *other.maxima;
  }

  // Adds what the first row of `other` has attended to. Not inlined: all callers must round alike.
  __attribute__((noinline)) void add(int64_t row, const RowStates& other) const {
    const Floats former = broadcast(maxima[row]), added = broadcast(*other.maxima);
    const Floats top = larger(former, added);
    const Floats kept = exp2_of_negative(former - top), share = exp2_of_negative(added - top);
    const auto combine = [&](float* to, const float* from) {
      store(to, load<Floats>(to) * kept + load<Floats>(from) * share);
    };
    for (int64_t i = 0; i < width; i += kLanes) {
      combine(outputs + row * width + i, other.outputs + i);
    }
    combine(sums + row * kLanes, other.sums);
    maxima[row] = top[0];
  }
};

}  // namespace baton
