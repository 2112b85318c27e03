// Rows of activations as int8 values: blocks of 32 columns with a scale each.
#pragma once

#include <cmath>
#include <limits>

#include "element.h"
#include "formats.h"
#include "int_dot.h"

namespace baton {

// 32 columns of a row: column i is about codes[i] * scale.
struct RowBlock {
  int8_t codes[kSquareColumns];
  float scale;        // NaN if a column is infinite or NaN
  float scaled_sum;   // scale * sum of codes
  int32_t starts[2];  // -offset * sum of codes, over all columns or over each half of them
};

// What the codes of a weight's format are read with; see codes.h.
struct CodeOffset {
  int32_t offset;
  bool by_halves;
};

// Rounds 32 values. The scale is the largest magnitude / 127, codes are rounded to the nearest,
// ties to even; magnitudes below 127 * 2^-126 count as zeros.
inline void quantize_block(const Floats (&values)[kSquareColumns / kLanes], CodeOffset offset,
                           RowBlock* out) {
  Ints largest{};  // magnitudes as integers have the order of the floats, and NaN is the largest
  for (const Floats& each : values) {
    const Ints magnitude = (Ints)each & INT32_MAX;
    largest = (Ints)select(magnitude > largest, (Floats)magnitude, (Floats)largest);
  }
  int32_t bits = 0;
  for (int lane = 0; lane < kLanes; ++lane) bits = largest[lane] > bits ? largest[lane] : bits;
  float magnitude;
  std::memcpy(&magnitude, &bits, sizeof magnitude);
  const float scale = magnitude / kMaxActivation;
  const bool is_finite = magnitude <= std::numeric_limits<float>::max();
  const bool is_zero = !is_finite || scale < std::numeric_limits<float>::min();
  const Floats inverse = broadcast(is_zero ? 0.0f : 1.0f / scale);
  const Floats shifter = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  int32_t sums[2] = {0, 0};
  for (int i = 0; i < kSquareColumns / kLanes; ++i) {
    const Floats shifted = (is_zero ? Floats{} : values[i]) * inverse + shifter;
    const Ints codes = (Ints)shifted - (Ints)shifter;
    for (int lane = 0; lane < kLanes; ++lane) {
      const int column = i * kLanes + lane;
      out->codes[column] = static_cast<int8_t>(codes[lane]);
      sums[2 * column / kSquareColumns] += codes[lane];
    }
  }
  const int32_t sum = sums[0] + sums[1];
  out->scale = is_finite ? (is_zero ? 0.0f : scale) : std::numeric_limits<float>::quiet_NaN();
  out->scaled_sum = out->scale * static_cast<float>(sum);
  out->starts[0] = -offset.offset * (offset.by_halves ? sums[0] : sum);
  out->starts[1] = -offset.offset * sums[1];
}

}  // namespace baton
