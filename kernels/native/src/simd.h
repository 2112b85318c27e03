// Vectors of floats as wide as the instruction set the file is compiled for.
//
// GCC's and Clang's vector extensions provide arithmetic on every instruction set. What they
// lack (rounding to bfloat16, shuffles) is written out here once, beside the AVX-512 instruction
// if compilers do not find it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace baton {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef int32_t Masks __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

template <class V, class T>
inline V load(const T* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class V, class T>
inline void store(T* to, V value) {
  std::memcpy(to, &value, sizeof value);
}

// Loads the lanes at once. `Floats{} + value` would add and then shuffle: GCC keeps the sum, since
// it turns -0 into 0.
inline Floats broadcast(float value) {
#if defined(__AVX512F__)
  return (Floats)_mm512_set1_ps(value);
#elif defined(__AVX__)
  return (Floats)_mm256_set1_ps(value);
#else
  return Floats{value, value, value, value};
#endif
}

inline Floats select(Masks which, Floats yes, Floats no) {
  return (Floats)(((Masks)yes & which) | ((Masks)no & ~which));
}

// The larger of each lane; `b` if either is NaN.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return select(a > b, a, b);
#endif
}

// The sum of the lanes: halves are added to each other until one is left.
inline float sum(Floats values) {
  float lanes[kLanes];
  store(lanes, values);
  for (int count = kLanes / 2; count > 0; count /= 2) {
    for (int lane = 0; lane < count; ++lane) lanes[lane] += lanes[lane + count];
  }
  return lanes[0];
}

inline float maximum(Floats values) {
  float best = values[0];
  for (int lane = 1; lane < kLanes; ++lane) best = values[lane] > best ? values[lane] : best;
  return best;
}

// bfloat16 is the upper half of a float.
inline Floats widen(Halves halves) {
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

// Rounds to the nearest bfloat16, ties to even; NaN stays NaN.
inline Words round_to_bf16_bits(Floats values) {
  const Words bits = (Words)values;
  const Words rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16;
  const Words is_nan = (Words)(values != values);
  return (rounded & ~is_nan) | (((bits >> 16) | 0x40) & is_nan);
}

inline Halves narrow(Floats values) {
#if defined(__AVX512BF16__)
  return (Halves)_mm512_cvtneps_pbh((__m512)values);
#else
  return __builtin_convertvector(round_to_bf16_bits(values), Halves);
#endif
}

inline float widen(uint16_t half) {
  const uint32_t bits = uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + ((bits >> 16 & 1) + 0x7FFF)) >> 16);
}

// float16 as float32; NaN stays NaN.
inline Floats widen_half(Halves halves) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps((__m128i)halves);
#else
  const Words bits = __builtin_convertvector(halves, Words);
  const Words magnitude = (bits & 0x7FFF) << 13;
  // The exponent's bias is 112 less, also that of denormal numbers.
  const Floats value = (Floats)magnitude * broadcast(5.192296858534828e33f);
  const Words is_special = (Words)(magnitude >= 0x0F800000);  // infinite or NaN
  return (Floats)((((Words)value & ~is_special) | ((magnitude | 0x7F800000) & is_special)) |
                  (bits & 0x8000) << 16);
#endif
}

// 2^x for x <= 0, to about 2e-7 of its value; 0 or nearly so below -126, NaN for NaN.
inline Floats exp2_of_negative(Floats x) {
#if defined(__AVX512F__)
  x = larger(broadcast(-200.0f), x);
  const Floats whole = (Floats)_mm512_roundscale_ps((__m512)x, 0);
  const Floats f = x - whole;  // in [-0.5, 0.5]
#else
  const Floats shifter = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Masks is_zero = x < broadcast(-126.0f);
  const Masks is_nan = x != x;
  const Floats given = x;
  x = larger(x, broadcast(-126.0f));
  const Floats shifted = x + shifter;
  const Floats f = x - (shifted - shifter);  // in [-0.5, 0.5]
#endif
  // Taylor coefficients of 2^f, (ln 2)^n / n!
  Floats p = broadcast(1.5403530e-4f);
  p = p * f + broadcast(1.3333558e-3f);
  p = p * f + broadcast(9.6181291e-3f);
  p = p * f + broadcast(5.5504109e-2f);
  p = p * f + broadcast(2.4022651e-1f);
  p = p * f + broadcast(6.9314718e-1f);
  p = p * f + broadcast(1.0f);
#if defined(__AVX512F__)
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)whole);
#else
  const Words exponent = ((Words)shifted - (Words)shifter) << 23;
  return select(is_zero, Floats{}, select(is_nan, given, (Floats)((Words)p + exponent)));
#endif
}

// To about 3e-7 of its value.
inline Floats hyperbolic_tangent(Floats x) {
  const Masks is_negative = x < Floats{};
  const Floats magnitude = select(is_negative, -x, x), square = x * x, one = broadcast(1.0f);
  // Taylor coefficients; the exponential form would lose digits near 0.
  Floats series = broadcast(62.0f / 2835.0f);
  series = series * square - broadcast(17.0f / 315.0f);
  series = series * square + broadcast(2.0f / 15.0f);
  series = series * square - broadcast(1.0f / 3.0f);
  const Floats power = exp2_of_negative(magnitude * broadcast(-2.88539008f));  // exp(-2 |x|)
  const Floats large = one - broadcast(2.0f) * power / (one + power);
  return select(magnitude < broadcast(0.3f), x + x * square * series,
                select(is_negative, -large, large));
}

// Scores or logits within (-cap, cap), almost unchanged near 0 (Gemma 2, arXiv:2408.00118).
inline Floats capped(Floats values, float cap) {
  return broadcast(cap) * hyperbolic_tangent(values * broadcast(1.0f / cap));
}

// Lane j of the results: with `step` bits of j clear / set, from a / b; see `transpose`.
template <int step>
inline void exchange(Words& a, Words& b) {
  Words low, high;
#if defined(__clang__)
  for (int lane = 0; lane < kLanes; ++lane) {
    low[lane] = lane & step ? b[lane - step] : a[lane];
    high[lane] = lane & step ? b[lane] : a[lane + step];
  }
#else
  Words from_low, from_high;
  for (int lane = 0; lane < kLanes; ++lane) {
    from_low[lane] = lane & step ? kLanes + lane - step : lane;
    from_high[lane] = lane & step ? kLanes + lane : lane + step;
  }
  low = __builtin_shuffle(a, b, from_low);
  high = __builtin_shuffle(a, b, from_high);
#endif
  a = low;
  b = high;
}

template <int step>
inline void transpose_from(Words (&rows)[kLanes]) {
#pragma GCC unroll 16
  for (int row = 0; row < kLanes; ++row) {
    if (!(row & step)) exchange<step>(rows[row], rows[row + step]);
  }
  if constexpr (step * 2 < kLanes) transpose_from<step * 2>(rows);
}

// Transposes a square of words in log2(kLanes) rounds of exchanged halves (Eklundh 1972).
inline void transpose(Words (&rows)[kLanes]) { transpose_from<1>(rows); }

// The largest lane of each of `count` vectors, lane by lane; 0 past them.
inline Floats maxima_of(const Floats* vectors, int count) {
  Words square[kLanes] = {};
  for (int i = 0; i < count; ++i) square[i] = (Words)vectors[i];
  transpose(square);
  Floats best = (Floats)square[0];
  for (int i = 1; i < kLanes; ++i) best = larger(best, (Floats)square[i]);
  return best;
}

}  // namespace baton
