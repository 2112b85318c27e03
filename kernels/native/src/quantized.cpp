// Products of int8 activations and codes.
//
// Each row of activations is rounded to int8, with a scale per 16 or 32 columns; see row_blocks.h.
// A few rows unpack a panel's codes in registers. For many rows, codes are unpacked once per block
// of rows. Both compute the same integer products and the same float operations in the same order,
// so the bits of a row's result depend on the row and the weight alone.
#include "quantized.h"

#include <algorithm>
#include <cstring>

#include "int8_tile.h"

namespace baton {
namespace {

// Rows from which on codes are unpacked once, as measured on Zen 4. Without AVX-512 there are too
// few registers to do it beside the products.
template <class F>
constexpr int64_t unpack_from_rows() {
#if defined(__AVX512F__)
  return F::kBits == 6 ? 24 : INT64_MAX;
#else
  return F::kBits == 4 ? 12 : 8;
#endif
}

constexpr int64_t kMostBlockRows = 128;  // whose sums are kept while a panel is read

constexpr int64_t squares_of(int64_t num_columns) {
  return (num_columns + kSquareColumns - 1) / kSquareColumns;
}

// Rounds 32 columns of a row; those past `count` are zeros.
template <class E>
void quantize_columns(const typename E::Stored* from, int64_t count, CodeOffset offset,
                      RowBlock* out) {
  typename E::Stored last[kSquareColumns] = {};
  if (count < kSquareColumns) {
    std::memcpy(last, from, static_cast<size_t>(count) * sizeof *from);
    from = last;
  }
  Floats values[kSquareColumns / kLanes];
  for (int i = 0; i < kSquareColumns / kLanes; ++i) values[i] = E::widen_lanes(from + i * kLanes);
  quantize_block(values, offset, out);
}

template <class Squares, int... counts>
void multiply_rows(const Squares& squares, int64_t first, int64_t count, const RowBlock* left,
                   int rows, float* sums, std::integer_sequence<int, counts...>) {
  using Function = void (*)(const Squares&, int64_t, int64_t, const RowBlock*, float*);
  static constexpr Function functions[] = {multiply_squares<Squares, counts + 1>...};
  functions[rows - 1](squares, first, count, left, sums);
}

// `multiply_squares` for 1 <= rows <= kInt8TileRows.
template <class Squares>
void multiply_rows(const Squares& squares, int64_t first, int64_t count, const RowBlock* left,
                   int rows, float* sums) {
  multiply_rows(squares, first, count, left, rows, sums,
                std::make_integer_sequence<int, kInt8TileRows>{});
}

// Products with weights in the format of policy F; a kernel of `run_layers`.
template <class F, class E>
struct Quantized {
  static constexpr int64_t kMostRows = kInt8TileRows;

  static int64_t left_bytes(const Linear& job, int64_t num_rows) {
    return num_rows * squares_of(job.in_features) * static_cast<int64_t>(sizeof(RowBlock));
  }

  static void prepare(const Linear& job, const int32_t* rows, int64_t start, int count,
                      void* left) {
    auto* out = static_cast<RowBlock*>(left);
    const auto* input = static_cast<const typename E::Stored*>(job.input);
    for (int row = 0; row < count; ++row) {
      const int64_t number = rows ? rows[start + row] : start + row;
      const auto* elements = input + number * job.input_stride;
      for (int64_t block = 0; block < squares_of(job.in_features); ++block) {
        const int64_t column = block * kSquareColumns;
        quantize_columns<E>(elements + column,
                            std::min<int64_t>(kSquareColumns, job.in_features - column),
                            {F::kOffset, F::kParts == 2}, out + block * count + row);
      }
    }
  }

  static void multiply(const Linear& job, const void* left, int64_t begin, int64_t end,
                       const uint32_t* after) {
    const Tiling tiling(job.num_rows, kMostRows);
    const int64_t num_bytes = F::kGeometry.panel_bytes(job.in_features);
    const int64_t block_tiles = std::clamp<int64_t>(kBlockBytes / left_bytes(job, kMostRows), 2,
                                                    kMostBlockRows / kMostRows);
    const auto* weight = reinterpret_cast<const uint8_t*>(job.weight);
    for (int64_t first = 0; first < tiling.num_tiles; first += block_tiles) {
      const int64_t last = std::min(first + block_tiles, tiling.num_tiles);
      for (int64_t number = begin; number < end; ++number) {
        const uint8_t* panel = weight + number * num_bytes;
        const uint8_t* next = number + 1 < end ? panel + num_bytes
                                               : reinterpret_cast<const uint8_t*>(after);
        const PackedSquares<F> squares({panel, next, num_bytes});
        multiply_panel(job, static_cast<const RowBlock*>(left), {tiling, first, last}, squares,
                       number);
      }
    }
  }

