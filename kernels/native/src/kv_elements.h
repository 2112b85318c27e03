// The element types of KV caches: how they become operands of matrix products, and how elements of
// 8 bits are made.
#pragma once

#include <type_traits>

#include "commands.h"
#include "element.h"
#include "integer_operands.h"
#include "tile.h"

namespace baton {

typedef uint8_t Octets __attribute__((vector_size(kLanes)));
typedef int8_t SignedOctets __attribute__((vector_size(kLanes)));

// Floats of 1 sign, 4 exponent and 3 mantissa bits, finite up to 448 (arXiv:2209.05433).
struct Float8 {
  static constexpr float kLargest = 448.0f;

  // Widens kLanes adjacent elements.
  static Floats widen(const uint8_t* from) {
// With the sign two bits further up they are float16, 2^8 times too small.
#if defined(__AVX512F__)
    __m256i halves = _mm256_cvtepi8_epi16(load<__m128i>(from));
    halves = _mm256_and_si256(_mm256_slli_epi16(halves, 7), _mm256_set1_epi16(~0x4000));
    return (Floats)_mm512_cvtph_ps(halves) * broadcast(256.0f);
#elif defined(__AVX2__) && defined(__F16C__)
    __m128i halves = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    halves = _mm_and_si128(_mm_slli_epi16(halves, 7), _mm_set1_epi16(~0x4000));
    return (Floats)_mm256_cvtph_ps(halves) * broadcast(256.0f);
#else
    const Words words = __builtin_convertvector(load<Octets>(from), Words);
    const Words magnitude = (words & 0x7F) << 20;
    const Words normal = magnitude + (120u << 23);
    // Numbers below 2^-6 have the exponent 2^-6 without its leading 1.
    const Floats subnormal = (Floats)(magnitude + (121u << 23)) - broadcast(0.015625f);
    const Floats value = select((Masks)(magnitude < (1u << 23)), subnormal, (Floats)normal);
    return (Floats)((Words)value | (words & 0x80) << 24);
#endif
  }

  // The bits of numbers between -448 and 448, rounded to nearest, ties to even.
  static Octets narrow(Floats values) {
    const Words sign = (Words)values & 0x80000000u;
    const Words wide = (Words)values ^ sign;
    // 3 of 23 bits of the mantissa are kept, and the exponent's bias is 7 instead of 127: the
    // rounding addend carries into the last bit kept, and from there into the exponent.
    const Words normal = ((wide + (0x7FFFF + (wide >> 20 & 1))) >> 20) - (120u << 3);
    // Below 2^-6 numbers lie 2^-9 apart, as those of float32 from 2^14 on: adding rounds.
    const Floats shifter = broadcast(16384.0f);
    const Words subnormal = (Words)((Floats)wide + shifter) - (Words)shifter;
    const Masks is_small = (Floats)wide < broadcast(0.015625f);
    const Words bits = (Words)select(is_small, (Floats)subnormal, (Floats)normal);
    return __builtin_convertvector(bits | sign >> 24, Octets);
  }
};

struct Int8 {
  static constexpr float kLargest = 127.0f;

  static Floats widen(const uint8_t* from) {
    return __builtin_convertvector(integers(from), Floats);
  }

  // kLanes adjacent elements.
  static Masks integers(const uint8_t* from) {
// GCC would convert each element.
#if defined(__AVX512F__)
    return (Masks)_mm512_cvtepi8_epi32(load<__m128i>(from));
#elif defined(__AVX2__)
    return (Masks)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
    return __builtin_convertvector(load<SignedOctets>(from), Masks);
#endif
  }

  static Octets narrow(Floats values) {
    const Floats shifter = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    return __builtin_convertvector((Words)(values + shifter) - (Words)shifter, Octets);
  }
};

// Elements of the step's type E.
template <class E>
struct SameKv {
  using Element = typename E::Stored;
  using Product = E;
  static constexpr int kWordElements = E::kGroup;
  static constexpr bool kHasFactors = false;

