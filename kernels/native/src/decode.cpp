// Single rows of panels as floats.
#include <algorithm>

#include "blocks.h"
#include "values.h"

namespace baton {
namespace {

// Copies lanes first to first + count of a square's 32 columns to rows.
template <class F>
void decode_lanes(const SquareValues<F>& values, int first, int count, int64_t num_columns,
                  float* out, int64_t row_stride) {
  alignas(64) float lanes[kSquareColumns][kLanes];
#pragma GCC unroll 8
  for (int word = 0; word < kSquareWords; ++word) {
    Floats columns[4];
    values.read(word, columns);
    for (int i = 0; i < 4; ++i) store(lanes[4 * word + i], columns[i]);
  }
  for (int row = 0; row < count; ++row) {
    for (int64_t i = 0; i < num_columns; ++i) out[row * row_stride + i] = lanes[i][first + row];
  }
}

template <class F>
void decode_as(const uint8_t* panel, int64_t num_columns, int first, int count, float* out) {
  const PackedSquares<F> squares({panel, nullptr, F::kGeometry.panel_bytes(num_columns)});
  for (int row = 0; row < count;) {
    const int vector = (first + row) / kLanes, lane = (first + row) % kLanes;
    const int num_rows = std::min(count - row, kLanes - lane);
    for (int64_t column = 0; column < num_columns; column += kSquareColumns) {
      const SquareValues<F> values(squares.at(column / kSquareColumns), vector);
      decode_lanes(values, lane, num_rows, std::min<int64_t>(kSquareColumns, num_columns - column),
                   out + row * num_columns + column, num_columns);
    }
    row += num_rows;
  }
}

}  // namespace

void decode_outputs(Format format, const uint8_t* panel, int64_t num_columns, int first,
                    int count, float* out) {
  with_policy(format, [&](auto policy) {
    decode_as<decltype(policy)>(panel, num_columns, first, count, out);
  });
}

}  // namespace baton
