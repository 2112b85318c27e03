// Rows of activations as int8 values: blocks of 32 columns with a scale, or one for each half.
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
  float scales[2];    // of all columns, or of each half of them; NaN if one is infinite or NaN
  float scaled_sum;   // sum of codes * scale
  int32_t starts[2];  // -offset * sum of codes, over all columns or over each half of them
};

// What the codes of a weight's format are read with; see codes.h.
struct CodeOffset {
  int32_t offset;
  bool by_halves;  // halves of a block have scales of their own
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

// Values as codes: their scale, and the sum of the codes.
struct RoundedRun {
  float scale;
  int32_t sum;
};

// Rounds some values. The scale is the largest magnitude / 127, codes are rounded to the nearest,
// ties to even; magnitudes below 127 * 2^-126 count as zeros.
template <int vectors>
inline RoundedRun round_run(const Floats* values, int8_t* codes) {
  Ints magnitudes{};  // as integers they have the order of the floats, and NaN is the largest
  for (int i = 0; i < vectors; ++i) {
    const Ints magnitude = (Ints)values[i] & INT32_MAX;
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
  Ints sums{};
  for (int i = 0; i < vectors; ++i) {
    const Floats shifted = multiply_add(is_zero ? Floats{} : values[i], inverse, shifter);
    const Ints rounded = (Ints)shifted - (Ints)shifter;
    store_bytes(codes + i * kLanes, rounded);
    sums += rounded;
  }
  const float nan = std::numeric_limits<float>::quiet_NaN();
  return {is_finite ? (is_zero ? 0.0f : scale) : nan, sum(sums)};
}

inline void quantize_block(const Floats (&values)[kSquareColumns / kLanes], CodeOffset offset,
                           RowBlock* out) {
  constexpr int kHalf = kSquareColumns / 2, kVectors = kHalf / kLanes;
  out->scaled_sum = 0.0f;
  const auto place = [&](int part, const RoundedRun& run) {
    out->scales[part] = run.scale;
    out->scaled_sum += run.scale * static_cast<float>(run.sum);
    out->starts[part] = -offset.offset * run.sum;
  };
  if (offset.by_halves) {
    place(0, round_run<kVectors>(values, out->codes));
    place(1, round_run<kVectors>(values + kVectors, out->codes + kHalf));
  } else {
    place(0, round_run<2 * kVectors>(values, out->codes));
  }
}

}  // namespace baton
