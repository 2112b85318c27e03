// The squares of each storage format as codes and scales for integer dot products.
//
// A policy describes the values of one format:
//
//     value = scale * (code - kOffset) + shift
//
// Scales and shifts are computed in float32 as the format's definition says. See formats.h for the
// layout. `vector` is a vector of the 32 outputs, a word four columns of each of them.
#pragma once

#include "formats.h"
#include "int_dot.h"
#include "tile.h"

namespace baton {

constexpr int kPanelVectors = kPanelColumns / kLanes;

// A square of a panel: the group that holds it, and its number in the group.
struct Square {
  const uint8_t* panel;
  const uint8_t* group;
  int number;
};

// Word `word` of nibbles: bytes of the low nibbles are columns 0 to 15, of the high ones 16 to 31.
inline Words nibbles(const uint8_t* codes, int word, int vector) {
  const auto both = load<Words>(codes + (word % 4 * kPanelColumns + vector * kLanes) * 4);
  return (word < 4 ? both : both >> 4) & 0x0F0F0F0Fu;
}

// `words` shifted left by `count` bits, or right if it is negative.
inline Words shifted(Words words, int count) {
  return count < 0 ? words >> -count : words << count;
}

// Word `word` of codes of five bits, whose fifth bits lie behind the nibbles: that of column
// 4 * word + j is bit 8 * j + word.
inline Words five_bits(const uint8_t* codes, int word, int vector) {
  const auto fifths = load<Words>(codes + 512 + vector * kLanes * 4);
  return nibbles(codes, word, vector) | (shifted(fifths, 4 - word) & 0x10101010u);
}

// Word `word` of codes of six bits. Two planes of upper bits lie behind the nibbles: those of
// column 4 * word + j are bits 8 * j + 2 * (word % 4) of plane word / 4.
inline Words six_bits(const uint8_t* codes, int word, int vector) {
  const uint8_t* planes = codes + 512 + word / 4 * 128;
  const auto uppers = load<Words>(planes + vector * kLanes * 4);
  return nibbles(codes, word, vector) | (shifted(uppers, 4 - 2 * (word % 4)) & 0x30303030u);
}

// Word `word` of signed bytes, with kSignedOffset added.
inline Words eight_bits(const uint8_t* codes, int word, int vector) {
  const auto bytes = load<Words>(codes + (word * kPanelColumns + vector * kLanes) * 4);
  return kSignedOffset ? bytes ^ 0x80808080u : bytes;
}

inline Floats halves_at(const uint8_t* from, int vector) {
  return widen_half(load<Halves>(from + vector * kLanes * 2));
}

inline Floats floats_at(const uint8_t* from, int vector) {
  return load<Floats>(from + vector * kLanes * 4);
}

// kLanes bytes as integers. GCC converts vectors of bytes one by one.
inline Ints unsigned_bytes_at(const uint8_t* from, int vector) {
  from += vector * kLanes;
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtepu8_epi32(load<__m128i>(from));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  Ints values;
  for (int lane = 0; lane < kLanes; ++lane) values[lane] = from[lane];
  return values;
#endif
}

inline Ints signed_bytes_at(const uint8_t* from, int vector) {
  return (unsigned_bytes_at(from, vector) << 24) >> 24;
}

inline Floats as_floats(Ints values) { return __builtin_convertvector(values, Floats); }

// The part of a policy that reads codes of `bits` bits.
template <Format format, int bits, int offset, bool has_shift>
struct Codes {
  static constexpr Geometry kGeometry = geometry_of(format);
  static constexpr int kBits = bits;
  static constexpr int kMaxCode = bits == 8 ? kSigned : (1 << bits) - 1;
  static constexpr int kOffset = bits == 8 ? kSignedOffset : offset;
  static constexpr bool kHasShift = has_shift;
  // Runs of columns of a square: inputs have a scale for each, and weights may have.
  static constexpr int kParts = 2;

