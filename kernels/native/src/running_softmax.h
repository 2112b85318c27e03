// Softmax over keys that come tile by tile (arXiv:2205.14135).
#pragma once

#include <algorithm>

#include "attention_plan.h"
#include "tile.h"

namespace baton {

constexpr float kLog2E = 1.44269504f;
constexpr float kLowest = -1e30f;  // stands for -inf where a difference must not be NaN

struct TileIndices {
  alignas(64) float values[kTileTokens];
  constexpr TileIndices() : values() {
    for (int i = 0; i < kTileTokens; ++i) values[i] = static_cast<float>(i);
  }
};
constexpr TileIndices kTileIndices;

// Which tokens of a tile, of those before `width`, a row sees: [low, high].
struct Sight {
  int64_t low, high;
};

// Hides what a row does not see; returns the largest of what is left, by lane.
inline Floats larger_scores(const Sight& sight, int64_t width, float* scores) {
  if (sight.low > 0 || sight.high + 1 < width) {
    const Floats low = broadcast(static_cast<float>(sight.low));
    const Floats high = broadcast(static_cast<float>(sight.high));
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

// What rows have summed so far. Scores are scaled to base 2.
template <class E>
struct RunningSoftmax {
  float* maxima;  // [rows]
  float* sums;    // [rows][kLanes]: of the weights, to be added up

  void begin(int64_t rows) {
    std::fill(maxima, maxima + rows, kLowest);
    std::fill(sums, sums + rows * kLanes, 0.0f);
  }

  // From a tile's scores [rows][kTileTokens], of which `width` count, to weights of as many
  // operands, for rows from `first` on; factors[r] brings what row r has summed to its new
  // maximum. sight(r): see `Sight`.
  template <class SightOf>
  void weigh(int64_t first, int rows, int64_t width, float scale, const SightOf& sight,
             float* scores, typename E::Operand* weights, float* factors) {
    Floats largest[kTileRows];
    for (int row = 0; row < rows; ++row) {
      largest[row] = larger_scores(sight(first + row), width, scores + row * kTileTokens);
    }
    alignas(64) float tops[kLanes] = {};
    std::copy_n(maxima + first, rows, tops);
    const Floats former = load<Floats>(tops);
    const Floats now = larger(maxima_of(largest, rows) * broadcast(scale), former);
    store(factors, exp2_of_negative(former - now));
    store(tops, now);
    std::copy_n(tops, rows, maxima + first);
    for (int row = 0; row < rows; ++row) {
      Floats total{};
      for (int64_t i = 0; i < width; i += kLanes) {
        const Floats score = load<Floats>(scores + row * kTileTokens + i);
        const Floats weight = exp2_of_negative(score * broadcast(scale) - broadcast(tops[row]));
        total += weight;
        E::store_operands(weights + row * (kTileTokens / E::kGroup), i, weight);
      }
      float* sum = sums + (first + row) * kLanes;
      store(sum, load<Floats>(sum) * broadcast(factors[row]) + total);
    }
  }
};

}  // namespace baton
