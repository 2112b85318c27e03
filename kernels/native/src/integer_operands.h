// Products of int16 and int8, with which attention reads KV of int8.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>

#include "simd.h"

namespace baton {

// Pairs of int16 as the operands of `multiply_tile`. Sums are exact int32, in registers of floats.
// The left side is rounded to 16 bits of a row's largest magnitude, finer than bfloat16 rounds all
// but its smallest elements.
struct Int16 {
  using Stored = int16_t;
  using Operand = uint32_t;
  struct Columns {
    Words pairs;
    Columns() = default;
    explicit Columns(const uint32_t* words) : pairs(load<Words>(words)) {}
  };
  static constexpr int kGroup = 2;
  static constexpr float kLargest = 32767.0f;

  static Floats multiply_add(Floats sum, const Columns& columns, Operand operand) {
#if defined(__AVX512VNNI__)
    return (Floats)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)columns.pairs,
                                       _mm512_set1_epi32(static_cast<int>(operand)));
#elif defined(__AVX512BW__)
    const __m512i pairs = _mm512_madd_epi16((__m512i)columns.pairs,
                                            _mm512_set1_epi32(static_cast<int>(operand)));
    return (Floats)_mm512_add_epi32((__m512i)sum, pairs);
#elif defined(__AVXVNNI__)
    return (Floats)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)columns.pairs,
                                           _mm256_set1_epi32(static_cast<int>(operand)));
#elif defined(__AVX2__)
    const __m256i pairs = _mm256_madd_epi16((__m256i)columns.pairs,
                                            _mm256_set1_epi32(static_cast<int>(operand)));
    return (Floats)_mm256_add_epi32((__m256i)sum, pairs);
#else
    const Masks pairs = (Masks)columns.pairs;
    const int32_t low = static_cast<int16_t>(operand), high = static_cast<int16_t>(operand >> 16);
    return (Floats)((Masks)sum + (pairs << 16 >> 16) * low + (pairs >> 16) * high);
#endif
  }

  // The largest operand whose sums of products with `count` elements of int8 are int32.
  static float largest_for(int64_t count) {
    constexpr int64_t kLargestSum = std::numeric_limits<int32_t>::max();
    return std::min(kLargest, static_cast<float>(kLargestSum / (128 * count)));
  }

  // The factor of a row whose largest magnitude has these bits and becomes `operand`: NaN if it is
  // not finite.
  static float factor_of(int32_t bits, float operand = kLargest) {
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    const bool is_finite = largest <= std::numeric_limits<float>::max();
    return is_finite ? std::max(largest / operand, std::numeric_limits<float>::min())
                     : std::numeric_limits<float>::quiet_NaN();
  }

  // Stores kLanes numbers between -kLargest and kLargest; `place` is the row's first operand.
  static void store_operands(Operand* place, int64_t element, Floats values) {
    const Floats shifter = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Halves halves = __builtin_convertvector((Words)(values + shifter), Halves);
    store(reinterpret_cast<Stored*>(place) + element, halves);
  }
};

// Bits of the larger magnitude of each lane. They are ordered as integers, infinity and NaN above
// all numbers.
inline Masks larger_magnitudes(Masks bits, Floats values) {
  const Masks others = (Masks)values & 0x7FFFFFFF;
  return others > bits ? others : bits;
}

inline int32_t largest_lane(Masks bits) {
  int32_t largest = 0;
  for (int lane = 0; lane < kLanes; ++lane) largest = std::max(largest, bits[lane]);
  return largest;
}

}  // namespace baton
