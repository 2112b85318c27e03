// Blocks of storage formats, rearranged into panels.
//
// The blocks of GGML's formats are as in ggml-common.h of llama.cpp.
#include "blocks.h"

#include <algorithm>
#include <cstring>

#include "pack.h"

namespace baton {
namespace {

// The codes of 32 columns of a row, one per byte.
struct CodesOfRow {
  uint8_t codes[kSquareColumns];

  uint32_t word(int number) const {
    uint32_t value;
    std::memcpy(&value, codes + 4 * number, sizeof value);
    return value;
  }
};

// Copies a value into an array over the outputs of a panel.
template <class T>
void put(uint8_t* array, int output, const uint8_t* value) {
  std::memcpy(array + output * sizeof(T), value, sizeof(T));
}

// Codes of 4 bits: the low bits of the bytes are the first 16 columns, the high ones the others.
CodesOfRow nibbles(const uint8_t* bytes) {
  CodesOfRow row;
  for (int i = 0; i < 16; ++i) row.codes[i] = bytes[i] & 15;
  for (int i = 0; i < 16; ++i) row.codes[16 + i] = bytes[i] >> 4;
  return row;
}

// Codes of 8 bits; those past `count` are 0.
CodesOfRow bytes(const uint8_t* from, int64_t count) {
  CodesOfRow row{};
  std::memcpy(row.codes, from, static_cast<size_t>(count));
  return row;
}

// Each of the following describes the blocks of some formats: their scales, which are written into
// the arrays of a group, and their codes. A block whose columns are a whole row has a scale for the
// panel's head.

// Q8_0, Q4_0, Q5_0: a float16 scale; Q4_1, Q5_1: and a float16 minimum.
template <int bits, int num_scales>
struct HalfBlock {
  static constexpr int kBits = bits;

  static void put_scales(const uint8_t* block, uint8_t* scales, int output) {
    for (int i = 0; i < num_scales; ++i) {
      put<uint16_t>(scales + i * kPanelColumns * 2, output, block + i * 2);
    }
  }

  static CodesOfRow codes(const uint8_t* block, int64_t, int64_t count) {
    block += num_scales * 2;
    if constexpr (bits == 8) return bytes(block, count);
    if constexpr (bits == 4) return nibbles(block);
    uint32_t uppers;  // a bit per column
    std::memcpy(&uppers, block, sizeof uppers);
    CodesOfRow row = nibbles(block + sizeof uppers);
    for (int i = 0; i < kSquareColumns; ++i) row.codes[i] |= (uppers >> i & 1) << 4;
    return row;
  }
};

// Q4_K, Q5_K: float16 scales of the 8 squares' scales and minimums, which have 6 bits.
template <int bits>
struct SuperBlock {
  static constexpr int kBits = bits;

  static void put_scales(const uint8_t* block, uint8_t* scales, int output) {
    put<uint16_t>(scales, output, block);
    put<uint16_t>(scales + kPanelColumns * 2, output, block + 2);
    uint8_t* to = scales + kPanelColumns * 4 + output;
    const uint8_t* packed = block + 4;
    for (int i = 0; i < 8; ++i) {
      const uint8_t low = packed[i], next = packed[i + 4];
      to[i * kPanelColumns] = i < 4 ? low & 63 : (next & 15) | (packed[i - 4] >> 6) << 4;
      to[(8 + i) * kPanelColumns] = i < 4 ? next & 63 : next >> 4 | (low >> 6) << 4;
    }
  }

  // Two squares share 32 bytes of nibbles; the upper bits of a column share a byte.
  static CodesOfRow codes(const uint8_t* block, int64_t square, int64_t) {
    const uint8_t* uppers = block + 16;
    const uint8_t* lowers = uppers + (bits == 5 ? 32 : 0) + square / 2 * 32;
    CodesOfRow row;
    for (int i = 0; i < kSquareColumns; ++i) {
      row.codes[i] = square % 2 ? lowers[i] >> 4 : lowers[i] & 15;
      if constexpr (bits == 5) row.codes[i] |= (uppers[i] >> square & 1) << 4;
    }
    return row;
  }
};

// Q6_K: int8 scales of 16 columns, and a float16 scale of these behind them.
struct SixBitBlock {
  static constexpr int kBits = 6;

  static void put_scales(const uint8_t* block, uint8_t* scales, int output) {
    put<uint16_t>(scales, output, block + 208);
    for (int i = 0; i < 16; ++i) scales[(2 + i) * kPanelColumns + output] = block[192 + i];
  }

  // Four squares share 64 bytes of nibbles and 32 bytes of upper bits.
  static CodesOfRow codes(const uint8_t* block, int64_t square, int64_t) {
    const int64_t four = square / 4, within = square % 4;
    const uint8_t* lowers = block + 64 * four + 32 * (within % 2);
    const uint8_t* uppers = block + 128 + 32 * four;
    CodesOfRow row;
    for (int i = 0; i < kSquareColumns; ++i) {
      row.codes[i] = (within < 2 ? lowers[i] & 15 : lowers[i] >> 4) |
                     (uppers[i] >> 2 * within & 3) << 4;
    }
    return row;
  }
};

// A byte in front of the nibbles.
struct ExponentBlock {
  static constexpr int kBits = 4;

