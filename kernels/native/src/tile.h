// The inner kernel of every matrix product: a few rows times one panel of columns.
#pragma once

#include <utility>

#include "element.h"

namespace baton {

constexpr int kPanelColumns = 32;
constexpr int kLineWords = 16;  // of a cache line

// Rows of one tile: with a group of columns and an operand, their sums fill the registers.
#if defined(__AVX512F__)
constexpr int kTileRows = 12;
#elif defined(__AVX__)
constexpr int kTileRows = 5;
#else
constexpr int kTileRows = 4;
#endif

// Vectors of columns that a tile multiplies at once. With few rows, two would be too few sums for
// the multiply-adds that a core can have under way, and a panel would be read in several passes.
constexpr int tile_vectors(int rows) {
  constexpr int kPanelVectors = kPanelColumns / kLanes;
  return rows <= 2 && kPanelVectors >= 4 ? 4 : 2;
}

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The addresses of a tile's left operands: group g of row r is at
// `first[g * group_stride + r * row_stride]`.
// Rows packed side by side have group_stride kPackedRows: the tile's own number of rows.
constexpr int kPackedRows = 0;

// A panel of packed words, [groups][32], from its first group on. See `multiply_tile`.
template <class E>
class PackedPanel {
 public:
  explicit PackedPanel(const uint32_t* words) : words_(words) {}

  PackedPanel from_column(int column) const { return PackedPanel(words_ + column); }

  // The next group of `vectors` * kLanes columns.
  template <int vectors>
  void next(typename E::Columns (&columns)[vectors]) {
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) columns[v] = typename E::Columns(words_ + v * kLanes);
    words_ += kPanelColumns;
  }

 private:
  const uint32_t* words_;
};

// out[r][c] = (out[r][c] * scales[r], or 0) + sum over g of left[g][r] * panel[g][c]
//
// Each sum runs in the order of g, for any number of rows and any source of the panel's columns:
// a row's result does not depend on the other rows.
template <class E, class Panel, int rows, int group_stride, int row_stride>
inline void multiply_tile(const typename E::Operand* left, Panel panel, int64_t num_groups,
                          float* out, int64_t out_stride, const float* scales) {
  constexpr int kVectors = tile_vectors(rows);
  constexpr int kStride = group_stride == kPackedRows ? rows : group_stride;
  for (int column = 0; column < kPanelColumns; column += kVectors * kLanes) {
    Floats sums[rows][kVectors];
#pragma GCC unroll 16
    for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        float* place = out + row * out_stride + column + v * kLanes;
        sums[row][v] = scales ? load<Floats>(place) * broadcast(scales[row]) : Floats{};
      }
    }
    Panel columns = panel.from_column(column);
    const typename E::Operand* operands = left;
#pragma GCC unroll 2
    for (int64_t group = 0; group < num_groups; ++group) {
      typename E::Columns vectors[kVectors];
      columns.next(vectors);
#pragma GCC unroll 16
      for (int row = 0; row < rows; ++row) {
        const typename E::Operand operand = operands[row * row_stride];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          sums[row][v] = E::multiply_add(sums[row][v], vectors[v], operand);
        }
      }
      operands += kStride;
    }
#pragma GCC unroll 16
    for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        store(out + row * out_stride + column + v * kLanes, sums[row][v]);
      }
    }
  }
}

template <class E, class Panel>
using TileFunction = void (*)(const typename E::Operand*, Panel, int64_t, float*, int64_t,
                              const float*);

template <class E, class Panel, int group_stride, int row_stride, int... counts>
inline TileFunction<E, Panel> tile_function(int rows, std::integer_sequence<int, counts...>) {
  static constexpr TileFunction<E, Panel> functions[] = {
      multiply_tile<E, Panel, counts + 1, group_stride, row_stride>...};
  return functions[rows - 1];
}

// The tile function for 1 <= rows <= kTileRows.
template <class E, class Panel, int group_stride, int row_stride>
inline TileFunction<E, Panel> tile_function(int rows) {
  return tile_function<E, Panel, group_stride, row_stride>(
      rows, std::make_integer_sequence<int, kTileRows>{});
}

}  // namespace baton
