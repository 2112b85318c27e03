// Rows of activations as int8 values: blocks of 32 columns with a scale each.
#pragma once

#include <algorithm>
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

// The largest of the lanes, none of which is negative.
inline int32_t largest(Ints values) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)values);
#else
  int32_t lanes[kLanes];
  store(lanes, values);
  for (int count = kLanes / 2; count > 0; count /= 2) {
    for (int i = 0; i < count; ++i) lanes[i] = std::max(lanes[i], lanes[i + count]);
  }
  return lanes[0];
#endif
}

inline int32_t sum(Ints values) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)values);
#else
  int32_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += values[i];
  return total;
#endif
}

// Stores the low bytes of the lanes.
inline void store_bytes(int8_t* to, Ints values) {
#if defined(__AVX512F__)
  store(to, _mm512_cvtepi32_epi8((__m512i)values));
#elif defined(__AVX2__)
  const __m256i shorts = _mm256_packs_epi32((__m256i)values, (__m256i)values);
  const __m256i bytes = _mm256_packs_epi16(shorts, shorts);
  const __m256i order = _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4);
  const __m256i joined = _mm256_permutevar8x32_epi32(bytes, order);
  _mm_storel_epi64((__m128i*)to, _mm256_castsi256_si128(joined));
#else
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<int8_t>(values[i]);
#endif
}

// Rounds 32 values. The scale is the largest magnitude / 127, codes are rounded to the nearest,
// ties to even; magnitudes below 127 * 2^-126 count as zeros.
inline void quantize_block(const Floats (&values)[kSquareColumns / kLanes], CodeOffset offset,
                           RowBlock* out) {
  constexpr int kVectors = kSquareColumns / kLanes;
  Ints magnitudes{};  // as integers they have the order of the floats, and NaN is the largest
  for (const Floats& each : values) {
    const Ints magnitude = (Ints)each & INT32_MAX;
    magnitudes = (Ints)select(magnitude > magnitudes, (Floats)magnitude, (Floats)magnitudes);
  }
  const int32_t bits = largest(magnitudes);
  float magnitude;
  std::memcpy(&magnitude, &bits, sizeof magnitude);
  const float scale = magnitude / kMaxActivation;
  const bool is_finite = magnitude <= std::numeric_limits<float>::max();
  const bool is_zero = !is_finite || scale < std::numeric_limits<float>::min();
  const Floats inverse = broadcast(is_zero ? 0.0f : 1.0f / scale);
  const Floats shifter = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  int32_t sums[2] = {0, 0};
  for (int i = 0; i < kVectors; ++i) {
    const Floats shifted = multiply_add(is_zero ? Floats{} : values[i], inverse, shifter);
    const Ints codes = (Ints)shifted - (Ints)shifter;
    store_bytes(out->codes + i * kLanes, codes);
    sums[2 * i / kVectors] += sum(codes);
  }
  const int32_t total = sums[0] + sums[1];
  out->scale = is_finite ? (is_zero ? 0.0f : scale) : std::numeric_limits<float>::quiet_NaN();
  out->scaled_sum = out->scale * static_cast<float>(total);
  out->starts[0] = -offset.offset * (offset.by_halves ? sums[0] : total);
  out->starts[1] = -offset.offset * sums[1];
}

}  // namespace baton
