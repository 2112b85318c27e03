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
    return widen_words(__builtin_convertvector(load<Octets>(from), Words));
#endif
  }

  // The four elements of each lane as words of two bfloat16: elements 0 and 2, and 1 and 3.
  static void split(Words words, Words& even, Words& odd) {
#if defined(__AVX2__)
    const BytesOfBfloat16 bytes = as_bfloat16(words);
    even = (bytes.low & 0x00FF00FFu) | (bytes.high & 0x00FF00FFu) << 8;
    odd = (bytes.low >> 8 & 0x00FF00FFu) | (bytes.high & 0xFF00FF00u);
#else
    Words values[4];
    for (int i = 0; i < 4; ++i) values[i] = (Words)widen_words(words >> 8 * i & 0xFF);
    even = values[0] >> 16 | values[2];
    odd = values[1] >> 16 | values[3];
#endif
  }

#if defined(__AVX2__)
  // The high and the low bytes of the bfloat16 numbers of each byte.
  struct BytesOfBfloat16 {
    Words high, low;
  };

  // The biases of both exponents differ by 120, so their last bits are equal. With the mantissa
  // this bit is the low nibble of an element, and the high nibble of the low byte. Numbers below
  // 2^-5 are looked up by their low nibble, since those below 2^-6 have no leading 1.
  static BytesOfBfloat16 as_bfloat16(Words words) {
    const Words nibbles = words & 0x0F0F0F0Fu;
    const Words exponents = (words >> 4 & 0x07070707u) + 0x3C3C3C3Cu, signs = words & 0x80808080u;
#if defined(__AVX512BW__)
    const __mmask64 is_small = _mm512_testn_epi8_mask((__m512i)words, _mm512_set1_epi8(0x70));
    const auto look_up = [&](const uint8_t* table, Words otherwise) {
      const __m512i numbers = _mm512_broadcast_i32x4(load<__m128i>(table));
      return (Words)_mm512_mask_shuffle_epi8((__m512i)otherwise, is_small, numbers,
                                             (__m512i)nibbles);
    };
#else
    const __m256i is_small = _mm256_cmpeq_epi8((__m256i)exponents, _mm256_set1_epi8(0x3C));
    const auto look_up = [&](const uint8_t* table, Words otherwise) {
      const __m256i numbers = _mm256_broadcastsi128_si256(load<__m128i>(table));
      const __m256i small = _mm256_shuffle_epi8(numbers, (__m256i)nibbles);
      return (Words)_mm256_blendv_epi8((__m256i)otherwise, small, is_small);
    };
#endif
    return {look_up(kSmallHigh, exponents) | signs, look_up(kSmallLow, nibbles << 4)};
  }
#endif

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

 private:
#if defined(__AVX2__)
  alignas(16) static constexpr uint8_t kSmallHigh[16] = {0x00, 0x3B, 0x3B, 0x3B, 0x3C, 0x3C,
                                                         0x3C, 0x3C, 0x3C, 0x3C, 0x3C, 0x3C,
                                                         0x3C, 0x3C, 0x3C, 0x3C};
  alignas(16) static constexpr uint8_t kSmallLow[16] = {0x00, 0x00, 0x80, 0xC0, 0x00, 0x20,
                                                        0x40, 0x60, 0x80, 0x90, 0xA0, 0xB0,
                                                        0xC0, 0xD0, 0xE0, 0xF0};
#else
  static Floats widen_words(Words words) {
    const Words magnitude = (words & 0x7F) << 20;
    const Words normal = magnitude + (120u << 23);
    // Numbers below 2^-6 have the exponent 2^-6 without its leading 1.
    const Floats subnormal = (Floats)(magnitude + (121u << 23)) - broadcast(0.015625f);
    const Floats value = select((Masks)(magnitude < (1u << 23)), subnormal, (Floats)normal);
    return (Floats)((Words)value | (words & 0x80) << 24);
  }
#endif
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

// Elements of the type T, of 8 bits, in steps of float32.
template <class T>
struct NarrowKv {
  using Element = uint8_t;
  using Type = T;
  using Product = Float32;
  static constexpr int kWordElements = 1;
  static constexpr bool kHasFactors = true;

  static Words words(const Element* from) { return (Words)T::widen(from); }
  static void store_groups(uint32_t* to, Words words) { store(to, words); }
  static void interleave(const Element* row, const Element*, Float32::Columns& first,
                         Float32::Columns& second) {
    first.values = T::widen(row);
    second.values = T::widen(row + kLanes);
  }
  static Words group_words(const Element* row, const Element*) { return (Words)T::widen(row); }
};