 private:
  // Some of the tiles of a layer's rows.
  struct Tiles {
    const Tiling& tiling;
    int64_t first, last;
  };

  static void multiply_panel(const Linear& job, const RowBlock* left, const Tiles& tiles,
                             const PackedSquares<F>& squares, int64_t number) {
    const int64_t start = tiles.tiling.start(tiles.first);
    const int64_t num_rows = tiles.tiling.start(tiles.last) - start;
    alignas(64) float sums[kMostBlockRows * kPanelColumns];
    std::fill_n(sums, num_rows * kPanelColumns, 0.0f);
    if (job.num_rows < unpack_from_rows<F>()) {
      multiply_packed(job, left, tiles, squares, sums);
    } else {
      multiply_unpacked(job, left, tiles, squares, sums);
    }
    const Epilogue<E, Float32> finish(job);
    finish(sums, start, static_cast<int>(num_rows), number);
  }

  static void multiply_packed(const Linear& job, const RowBlock* left, const Tiles& tiles,
                              PackedSquares<F> squares, float* sums) {
    const int64_t num_squares = squares_of(job.in_features);
    for (int64_t tile = tiles.first; tile < tiles.last; ++tile) {
      const int rows = tiles.tiling.rows(tile);
      multiply_rows(squares, 0, num_squares, left + tiles.tiling.start(tile) * num_squares, rows,
                    sums);
      squares = squares.without_prefetch();
      sums += rows * kPanelColumns;
    }
  }

  static void multiply_unpacked(const Linear& job, const RowBlock* left, const Tiles& tiles,
                                const PackedSquares<F>& squares, float* sums) {
    const int64_t num_squares = squares_of(job.in_features);
    Chunk chunk;
    for (int64_t first = 0; first < num_squares; first += kChunkSquares) {
      const int64_t count = std::min<int64_t>(kChunkSquares, num_squares - first);
      unpack(squares, first, count, chunk);
      float* sums_of_tile = sums;
      for (int64_t tile = tiles.first; tile < tiles.last; ++tile) {
        const int rows = tiles.tiling.rows(tile);
        const int64_t block = tiles.tiling.start(tile) * num_squares + first * rows;
        multiply_rows(UnpackedSquares<F>(chunk), 0, count, left + block, rows, sums_of_tile);
        sums_of_tile += rows * kPanelColumns;
      }
    }
  }
};

template <class F>
void run_format(ElementType element, const Layers& layers, Workers& workers) {
  element == ElementType::kBfloat16 ? run_layers<Quantized<F, Bfloat16>>(layers, workers)
                                    : run_layers<Quantized<F, Float32>>(layers, workers);
}

}  // namespace

void run_quantized(ElementType element, const Layers& layers, Workers& workers) {
  if (layers.empty()) return;
  switch (layers[0].layer.format) {
    case Format::kQ8_0: return run_format<Q8_0>(element, layers, workers);
    case Format::kQ4_0: return run_format<Q4_0>(element, layers, workers);
    case Format::kQ4_1: return run_format<Q4_1>(element, layers, workers);
    case Format::kQ5_0: return run_format<Q5_0>(element, layers, workers);
    case Format::kQ5_1: return run_format<Q5_1>(element, layers, workers);
    case Format::kQ4_K: return run_format<Q4_K>(element, layers, workers);
    case Format::kQ5_K: return run_format<Q5_K>(element, layers, workers);
    case Format::kQ6_K: return run_format<Q6_K>(element, layers, workers);
    case Format::kMxfp4: return run_format<Mxfp4>(element, layers, workers);
    case Format::kInt8: return run_format<Int8>(element, layers, workers);
    case Format::kInt8_32: return run_format<Int8_32>(element, layers, workers);
    case Format::kInt8_128: return run_format<Int8_128>(element, layers, workers);
    case Format::kInt4_32: return run_format<Int4_32>(element, layers, workers);
    case Format::kInt4_128: return run_format<Int4_128>(element, layers, workers);
    case Format::kDense:
    case Format::kFp8:
    case Format::kFp8_128: return;  // have no codes of integers
  }
}

}  // namespace baton
