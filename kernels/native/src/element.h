// The element types of weights and KV, and the multiply-add step of each.
//
// A matrix product sums over *groups*: as many neighbouring elements as fill four bytes, two
// in bfloat16 and one in float32. So a panel of either type is words [groups][columns].
#pragma once

#include "simd.h"

namespace baton {

#if defined(__AVX512F__)
// Elements of two vectors of 32 in turn: 0, 32, 1, 33 ...
struct InTurn {
  alignas(64) uint16_t places[64];
  constexpr InTurn() : places() {
    for (int i = 0; i < 64; ++i) places[i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
  }
};
constexpr InTurn kInTurn;

// Elements of two halves of a vector of 32 in turn: 0, 16, 1, 17 ...
struct HalvesInTurn {
  alignas(64) uint16_t places[32];
  constexpr HalvesInTurn() : places() {
    for (int i = 0; i < 32; ++i) places[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
  }
};
constexpr HalvesInTurn kHalvesInTurn;

// Elements of two rows of 32 in turn, which two vectors hold by eights: the first vector has
// elements 0 to 7 and 16 to 23 of the first row and then of the second, the other has the rest.
struct RowsInTurn {
  alignas(64) uint16_t places[64];
  constexpr RowsInTurn() : places() {
    for (int i = 0; i < 64; ++i) {
      const int column = i / 2, row = i % 2;
      const int vector = column / 8 % 2, eight = 2 * row + column / 16;
      places[i] = static_cast<uint16_t>(32 * vector + 8 * eight + column % 8);
    }
  }
};
constexpr RowsInTurn kRowsInTurn;
#endif

struct Float32 {
  using Stored = float;
  using Operand = float;  // a group of the left side, ready to be broadcast
  struct Columns {        // a group of kLanes columns of the right side
    Floats values;
    Columns() = default;
    explicit Columns(const uint32_t* words) : values(load<Floats>(words)) {}
  };
  static constexpr int kGroup = 1;

  static Floats widen_lanes(const Stored* from) { return load<Floats>(from); }
  static void narrow_lanes(Stored* to, Floats values) { store(to, values); }
  static float widen_one(Stored value) { return value; }
  static Stored narrow_one(float value) { return value; }
  static Operand operand(const Stored* group) { return *group; }
  // Stores kLanes adjacent elements of the left side; `place` is the row's first operand.
  static void store_operands(Operand* place, int64_t element, Floats values) {
    store(place + element, values);
  }
  static Floats multiply_add(Floats sum, const Columns& columns, Operand operand) {
    return sum + columns.values * broadcast(operand);
  }
  // Stores four adjacent rows of kLanes columns; the words of groups are `stride` apart.
  static void store_groups(uint32_t* words, int64_t stride, const Floats (&rows)[4]) {
    for (int i = 0; i < 4; ++i) store(words + i * stride, rows[i]);
  }
  // Loads 2 * kLanes columns of a group; each element of the group lies in a row of its own.
  static void interleave(const Stored* row, const Stored*, Columns& first, Columns& second) {
    first.values = load<Floats>(row);
    second.values = load<Floats>(row + kLanes);
  }
};

struct Bfloat16 {
  using Stored = uint16_t;
  static constexpr int kGroup = 2;

  static Floats widen_lanes(const Stored* from) { return widen(load<Halves>(from)); }
  static void narrow_lanes(Stored* to, Floats values) { store(to, narrow(values)); }
  static float widen_one(Stored value) { return widen(value); }
  static Stored narrow_one(float value) { return narrow(value); }

