// Softmax over keys that are processed tile by tile (arXiv:2205.14135).
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention_plan.h"
#include "integer_operands.h"
#include "row_states.h"
#include "tile.h"

namespace baton {

constexpr float kLog2E = 1.44269504f;

struct TileIndices {
  alignas(64) float values[kTileTokens];
  constexpr TileIndices() : values() {
    for (int i = 0; i < kTileTokens; ++i) values[i] = static_cast<float>(i);
  }
};
constexpr TileIndices kTileIndices;

// The tokens of a tile, among those before `width`, that a row attends to: [low, high].
struct AttendedRange {
  int64_t low, high;
};

// Masks the tokens that a row does not attend to; returns the largest of the rest, by lane.
inline Floats larger_scores(const AttendedRange& attended, int64_t width, float* scores) {
  if (attended.low > 0 || attended.high + 1 < width) {
    const Floats low = broadcast(static_cast<float>(attended.low));
    const Floats high = broadcast(static_cast<float>(attended.high));
    for (int64_t i = 0; i < width; i += kLanes) {
      const Floats index = load<Floats>(kTileIndices.values + i);
      const Masks seen = (index >= low) & (index <= high);
      store(scores + i, select(seen, load<Floats>(scores + i), broadcast(-__builtin_inff())));
    }
  }
  Floats best = load<Floats>(scores);
  for (int64_t i = kLanes; i < width; i += kLanes) best = larger(load<Floats>(scores + i), best);
  return best;
}

// Multiplies the first `width` of a tile's scores [rows][kTileTokens], maybe integers, by the
// factors of its keys and of rows.
template <class P>
void scale_scores(int rows, int64_t width, const float* key_factors, const float* row_factors,
                  float* scores) {
  for (int row = 0; row < rows; ++row, scores += kTileTokens) {
    for (int64_t i = 0; i < width; i += kLanes) {
      Floats score = load<Floats>(scores + i);
      if constexpr (std::is_same_v<P, Int16>) {
        score = __builtin_convertvector((Masks)score, Floats) * broadcast(row_factors[row]);
      }
      store(scores + i, score * load<Floats>(key_factors + i));
    }
  }
}

// Multiplies the first `width` of a tile's scores [rows][kTileTokens] by `scale`, and caps them.
inline void cap_scores(int rows, int64_t width, float scale, float cap, float* scores) {
  for (int row = 0; row < rows; ++row, scores += kTileTokens) {
    for (int64_t i = 0; i < width; i += kLanes) {
      store(scores + i, capped(load<Floats>(scores + i) * broadcast(scale), cap));
    }
  }
}

// outputs[r] = outputs[r] * factors[r] + sums[r] * shares[r], of a panel of integer sums [rows][32]
inline void add_integers(int rows, const float* sums, const float* factors, const float* shares,
                         float* outputs, int64_t stride) {
  for (int row = 0; row < rows; ++row, outputs += stride, sums += kPanelColumns) {
    for (int64_t i = 0; i < kPanelColumns; i += kLanes) {
      const Floats sum = __builtin_convertvector(load<Masks>(sums + i), Floats);
      const Floats former = load<Floats>(outputs + i) * broadcast(factors[row]);
      store(outputs + i, former + sum * broadcast(shares[row]));
    }
  }
}

// Counts a score without a value, before the scores of keys.
inline void add_sink(const RowStates& states, int64_t row, float score) {
  states.maxima[row] = std::max(score * kLog2E, RowStates::kLowest);
  states.sums[row * kLanes] = 1.0f;
}

// Turns a tile's scores [rows][kTileTokens], of which the first `width` count, into weights as
// operands, for rows from `first` on; factors[r] rescales the sums of row r to its new maximum.
// range_of(r): what row r attends to.
// value_factors: of the tile's tokens, by which the operands are multiplied; or null.
// shares: factors of rows of operands that are integers.
template <class P, class RangeOf>
void weigh(const RowStates& states, int64_t first, int rows, int64_t width, float scale,
           const RangeOf& range_of, const float* value_factors, float* scores,
           typename P::Operand* weights, float* factors, float* shares) {
  Floats largest[kTileRows];
  for (int row = 0; row < rows; ++row) {
    largest[row] = larger_scores(range_of(first + row), width, scores + row * kTileTokens);
  }
  alignas(64) float tops[kLanes] = {};
  std::copy_n(states.maxima + first, rows, tops);
  const Floats former = load<Floats>(tops);
  const Floats now = larger(maxima_of(largest, rows) * broadcast(scale), former);
  store(factors, exp2_of_negative(former - now));
  store(tops, now);
  std::copy_n(tops, rows, states.maxima + first);
  for (int row = 0; row < rows; ++row) {
    Floats total{};
    Masks largest_bits{};
    typename P::Operand* operands = weights + row * (kTileTokens / P::kGroup);
    for (int64_t i = 0; i < width; i += kLanes) {
      const Floats score = load<Floats>(scores + row * kTileTokens + i);
      const Floats weight = exp2_of_negative(score * broadcast(scale) - broadcast(tops[row]));
      total += weight;
      const Floats operand =
          value_factors ? weight * load<Floats>(value_factors + i) : weight;
      if constexpr (std::is_same_v<P, Int16>) {
        store(scores + row * kTileTokens + i, operand);
        largest_bits = larger_magnitudes(largest_bits, operand);
      } else {
        P::store_operands(operands, i, operand);
      }
    }
    if constexpr (std::is_same_v<P, Int16>) {
      shares[row] = Int16::factor_of(largest_lane(largest_bits));
      const Floats scaling = broadcast(1.0f / shares[row]);
      for (int64_t i = 0; i < width; i += kLanes) {
        const Floats operand = load<Floats>(scores + row * kTileTokens + i);
        P::store_operands(operands, i, operand * scaling);
      }
    }
    float* sum = states.sums + (first + row) * kLanes;
    store(sum, load<Floats>(sum) * broadcast(factors[row]) + total);
  }
}

}  // namespace baton