// Floats of 8 bits in steps of bfloat16, which has all of them.
struct Float8Kv {
  using Element = uint8_t;
  using Type = Float8;
  using Product = Bfloat16;
  static constexpr int kWordElements = 4;
  static constexpr bool kHasFactors = true;

  static Words words(const Element* from) { return load<Words>(from); }
  // The groups are elements 0 and 2, and 1 and 3.
  static void store_groups(uint32_t* to, Words words) {
    Words even, odd;
    Float8::split(words, even, odd);
    store(to, even);
    store(to + kPanelColumns, odd);
  }
  static void interleave(const Element* even, const Element* odd, Bfloat16::Columns& first,
                         Bfloat16::Columns& second) {
#if defined(__AVX512BF16__)
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(load<__m256i>(even)),
                                            load<__m256i>(odd), 1);
    const Float8::BytesOfBfloat16 bytes = Float8::as_bfloat16((Words)both);
    const __m512i a = _mm512_unpacklo_epi8((__m512i)bytes.low, (__m512i)bytes.high);
    const __m512i b = _mm512_unpackhi_epi8((__m512i)bytes.low, (__m512i)bytes.high);
    first.values = (__m512bh)_mm512_permutex2var_epi16(a, load<__m512i>(kRowsInTurn.places), b);
    second.values =
        (__m512bh)_mm512_permutex2var_epi16(a, load<__m512i>(kRowsInTurn.places + 32), b);
#else
    first = {Float8::widen(even), Float8::widen(odd)};
    second = {Float8::widen(even + kLanes), Float8::widen(odd + kLanes)};
#endif
  }
  static Words group_words(const Element* even, const Element* odd) {
    return Bfloat16::words(Float8::widen(even), Float8::widen(odd));
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
    store(to, even_group(words).pairs);
    store(to + kPanelColumns, odd_group(words).pairs);
  }
  static Int16::Columns even_group(Words words) { return columns((Pairs)words << 8 >> 8); }
  static Int16::Columns odd_group(Words words) { return columns((Pairs)words >> 8); }
  static void interleave(const Element* even, const Element* odd, Int16::Columns& first,
                         Int16::Columns& second) {
#if defined(__AVX512F__)
    const __m512i a = _mm512_cvtepi8_epi16(load<__m256i>(even));
    const __m512i b = _mm512_cvtepi8_epi16(load<__m256i>(odd));
    first.pairs = (Words)_mm512_permutex2var_epi16(a, load<__m512i>(kInTurn.places), b);
    second.pairs = (Words)_mm512_permutex2var_epi16(a, load<__m512i>(kInTurn.places + 32), b);
#elif defined(__AVX2__)
    const auto a = load<__m128i>(even), b = load<__m128i>(odd);
    first.pairs = (Words)_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b));
    second.pairs = (Words)_mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b));
#else
    first.pairs = group_words(even, odd);
    second.pairs = group_words(even + kLanes, odd + kLanes);
#endif
  }
  static Words group_words(const Element* even, const Element* odd) {
    return ((Words)Int8::integers(even) & 0xFFFF) | (Words)Int8::integers(odd) << 16;
  }

 private:
  typedef int16_t Pairs __attribute__((vector_size(kLanes * 4)));

  static Int16::Columns columns(Pairs pairs) {
    Int16::Columns columns;
    columns.pairs = (Words)pairs;
    return columns;
  }
};

// Groups of one head's elements.
template <class Kv>
constexpr int64_t key_groups(int64_t num_elements) {
  return round_up(num_elements, Kv::kWordElements) / Kv::Product::kGroup;
}

// Calls body(Kv{}) with the elements of a cache that steps of the type E use.
template <class E, class Body>
void with_cache_type(CacheType type, const Body& body) {
  // 16 bits are not enough for steps of float32.
  constexpr bool kIsFloat32 = std::is_same_v<E, Float32>;
  switch (type) {
    case CacheType::kSame: return body(SameKv<E>{});
    case CacheType::kFloat8:
      return body(std::conditional_t<kIsFloat32, NarrowKv<Float8>, Float8Kv>{});
    case CacheType::kInt8:
      return body(std::conditional_t<kIsFloat32, NarrowKv<Int8>, IntegerKv>{});
  }
}

}  // namespace baton