  static void store_groups(uint32_t* words, int64_t stride, const Floats (&rows)[4]) {
    for (int i = 0; i < 2; ++i) store(words + i * stride, pairs(rows[2 * i], rows[2 * i + 1]));
  }

#if defined(__AVX512BF16__)
  // Words of two rows.
  static Words pairs(Floats first, Floats second) {
    const auto both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (Words)_mm512_permutexvar_epi16(load<__m512i>(kHalvesInTurn.places), both);
  }
  using Operand = uint32_t;
  struct Columns {
    __m512bh values;
    Columns() = default;
    explicit Columns(const uint32_t* words) : values((__m512bh)_mm512_loadu_si512(words)) {}
  };
  static Operand operand(const Stored* group) {
    Operand pair;
    std::memcpy(&pair, group, sizeof pair);
    return pair;
  }
  static void store_operands(Operand* place, int64_t element, Floats values) {
    store(reinterpret_cast<Stored*>(place) + element, narrow(values));
  }
  static Floats multiply_add(Floats sum, const Columns& columns, Operand operand) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, columns.values,
                                    (__m512bh)_mm512_set1_epi32(static_cast<int>(operand)));
  }
  static void interleave(const Stored* even, const Stored* odd, Columns& first,
                             Columns& second) {
    const auto a = load<__m512i>(even), b = load<__m512i>(odd);
    first.values = (__m512bh)_mm512_permutex2var_epi16(a, load<__m512i>(kInTurn.places), b);
    second.values = (__m512bh)_mm512_permutex2var_epi16(a, load<__m512i>(kInTurn.places + 32), b);
  }
#else
  // Words of two rows.
  static Words pairs(Floats first, Floats second) {
    return round_to_bf16_bits(first) | round_to_bf16_bits(second) << 16;
  }
  struct Operand {
    float first, second;
  };
  struct Columns {
    Floats first, second;
    Columns() = default;
    Columns(Floats of_first, Floats of_second) : first(of_first), second(of_second) {}
    explicit Columns(const uint32_t* words) {
      const Words pairs = load<Words>(words);
      first = (Floats)(pairs << 16);
      second = (Floats)(pairs & 0xFFFF0000u);
    }
  };
  static Operand operand(const Stored* group) { return {widen(group[0]), widen(group[1])}; }
  static void store_operands(Operand* place, int64_t element, Floats values) {
    store(reinterpret_cast<float*>(place) + element, values);
  }
  static Floats multiply_add(Floats sum, const Columns& columns, Operand operand) {
    sum += columns.first * broadcast(operand.first);
    return sum + columns.second * broadcast(operand.second);
  }
  static void interleave(const Stored* even, const Stored* odd, Columns& first,
                             Columns& second) {
    first = {widen(load<Halves>(even)), widen(load<Halves>(odd))};
    second = {widen(load<Halves>(even + kLanes)), widen(load<Halves>(odd + kLanes))};
  }
#endif

  // Words of groups of two values that bfloat16 has exactly.
  static Words words(Floats even, Floats odd) { return (Words)even >> 16 | (Words)odd; }
};

// The values as if they were stored in a tensor of this type between two operations.
template <class E>
Floats rounded(Floats values) {
  typename E::Stored stored[kLanes];
  E::narrow_lanes(stored, values);
  return E::widen_lanes(stored);
}

// out[i] = body(a[i], b[i]), computed on Floats; `out` may be `a` or `b`.
template <class E, class Body>
void combine_rows(const typename E::Stored* a, const typename E::Stored* b, int64_t size,
                  typename E::Stored* out, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    E::narrow_lanes(out + i, body(E::widen_lanes(a + i), E::widen_lanes(b + i)));
  }
  if (i == size) return;
  typename E::Stored last_a[kLanes] = {}, last_b[kLanes] = {};
  const auto num_bytes = static_cast<size_t>(size - i) * sizeof *out;
  std::memcpy(last_a, a + i, num_bytes);
  std::memcpy(last_b, b + i, num_bytes);
  E::narrow_lanes(last_a, body(E::widen_lanes(last_a), E::widen_lanes(last_b)));
  std::memcpy(out + i, last_a, num_bytes);
}

template <class E>
constexpr int64_t groups_of(int64_t num_elements) {
  return (num_elements + E::kGroup - 1) / E::kGroup;
}

}  // namespace baton
