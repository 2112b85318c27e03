// The memory layout of weights: panels of 32 rows, read in the order they are multiplied.
//
// A weight [rows][columns], whose rows are a product's output columns, is stored as
// [rows / 32][groups][32] words, each word a group of adjacent elements of a row. Panels
// and groups are padded with zeros.
#pragma once

#include "commands.h"
#include "tile.h"

namespace baton {

constexpr int64_t kHalfPanel = kPanelColumns / 2;

struct Pack {
  ElementType element;
  const void* source;  // [num_rows, num_columns], strides in elements
  int64_t row_stride;
  int64_t column_stride;
  int64_t num_rows;
  int64_t num_columns;
  uint32_t* weight;
  int64_t first_row;    // row of the weight that the source's first row is written to
  int64_t paired_part;  // -1; or 0 / 1: the weight pairs two parts, 16 rows of each in a panel
};

void pack(const Pack&);

}  // namespace baton
