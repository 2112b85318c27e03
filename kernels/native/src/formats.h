// Storage formats of quantized weights, and the layout of weights in them.
//
// A weight consists of panels of 32 outputs, as packed ones do (see pack.h); each begins at a
// multiple of 64 bytes. A panel consists of a head and *groups* of squares that share scales; a
// group of the scales, and then the codes of its *squares* of 32 outputs and 32 columns. A word of
// codes is four adjacent columns of an output, and the words of the 32 outputs lie side by side:
//
//   8 bits  [8 words][32 outputs][4 columns]
//   4 bits  [4 words][32 outputs][4 bytes]: in byte j of word w, the low four bits are column
//           4w + j, the high ones column 16 + 4w + j
//   5 bits  as 4 bits; then a word per output, whose bit 8j + w is the upper bit of column 4w + j
//   6 bits  as 4 bits; then two planes of a word per output: in plane w / 4, bits 8j + 2(w % 4)
//           and the next are the upper bits of column 4w + j
//
// Scales are arrays over the 32 outputs. Those of outputs that a weight does not have are 0, and so
// are the codes of columns that it does not have.
#pragma once

#include <cstdint>

namespace baton {

// See kernels/formats.py.
enum class Format : int64_t {
  kDense = 0,
  kQ8_0 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 4,
  kQ5_1 = 5,
  kQ4_K = 6,
  kQ5_K = 7,
  kQ6_K = 8,
  kMxfp4 = 9,
  kInt8 = 10,
  kInt8_32 = 11,
  kInt8_128 = 12,
  kInt4_32 = 13,
  kInt4_128 = 14,
  kFp8 = 15,
  kFp8_128 = 16,
};

constexpr int kSquareColumns = 32;
constexpr int kSquareWords = kSquareColumns / 4;
constexpr int64_t kPanelAlignment = 64;

struct Geometry {
  int64_t block_columns;  // of a row in a file, which share a block; 0: the whole row
  int64_t block_bytes;    // of such a block; of a whole row its scale alone
  int64_t head_bytes;     // in front of a panel's groups: scales of whole rows
  int64_t group_squares;
  int64_t scale_bytes;  // in front of a group's squares
  int64_t code_bytes;   // of a square

  constexpr int64_t group_bytes() const { return scale_bytes + group_squares * code_bytes; }

  constexpr int64_t panel_bytes(int64_t num_columns) const {
    const int64_t group_columns = group_squares * kSquareColumns;
    const int64_t num_groups = (num_columns + group_columns - 1) / group_columns;
    const int64_t num_bytes = head_bytes + num_groups * group_bytes();
    return (num_bytes + kPanelAlignment - 1) / kPanelAlignment * kPanelAlignment;
  }
};

// Scales, in their order:
//   Q8_0, Q4_0, Q5_0   float16 d
//   Q4_1, Q5_1         float16 d, float16 m
//   Q4_K, Q5_K         float16 d, float16 dmin, uint8 scales[8 squares], uint8 minimums[8 squares]
//   Q6_K               float16 d, int8 scales[16 halves of squares]
//   MXFP4              uint8 exponents
//   INT8, FP8          float32 scales; in the head if a whole row shares one
//   INT4               float32 scales, float32 zero points
constexpr Geometry geometry_of(Format format) {
  constexpr int64_t kNibbles = 512, kFiveBits = 640, kSixBits = 768, kBytes = 1024;
  constexpr int64_t kHalves = 64, kFloats = 128;
  switch (format) {
    case Format::kDense: break;
    case Format::kQ8_0: return {32, 34, 0, 1, kHalves, kBytes};
    case Format::kQ4_0: return {32, 18, 0, 1, kHalves, kNibbles};
    case Format::kQ4_1: return {32, 20, 0, 1, 2 * kHalves, kNibbles};
    case Format::kQ5_0: return {32, 22, 0, 1, kHalves, kFiveBits};
    case Format::kQ5_1: return {32, 24, 0, 1, 2 * kHalves, kFiveBits};
    case Format::kQ4_K: return {256, 144, 0, 8, 2 * kHalves + 16 * 32, kNibbles};
    case Format::kQ5_K: return {256, 176, 0, 8, 2 * kHalves + 16 * 32, kFiveBits};
    case Format::kQ6_K: return {256, 210, 0, 8, kHalves + 16 * 32, kSixBits};
    case Format::kMxfp4: return {32, 17, 0, 1, 32, kNibbles};
    case Format::kInt8: return {0, 4, kFloats, 1, 0, kBytes};
    case Format::kInt8_32: return {32, 36, 0, 1, kFloats, kBytes};
    case Format::kInt8_128: return {128, 132, 0, 4, kFloats, kBytes};
    case Format::kInt4_32: return {32, 24, 0, 1, 2 * kFloats, kNibbles};
    case Format::kInt4_128: return {128, 72, 0, 4, 2 * kFloats, kNibbles};
    case Format::kFp8: return {0, 4, kFloats, 1, 0, kBytes};
    case Format::kFp8_128: return {128, 132, 0, 4, kFloats, kBytes};
  }
  return {};
}

}  // namespace baton
