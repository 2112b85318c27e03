// The inner kernel of products in int8: a few rows of activations times a panel of codes.
#pragma once

#include "codes.h"
#include "row_blocks.h"

namespace baton {

// Rows of a tile: their sums fill the registers.
#if defined(__AVX512F__)
constexpr int kInt8TileRows = 8;
#elif defined(__AVX2__)
constexpr int kInt8TileRows = 4;
#else
constexpr int kInt8TileRows = 2;
#endif

// The panels of a weight that a thread reads one after another.
struct PanelStream {
  const uint8_t* panel;
  const uint8_t* next;  // the panel that is read afterwards, or null
  int64_t num_bytes;    // of each
};

// The squares of a panel, with codes as its format has them.
template <class F>
class PackedSquares {
 public:
  using Policy = F;
  // Vectors of outputs that are summed at a time. With their codes they fill the registers.
#if defined(__AVX512F__)
  static constexpr int kPassVectors = 2;
#else
  static constexpr int kPassVectors = 1;
#endif

  explicit PackedSquares(const PanelStream& stream) : stream_(stream) {}

  PackedSquares without_prefetch() const {
    return PackedSquares({stream_.panel, nullptr, 0});
  }

  Square at(int64_t number) const {
    constexpr auto kSquares = static_cast<uint64_t>(F::kGeometry.group_squares);
    const auto index = static_cast<uint64_t>(number);
    return {stream_.panel,
            stream_.panel + F::kGeometry.head_bytes +
                static_cast<int64_t>(index / kSquares) * F::kGeometry.group_bytes(),
            static_cast<int>(index % kSquares)};
  }
  Words code(Square square, int word, int vector) const { return F::code(square, word, vector); }
  Floats scale(Square square, int part, int vector) const {
    return F::scale(square, part, vector);
  }
  Floats shift(Square square, int vector) const { return F::shift(square, vector); }

  // Loads what is read some squares later into the second-level cache.
  void prefetch(int64_t square) const {
    constexpr int64_t kBytes = F::kGeometry.group_bytes() / F::kGeometry.group_squares;
    const int64_t place = square * kBytes + kPrefetchBytes;
    const uint8_t* from = stream_.panel + place;
    if (place >= stream_.num_bytes) {
      if (!stream_.next) return;
      from = stream_.next + (place - stream_.num_bytes);
    }
#pragma GCC unroll 32
    for (int64_t byte = 0; byte < kBytes; byte += 64) __builtin_prefetch(from + byte, 0, 2);
  }

 private:
  static constexpr int64_t kPrefetchBytes = 8 << 10;  // the best of 1 to 36 KiB on Zen 4

  PanelStream stream_;
};

// Squares of a panel with a byte per code and scales and shifts as floats.
constexpr int kChunkSquares = 8;

struct alignas(64) Chunk {
  uint32_t codes[kChunkSquares][kSquareWords][kPanelColumns];
  float scales[kChunkSquares][2][kPanelColumns];
  float shifts[kChunkSquares][kPanelColumns];
};

template <class F>
class UnpackedSquares {
 public:
  using Policy = F;
  static constexpr int kPassVectors = 2;

  explicit UnpackedSquares(const Chunk& chunk) : chunk_(chunk) {}

  void prefetch(int64_t) const {}
  int64_t at(int64_t square) const { return square; }
  Words code(int64_t square, int word, int vector) const {
    return load<Words>(chunk_.codes[square][word] + vector * kLanes);
  }
  Floats scale(int64_t square, int part, int vector) const {
    return load<Floats>(chunk_.scales[square][part] + vector * kLanes);
  }
  Floats shift(int64_t square, int vector) const {
    return load<Floats>(chunk_.shifts[square] + vector * kLanes);
  }

 private:
  const Chunk& chunk_;
};

// Unpacks `count` squares.
template <class F>
inline void unpack(const PackedSquares<F>& squares, int64_t first, int64_t count, Chunk& out) {
  for (int64_t i = 0; i < count; ++i) {
    const Square square = squares.at(first + i);
    squares.prefetch(first + i);
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) {
#pragma GCC unroll 8
      for (int word = 0; word < kSquareWords; ++word) {
        store(out.codes[i][word] + v * kLanes, squares.code(square, word, v));
      }
      for (int part = 0; part < F::kParts; ++part) {
        store(out.scales[i][part] + v * kLanes, squares.scale(square, part, v));
      }
      if constexpr (F::kHasShift) store(out.shifts[i] + v * kLanes, squares.shift(square, v));
    }
  }
}

// sums[r][output] += scale of row r * sum over columns of code * value, square by square.
//
// Integer sums of a square are exact, and its float operations are the same for any number of rows
// and any source of codes: a row's result does not depend on the other rows.
template <class Squares, int rows>
inline void multiply_squares(const Squares& squares, int64_t first, int64_t count,
                             const RowBlock* left, float* sums) {
  using F = typename Squares::Policy;
  constexpr int kPass = Squares::kPassVectors;
  constexpr int kPartWords = kSquareWords / F::kParts;
  Floats totals[rows][kPanelVectors];
#pragma GCC unroll 16
  for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) {
      totals[row][v] = load<Floats>(sums + row * kPanelColumns + v * kLanes);
    }
  }
  for (int64_t i = 0; i < count; ++i, left += rows) {
    const auto square = squares.at(first + i);
    squares.prefetch(first + i);
#pragma GCC unroll 8
    for (int start = 0; start < kPanelVectors; start += kPass) {
#pragma GCC unroll 2
      for (int part = 0; part < F::kParts; ++part) {
        DotProduct<F::kMaxCode, kPartWords> dots[rows][kPass];
#pragma GCC unroll 16
        for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 2
          for (int v = 0; v < kPass; ++v) dots[row][v].start(left[row].starts[part]);
        }
#pragma GCC unroll 8
        for (int index = 0; index < kPartWords; ++index) {
          // Words of both nibbles of a byte follow each other, so it is read once.
          const int word = F::kParts == 1 ? index / 2 + index % 2 * 4 : part * kPartWords + index;
          Words codes[kPass];
#pragma GCC unroll 2
          for (int v = 0; v < kPass; ++v) codes[v] = squares.code(square, word, start + v);
#pragma GCC unroll 16
          for (int row = 0; row < rows; ++row) {
            uint32_t four;
            std::memcpy(&four, left[row].codes + word * 4, sizeof four);
            const Words values = Words{} + four;
#pragma GCC unroll 2
            for (int v = 0; v < kPass; ++v) dots[row][v].add(index, codes[v], values);
          }
        }
#pragma GCC unroll 2
        for (int v = 0; v < kPass; ++v) {
          const Floats scale = squares.scale(square, part, start + v);
#pragma GCC unroll 16
          for (int row = 0; row < rows; ++row) {
            Floats& total = totals[row][start + v];
            const Floats dot = __builtin_convertvector(dots[row][v].total(), Floats);
            total = multiply_add(dot, scale * broadcast(left[row].scales[part]), total);
          }
        }
      }
      if constexpr (F::kHasShift) {
#pragma GCC unroll 2
        for (int v = 0; v < kPass; ++v) {
          const Floats shift = squares.shift(square, start + v);
#pragma GCC unroll 16
          for (int row = 0; row < rows; ++row) {
            Floats& total = totals[row][start + v];
            total = multiply_add(shift, broadcast(left[row].scaled_sum), total);
          }
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < rows; ++row) {
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) {
      store(sums + row * kPanelColumns + v * kLanes, totals[row][v]);
    }
  }
}

}  // namespace baton