  static void put_scales(const uint8_t* block, uint8_t* scales, int output) {
    scales[output] = *block;
  }
  static CodesOfRow codes(const uint8_t* block, int64_t, int64_t) { return nibbles(block + 1); }
};

// A float32 scale of some columns or of a row; with 4 bits a float32 zero point, too.
template <int bits>
struct FloatBlock {
  static constexpr int kBits = bits;
  static constexpr int kNumScales = bits == 4 ? 2 : 1;

  static void put_scales(const uint8_t* block, uint8_t* scales, int output) {
    for (int i = 0; i < kNumScales; ++i) {
      put<float>(scales + i * kPanelColumns * 4, output, block + i * 4);
    }
  }

  static CodesOfRow codes(const uint8_t* block, int64_t square, int64_t count) {
    block += kNumScales * 4;
    if constexpr (bits == 4) return nibbles(block + square * 16);
    return bytes(block + square * kSquareColumns, count);
  }
};

// Writes the codes of one output of a square.
template <int bits>
void put_codes(const CodesOfRow& row, uint8_t* square, int output) {
  auto* words = reinterpret_cast<uint32_t*>(square) + output;
  if constexpr (bits == 8) {
    for (int i = 0; i < kSquareWords; ++i) words[i * kPanelColumns] = row.word(i);
    return;
  }
  for (int i = 0; i < 4; ++i) {
    words[i * kPanelColumns] = (row.word(i) & 0x0F0F0F0F) | (row.word(i + 4) & 0x0F0F0F0F) << 4;
  }
  words += 4 * kPanelColumns;
  if constexpr (bits == 5) {
    uint32_t uppers = 0;
    for (int i = 0; i < kSquareWords; ++i) uppers |= (row.word(i) >> 4 & 0x01010101) << i;
    *words = uppers;
  }
  if constexpr (bits == 6) {
    uint32_t planes[2] = {};
    for (int i = 0; i < kSquareWords; ++i) {
      planes[i / 4] |= (row.word(i) >> 4 & 0x03030303) << 2 * (i % 4);
    }
    words[0] = planes[0];
    words[kPanelColumns] = planes[1];
  }
}

// Rows of a source, with adjacent outputs of one panel.
struct RowsOfPanel {
  const uint8_t* source;
  int64_t num_rows;
  uint8_t* panel;
  int first_output;
};

template <class Block>
void pack_panel(const PackBlocks& job, const RowsOfPanel& rows) {
  const Geometry geometry = geometry_of(job.format);
  const int64_t num_squares = (job.num_columns + kSquareColumns - 1) / kSquareColumns;
  for (int64_t first = 0; first < num_squares; first += geometry.group_squares) {
    const int64_t number = first / geometry.group_squares;
    uint8_t* group = rows.panel + geometry.head_bytes + number * geometry.group_bytes();
    for (int64_t i = 0; i < rows.num_rows; ++i) {
      const uint8_t* block = rows.source + i * job.row_bytes;
      const int output = rows.first_output + static_cast<int>(i);
      int64_t first_of_block = first;
      if (geometry.block_columns) {
        block += number * geometry.block_bytes;
        first_of_block = 0;
        Block::put_scales(block, group, output);
      } else if (!first) {
        Block::put_scales(block, rows.panel, output);
      }
      uint8_t* codes = group + geometry.scale_bytes;
      for (int64_t square = 0; square < geometry.group_squares; ++square) {
        const int64_t count = job.num_columns - (first + square) * kSquareColumns;
        put_codes<Block::kBits>(
            Block::codes(block, first_of_block + square, std::min<int64_t>(kSquareColumns, count)),
            codes + square * geometry.code_bytes, output);
      }
    }
  }
}

template <class Block>
void pack_as(const PackBlocks& job) {
  const int64_t panel_bytes = geometry_of(job.format).panel_bytes(job.num_columns);
  const bool is_paired = job.paired_part >= 0;
  const int64_t width = is_paired ? kHalfPanel : kPanelColumns;  // rows of the source per panel
  for (int64_t i = 0; i < job.num_rows;) {
    const int64_t row = job.first_row + i, within = row % width;
    const int64_t count = std::min(width - within, job.num_rows - i);
    const int64_t output = within + (is_paired ? job.paired_part * kHalfPanel : 0);
    pack_panel<Block>(job, {job.source + i * job.row_bytes, count,
                            job.weight + row / width * panel_bytes, static_cast<int>(output)});
    i += count;
  }
}

}  // namespace

void pack_blocks(const PackBlocks& job) {
  switch (job.format) {
    case Format::kDense: return;
    case Format::kQ8_0: return pack_as<HalfBlock<8, 1>>(job);
    case Format::kQ4_0: return pack_as<HalfBlock<4, 1>>(job);
    case Format::kQ4_1: return pack_as<HalfBlock<4, 2>>(job);
    case Format::kQ5_0: return pack_as<HalfBlock<5, 1>>(job);
    case Format::kQ5_1: return pack_as<HalfBlock<5, 2>>(job);
    case Format::kQ4_K: return pack_as<SuperBlock<4>>(job);
    case Format::kQ5_K: return pack_as<SuperBlock<5>>(job);
    case Format::kQ6_K: return pack_as<SixBitBlock>(job);
    case Format::kMxfp4: return pack_as<ExponentBlock>(job);
    case Format::kInt4_32:
    case Format::kInt4_128: return pack_as<FloatBlock<4>>(job);
    case Format::kInt8:
    case Format::kInt8_32:
    case Format::kInt8_128:
    case Format::kFp8:
    case Format::kFp8_128: return pack_as<FloatBlock<8>>(job);
  }
}

}  // namespace baton