  // kLanes words of kWordElements adjacent elements each.
  static Words words(const Element* from) { return load<Words>(from); }
  // Stores the groups of a word of each of kLanes tokens.
  static void store_groups(uint32_t* to, Words words) { store(to, words); }
  // See `E::interleave`.
  static void interleave(const Element* even, const Element* odd, typename E::Columns& first,
                         typename E::Columns& second) {
    E::interleave(even, odd, first, second);
  }
  // Words of kLanes columns of a group whose elements lie in rows of their own.
  static Words group_words(const Element* even, const Element* odd) {
    if constexpr (E::kGroup == 1) {
      return load<Words>(even);
    } else {
      return __builtin_convertvector(load<Halves>(even), Words) |
             __builtin_convertvector(load<Halves>(odd), Words) << 16;
    }
  }
};

// Elements of the type T, of 8 bits, all of which E has.
template <class E, class T>
struct NarrowKv {
  using Element = uint8_t;
  using Type = T;
  using Product = E;
  static constexpr int kWordElements = E::kGroup;
  static constexpr bool kHasFactors = true;

  static Words words(const Element* from) {
    if constexpr (E::kGroup == 1) {
      return (Words)T::widen(from);
    } else {
      return E::adjacent_words(T::widen(from), T::widen(from + kLanes));
    }
  }
  static void store_groups(uint32_t* to, Words words) { store(to, words); }
  static void interleave(const Element* even, const Element* odd, typename E::Columns& first,
                         typename E::Columns& second) {
    first = E::columns(T::widen(even), T::widen(odd));
    second = E::columns(T::widen(even + kLanes), T::widen(odd + kLanes));
  }
  static Words group_words(const Element* even, const Element* odd) {
    if constexpr (E::kGroup == 1) {
      return (Words)T::widen(even);
    } else {
      return E::words(T::widen(even), T::widen(odd));
    }
  }
};

// Elements of int8, multiplied as integers.
struct IntegerKv {
  using Element = uint8_t;
  using Type = Int8;
  using Product = Int16;
  static constexpr int kWordElements = 4;
  static constexpr bool kHasFactors = true;

  static Words words(const Element* from) { return load<Words>(from); }
  // The groups are elements 0 and 2, and 1 and 3: exact sums have no order.
  static void store_groups(uint32_t* to, Words words) {
    typedef int16_t Pairs __attribute__((vector_size(kLanes * 4)));
    store(to, (Pairs)words << 8 >> 8);
    store(to + kPanelColumns, (Pairs)words >> 8);
  }
  static void interleave(const Element* even, const Element* odd, Int16::Columns& first,
                         Int16::Columns& second) {
#if defined(__AVX512F__)
    const __m512i a = _mm512_cvtepi8_epi16(load<__m256i>(even));
    const __m512i b = _mm512_cvtepi8_epi16(load<__m256i>(odd));
    first.pairs = (Words)_mm512_permutex2var_epi16(a, load<__m512i>(kInTurn.places), b);
    second.pairs = (Words)_mm512_permutex2var_epi16(a, load<__m512i>(kInTurn.places + 32), b);
#elif defined(__AVX2__)
    const __m256i a = _mm256_cvtepi8_epi16(load<__m128i>(even));
    const __m256i b = _mm256_cvtepi8_epi16(load<__m128i>(odd));
    const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
    first.pairs = (Words)_mm256_permute2x128_si256(low, high, 0x20);
    second.pairs = (Words)_mm256_permute2x128_si256(low, high, 0x31);
#else
    first.pairs = group_words(even, odd);
    second.pairs = group_words(even + kLanes, odd + kLanes);
#endif
  }
  static Words group_words(const Element* even, const Element* odd) {
    return ((Words)Int8::integers(even) & 0xFFFF) | (Words)Int8::integers(odd) << 16;
  }
};

// Calls body(Kv{}) with the elements of a cache that steps of the type E use.
template <class E, class Body>
void with_cache_type(CacheType type, const Body& body) {
  switch (type) {
    case CacheType::kSame: return body(SameKv<E>{});
    case CacheType::kFloat8: return body(NarrowKv<E, Float8>{});
    case CacheType::kInt8: {
      // 16 bits are not enough for float32.
      using Kv = std::conditional_t<E::kGroup == 1, NarrowKv<E, Int8>, IntegerKv>;
      return body(Kv{});
    }
  }
}

}  // namespace baton
