// The numbers of storage formats as floats.
#pragma once

#include <type_traits>

#include "int8_tile.h"

namespace baton {

// e4m3 codes and float32 scales of rows or groups of squares; see codes.h.
template <Format format>
struct Fp8 {
  static constexpr Geometry kGeometry = geometry_of(format);
  static constexpr int kParts = 1;
  static constexpr bool kHasShift = false;

  static Words code(Square square, int word, int vector) {
    const uint8_t* codes =
        square.group + kGeometry.scale_bytes + square.number * kGeometry.code_bytes;
    return load<Words>(codes + (word * kPanelColumns + vector * kLanes) * 4);
  }
  static Floats scale(Square square, int, int vector) {
    return floats_at(kGeometry.head_bytes ? square.panel : square.group, vector);
  }
};

template <class F>
constexpr bool kIsFp8 = false;
template <Format format>
constexpr bool kIsFp8<Fp8<format>> = true;

// Whether values are scale * (code - zero).
template <class F>
constexpr bool kHasZero = std::is_same_v<F, Int4_32> || std::is_same_v<F, Int4_128>;

// Byte `number` of words, with its sign.
inline Ints signed_byte(Words words, int number) {
  return (Ints)(words << (24 - 8 * number)) >> 24;
}

// Byte `number` of words as e4m3, whose exponent has a bias of 7; that of float16 is 15.
inline Floats e4m3_byte(Words words, int number) {
  const Words code = words >> 8 * number;
  const Words half = (code & 0x7F) << 7 | (code & 0x80) << 8;
  return widen_half(__builtin_convertvector(half, Halves)) * broadcast(256.0f);
}

// kLanes outputs of a square, computed in float32 as kernels/reference/quantized.py does.
template <class F>
class SquareValues {
 public:
  SquareValues(Square square, int vector) : square_(square), vector_(vector) {
    for (int part = 0; part < F::kParts; ++part) scales_[part] = F::scale(square, part, vector);
    if constexpr (kHasZero<F>) {
      shift_ = floats_at(square.group + kPanelColumns * 4, vector);
    } else if constexpr (F::kHasShift) {
      shift_ = F::shift(square, vector);
    }
  }

  // Columns 4 * word to 4 * word + 3.
  void read(int word, Floats (&values)[4]) const {
    const Floats scale = scales_[word * F::kParts / kSquareWords];
    Words codes = F::code(square_, word, vector_);
    if constexpr (kIsFp8<F>) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) values[i] = e4m3_byte(codes, i) * scale;
    } else {
      codes = subtract_bytes(codes, F::kOffset);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) values[i] = value(as_floats(signed_byte(codes, i)), scale);
    }
  }

 private:
  typedef uint8_t Bytes __attribute__((vector_size(kLanes * 4)));

  static Words subtract_bytes(Words words, int value) {
    return (Words)((Bytes)words - static_cast<uint8_t>(value));
  }

  Floats value(Floats code, Floats scale) const {
    if constexpr (kHasZero<F>) return scale * (code - shift_);
    // Exact but for the sum, which therefore is the same in a fused operation.
    if constexpr (F::kHasShift) return scale * code + shift_;
    return scale * code;
  }

  Square square_;
  int vector_;
  Floats scales_[F::kParts];
  Floats shift_{};  // or the zero point
};

// Calls body(policy) for a storage format.
template <class Body>
auto with_policy(Format format, const Body& body) {
  switch (format) {
    case Format::kDense:
    case Format::kQ8_0: return body(Q8_0{});
    case Format::kQ4_0: return body(Q4_0{});
    case Format::kQ4_1: return body(Q4_1{});
    case Format::kQ5_0: return body(Q5_0{});
    case Format::kQ5_1: return body(Q5_1{});
    case Format::kQ4_K: return body(Q4_K{});
    case Format::kQ5_K: return body(Q5_K{});
    case Format::kQ6_K: return body(Q6_K{});
    case Format::kMxfp4: return body(Mxfp4{});
    case Format::kInt8: return body(Int8{});
    case Format::kInt8_32: return body(Int8_32{});
    case Format::kInt8_128: return body(Int8_128{});
    case Format::kInt4_32: return body(Int4_32{});
    case Format::kInt4_128: return body(Int4_128{});
    case Format::kFp8: return body(Fp8<Format::kFp8>{});
    case Format::kFp8_128: break;
  }
  return body(Fp8<Format::kFp8_128>{});
}

}  // namespace baton
