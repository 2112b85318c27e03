// Single rows of storage formats: as a file has them, in panels, and as floats.
#pragma once

#include "formats.h"

namespace baton {

struct PackBlocks {
  Format format;
  const uint8_t* source;  // [num_rows, row_bytes]
  int64_t row_bytes;
  int64_t num_rows;
  int64_t num_columns;
  uint8_t* weight;
  int64_t first_row;    // see Pack in pack.h
  int64_t paired_part;  // see Pack
};

// Writes rows into a weight with the layout of formats.h.
void pack_blocks(const PackBlocks&);

// Decodes outputs first to first + count of a panel, at most 32, into `out`: [count, num_columns].
void decode_outputs(Format, const uint8_t* panel, int64_t num_columns, int first, int count,
                    float* out);

}  // namespace baton
