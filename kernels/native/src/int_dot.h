// Dot products of int8 values, four per lane, in the instructions that the CPU has.
//
// A word of codes holds four adjacent columns of one output, a word of activations the same
// columns of one row; lanes are outputs. Sums are exact, so every instruction set and every order
// of words gives the same integers.
#pragma once

#include "simd.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace baton {

typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef int16_t Shorts __attribute__((vector_size(kLanes * 4)));

constexpr int kMaxActivation = 127;  // activations lie in [-127, 127]
constexpr int kSigned = -1;          // in place of a largest code: codes lie in [-128, 127]

// a * b + c, rounded once where the instruction set can. Kernels that must agree in every bit call
// it, since compilers fuse expressions as they see fit.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)

// The instruction takes unsigned codes: signed ones are read with this offset.
constexpr int kSignedOffset = 128;

// The sum of products of `num_words` words and a first value. `max_code` is the largest code.
template <int max_code, int num_words>
class DotProduct {
 public:
  void start(int32_t value) { sum_ = Ints{} + value; }

  // Adds word `index` of those since `start`.
  void add(int, Words codes, Words row) {
#if defined(__AVX512VNNI__)
    sum_ = (Ints)_mm512_dpbusd_epi32((__m512i)sum_, (__m512i)codes, (__m512i)row);
#else
    sum_ = (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum_, (__m256i)codes, (__m256i)row);
#endif
  }

  Ints total() const { return sum_; }

 private:
  Ints sum_;
};

#elif defined(__AVX2__)

constexpr int kSignedOffset = 0;

// Keeps the compiler from regrouping sums: all products of a square are more than the registers.
template <class V>
inline void keep_in_order(V& sum) {
  asm("" : "+v"(sum));
}

#if defined(__AVX512F__)
inline Shorts multiply_bytes(Words unsigned_bytes, Words bytes) {
  return (Shorts)_mm512_maddubs_epi16((__m512i)unsigned_bytes, (__m512i)bytes);
}
inline Ints add_pairs(Shorts values) {
  return (Ints)_mm512_madd_epi16((__m512i)values, _mm512_set1_epi16(1));
}
inline Words absolute_bytes(Words bytes) { return (Words)_mm512_abs_epi8((__m512i)bytes); }
inline Words negate_where_negative(Words bytes, Words signs) {
  const __mmask64 is_negative = _mm512_movepi8_mask((__m512i)signs);
  return (Words)_mm512_mask_sub_epi8((__m512i)bytes, is_negative, _mm512_setzero_si512(),
                                     (__m512i)bytes);
}
#else
inline Shorts multiply_bytes(Words unsigned_bytes, Words bytes) {
  return (Shorts)_mm256_maddubs_epi16((__m256i)unsigned_bytes, (__m256i)bytes);
}
inline Ints add_pairs(Shorts values) {
  return (Ints)_mm256_madd_epi16((__m256i)values, _mm256_set1_epi16(1));
}
inline Words absolute_bytes(Words bytes) { return (Words)_mm256_abs_epi8((__m256i)bytes); }
inline Words negate_where_negative(Words bytes, Words signs) {
  return (Words)_mm256_sign_epi8((__m256i)bytes, (__m256i)signs);
}
#endif

// The sum of products of `num_words` words and a first value. `max_code` is the largest code.
//
// Products are added in int16 for as many words as cannot overflow, and then widened: for codes of
// four bits once per 8 words.
template <int max_code, int num_words>
class DotProduct {
 public:
  static constexpr int kWordSum = 2 * max_code * kMaxActivation;  // of two products, an int16
  static constexpr int kMaxRunWords = 8 * kWordSum <= INT16_MAX   ? 8
                                      : 4 * kWordSum <= INT16_MAX ? 4
                                                                  : 2;
  static constexpr int kRunWords = num_words < kMaxRunWords ? num_words : kMaxRunWords;
  static_assert(max_code > 0 && kRunWords * kWordSum <= INT16_MAX);

  void start(int32_t value) { first_ = value; }

  // Adds word `index` of those since `start`.
  void add(int index, Words codes, Words row) {
    const Shorts products = multiply_bytes(codes, row);
    run_ = index % kRunWords ? run_ + products : products;
    keep_in_order(run_);
    if (index % kRunWords != kRunWords - 1) return;
    sum_ = index < kRunWords ? add_pairs(run_) : sum_ + add_pairs(run_);
    keep_in_order(sum_);
  }

  Ints total() const { return sum_ + first_; }

 private:
  int32_t first_;
  Shorts run_;
  Ints sum_;
};

template <int num_words>
class DotProduct<kSigned, num_words> {
 public:
  void start(int32_t value) { sum_ = Ints{} + value; }

  // The signs of codes go to the activations. 2 * 128 * 127 does not overflow an int16.
  void add(int, Words codes, Words row) {
    sum_ += add_pairs(multiply_bytes(absolute_bytes(codes), negate_where_negative(row, codes)));
    keep_in_order(sum_);
  }

  Ints total() const { return sum_; }

 private:
  Ints sum_;
};

#else

constexpr int kSignedOffset = 0;

// The sum of products of words and a first value. Codes lie in [-128, 127], whatever `max_code` is.
template <int max_code, int num_words>
class DotProduct {
 public:
  void start(int32_t value) { sum_ = Ints{} + value; }

  // Adds a word: even bytes and odd bytes, whose two products together fit an int16.
  void add(int, Words codes, Words row) {
    const Shorts products = even(codes) * even(row) + ((Shorts)codes >> 8) * ((Shorts)row >> 8);
    sum_ += ((Ints)products >> 16) + ((Ints)((Words)products << 16) >> 16);
  }

  Ints total() const { return sum_; }

 private:
  static Shorts even(Words bytes) { return (Shorts)((Shorts)bytes << 8) >> 8; }

  Ints sum_;
};

#endif

}  // namespace baton
