// Products with weights that are decoded on the way.
//
// A chunk of a panel is decoded into the words of `multiply_tile`, which stay in the first-level
// cache, and multiplied with all rows of a block before the next chunk.
#include "exact.h"

#include <algorithm>

#include "values.h"

namespace baton {
namespace {

constexpr int kExactSquares = 4;            // of a chunk
constexpr int64_t kMostBlockRows = 256;     // whose sums are kept while a panel is read

template <class E>
constexpr int64_t square_groups() {
  return kSquareColumns / E::kGroup;
}

// Decodes `count` squares of a panel into words [groups][32].
template <class E, class F>
void decode_squares(const PanelStream& stream, int64_t first, int64_t count, uint32_t* words) {
  const PackedSquares<F> squares(stream);
  for (int64_t i = 0; i < count; ++i, words += square_groups<E>() * kPanelColumns) {
    squares.prefetch(first + i);
#pragma GCC unroll 8
    for (int v = 0; v < kPanelVectors; ++v) {
      const SquareValues<F> values(squares.at(first + i), v);
#pragma GCC unroll 8
      for (int word = 0; word < kSquareWords; ++word) {
        Floats columns[4];
        values.read(word, columns);
        E::store_groups(words + (word * 4 / E::kGroup) * kPanelColumns + v * kLanes, kPanelColumns,
                        columns);
      }
    }
  }
}

// Products with decoded weights; see `run_layers`.
template <class E>
struct Exact : FloatInputs<E> {
  using FloatInputs<E>::kMostRows;

  static void multiply(const Linear& job, const void* left, int64_t begin, int64_t end,
                       const uint32_t* after) {
    const auto* operands = static_cast<const typename E::Operand*>(left);
    const auto* weight = reinterpret_cast<const uint8_t*>(job.weight);
    const int64_t num_bytes = geometry_of(job.format).panel_bytes(job.in_features);
    const Tiling tiling(job.num_rows, kMostRows);
    const int64_t block_tiles =
        std::min(FloatInputs<E>::block_tiles(job), kMostBlockRows / kMostRows);
    for (int64_t first = 0; first < tiling.num_tiles; first += block_tiles) {
      const int64_t last = std::min(first + block_tiles, tiling.num_tiles);
      for (int64_t panel = begin; panel < end; ++panel) {
        const uint8_t* words = weight + panel * num_bytes;
        const auto* next = panel + 1 == end ? reinterpret_cast<const uint8_t*>(after)
                                            : words + num_bytes;
        multiply_block(job, operands, {words, next, num_bytes}, tiling, first, last, panel);
      }
    }
  }

 private:
  using Decode = void (*)(const PanelStream&, int64_t, int64_t, uint32_t*);

  static Decode decoder(Format format) {
    return with_policy(format, [](auto policy) -> Decode {
      return decode_squares<E, decltype(policy)>;
    });
  }

  // Multiplies tiles first to last with one panel.
  static void multiply_block(const Linear& job, const typename E::Operand* operands,
                             const PanelStream& stream, const Tiling& tiling, int64_t first,
                             int64_t last, int64_t panel) {
    static constexpr Ones kOnes;
    const Decode decode = decoder(job.format);
    const int64_t num_groups = groups_of<E>(job.in_features);
    const int64_t first_row = tiling.start(first);
    alignas(64) float sums[kMostBlockRows * kPanelColumns];
    alignas(64) uint32_t words[kExactSquares * square_groups<E>() * kPanelColumns];
    for (int64_t group = 0, square = 0; group < num_groups;
         group += kExactSquares * square_groups<E>(), square += kExactSquares) {
      const int64_t count = std::min(kExactSquares * square_groups<E>(), num_groups - group);
      decode(stream, square, (count + square_groups<E>() - 1) / square_groups<E>(), words);
      for (int64_t tile = first; tile < last; ++tile) {
        const int64_t start = tiling.start(tile);
        const int rows = tiling.rows(tile);
        tile_function<E, PackedPanel<E>, kPackedRows, 1>(rows)(
            operands + start * num_groups + group * rows, PackedPanel<E>(words), count,
            sums + (start - first_row) * kPanelColumns, kPanelColumns,
            group ? kOnes.values : nullptr);
      }
    }
    const Epilogue<E> finish(job);
    finish(sums, first_row, static_cast<int>(tiling.start(last) - first_row), panel);
  }

  // Factors of sums that are continued.
  struct Ones {
    float values[kTileRows];
    constexpr Ones() : values() {
      for (float& value : values) value = 1.0f;
    }
  };
};

}  // namespace

void run_exact(ElementType element, const Layers& layers, Workers& workers) {
  element == ElementType::kBfloat16 ? run_layers<Exact<Bfloat16>>(layers, workers)
                                    : run_layers<Exact<Float32>>(layers, workers);
}

}  // namespace baton