  static Words code(Square square, int word, int vector) {
    const uint8_t* codes =
        square.group + kGeometry.scale_bytes + square.number * kGeometry.code_bytes;
    if constexpr (bits == 4) return nibbles(codes, word, vector);
    if constexpr (bits == 5) return five_bits(codes, word, vector);
    if constexpr (bits == 6) return six_bits(codes, word, vector);
    return eight_bits(codes, word, vector);
  }
};

// float16 scales, and shifts if there are any.
template <Format format, int bits, int offset, bool has_shift>
struct HalfScales : Codes<format, bits, offset, has_shift> {
  static Floats scale(Square square, int, int vector) { return halves_at(square.group, vector); }
  static Floats shift(Square square, int vector) { return halves_at(square.group + 64, vector); }
};
using Q8_0 = HalfScales<Format::kQ8_0, 8, 0, false>;
using Q4_0 = HalfScales<Format::kQ4_0, 4, 8, false>;
using Q4_1 = HalfScales<Format::kQ4_1, 4, 0, true>;
using Q5_0 = HalfScales<Format::kQ5_0, 5, 16, false>;
using Q5_1 = HalfScales<Format::kQ5_1, 5, 0, true>;

// Bytes as scales and minimums of squares, and float16 scales of these.
template <Format format, int bits>
struct ByteScales : Codes<format, bits, 0, true> {
  static constexpr int kParts = 1;

  static Floats scale(Square square, int, int vector) {
    const uint8_t* scales = square.group + 128 + square.number * kPanelColumns;
    return halves_at(square.group, vector) * as_floats(unsigned_bytes_at(scales, vector));
  }
  static Floats shift(Square square, int vector) {
    const uint8_t* minimums = square.group + 384 + square.number * kPanelColumns;
    return -(halves_at(square.group + 64, vector) *
             as_floats(unsigned_bytes_at(minimums, vector)));
  }
};
using Q4_K = ByteScales<Format::kQ4_K, 4>;
using Q5_K = ByteScales<Format::kQ5_K, 5>;

// An int8 as the scale of half a square, and a float16 scale of these.
struct Q6_K : Codes<Format::kQ6_K, 6, 32, false> {
  static Floats scale(Square square, int part, int vector) {
    const uint8_t* scales = square.group + 64 + (2 * square.number + part) * kPanelColumns;
    return halves_at(square.group, vector) * as_floats(signed_bytes_at(scales, vector));
  }
};

// Exponents (e8m0) as scales; a code is the number of a value of e2m1.
struct Mxfp4 : Codes<Format::kMxfp4, 4, 12, false> {
  static constexpr int kMaxCode = 24;

  static Words code(Square square, int word, int vector) {
    return doubled_values(Codes::code(square, word, vector));
  }
  // 2^(e - 128): half of 2^(e - 127), since values are doubled.
  static Floats scale(Square square, int, int vector) {
    const auto exponents = (Words)unsigned_bytes_at(square.group, vector);
    const Words denormal = 0x00200000u << (exponents & 1);
    return select((Masks)(exponents < 2), (Floats)denormal, (Floats)((exponents - 1) << 23));
  }

 private:
  // The values of e2m1, doubled, plus kOffset.
  alignas(16) static constexpr uint8_t kValues[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                      12, 11, 10, 9,  8,  6,  4,  0};

  static Words doubled_values(Words numbers) {
#if defined(__AVX512F__)
    const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)kValues));
    return (Words)_mm512_shuffle_epi8(table, (__m512i)numbers);
#elif defined(__AVX2__)
    const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)kValues));
    return (Words)_mm256_shuffle_epi8(table, (__m256i)numbers);
#else
    uint8_t bytes[kLanes * 4];
    store(bytes, numbers);
    for (uint8_t& each : bytes) each = kValues[each];
    return load<Words>(bytes);
#endif
  }
};

// float32 scales of rows, in front of a panel.
struct Int8 : Codes<Format::kInt8, 8, 0, false> {
  static Floats scale(Square square, int, int vector) { return floats_at(square.panel, vector); }
};

// float32 scales of groups of squares, and zero points if there are any.
template <Format format, int bits, bool has_shift>
struct FloatScales : Codes<format, bits, 0, has_shift> {
  static Floats scale(Square square, int, int vector) { return floats_at(square.group, vector); }
  static Floats shift(Square square, int vector) {
    return -(floats_at(square.group, vector) * floats_at(square.group + 128, vector));
  }
};
using Int8_32 = FloatScales<Format::kInt8_32, 8, false>;
using Int8_128 = FloatScales<Format::kInt8_128, 8, false>;
using Int4_32 = FloatScales<Format::kInt4_32, 4, true>;
using Int4_128 = FloatScales<Format::kInt4_128, 4, true>;

}  // namespace baton
