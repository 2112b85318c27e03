// K and V of a tile of cached tokens as the panels of matrix products.
#pragma once

#include <type_traits>
#include <utility>

#include "cached_tokens.h"

namespace baton {

// Prefetches into the second-level cache, which can wait for more lines at once than the first.
template <class T>
inline void fetch(const T* line) {
  __builtin_prefetch(line, 0, 2);
}

// kLanes words of adjacent elements. The first `num_elements` are stored, the others 0.
template <class Kv>
inline __attribute__((always_inline)) Words key_words(const typename Kv::Element* from,
                                                      int64_t num_elements) {
  constexpr int64_t kElements = kLanes * Kv::kWordElements;
  if (num_elements >= kElements) return Kv::words(from);
  typename Kv::Element elements[kElements] = {};
  std::memcpy(elements, from, static_cast<size_t>(num_elements) * sizeof *from);
  return Kv::words(elements);
}

// K of kLanes tokens from `element` on, of which `num_elements` are stored: vector i has word i of
// each token.
template <class Kv>
inline __attribute__((always_inline)) void load_square(const CachedToken<Kv>* tokens,
                                                       int64_t element, int64_t num_elements,
                                                       Words (&square)[kLanes]) {
#pragma GCC unroll 16
  for (int lane = 0; lane < kLanes; ++lane) {
    square[lane] = key_words<Kv>(tokens[lane].key + element, num_elements);
  }
  transpose(square);
}

// The number of words of a whole square: a constant, so that its vectors stay in registers.
using WholeSquare = std::integral_constant<int64_t, kLanes>;

// Calls body(i) for each word of a square.
template <class Body>
inline __attribute__((always_inline)) void for_words(WholeSquare, const Body& body) {
#pragma GCC unroll 16
  for (int64_t i = 0; i < kLanes; ++i) body(i);
}

template <class Body>
inline void for_words(int64_t count, const Body& body) {
  for (int64_t i = 0; i < count; ++i) body(i);
}

// Calls body(element, num_words, square, fetch_next) with K of kLanes tokens of a tile that ends
// after `num_tokens`, from `first` on, square by square. It calls fetch_next(i) with each word i: a
// core can wait for a few dozen lines, so that loads behind many prefetches would wait for them.
template <class Kv, class Body>
inline __attribute__((always_inline)) void visit_squares(const TileTokens<Kv>& tokens,
                                                         int64_t first, int64_t num_tokens,
                                                         int64_t head_dim, const Body& body) {
  constexpr int64_t kElements = kLanes * Kv::kWordElements;
  const int64_t num_fetched = kLanes * tokens.num_fetched(round_up(num_tokens, kLanes));
  const CachedToken<Kv>* now = tokens.now() + first;
  const CachedToken<Kv>* next = tokens.next() + first / kLanes * num_fetched;
  for (int64_t element = 0; element < head_dim; element += kElements) {
    const auto fetch_next = [&](int64_t word) {
      for (int64_t i = word; i < num_fetched; i += kLanes) fetch(next[i].key + element);
    };
    Words square[kLanes];
    if (element + kElements <= head_dim) {
      load_square<Kv>(now, element, kElements, square);
      body(element, WholeSquare{}, square, fetch_next);
    } else {
      const int64_t num_elements = head_dim - element;
      const int64_t num_words = (num_elements + Kv::kWordElements - 1) / Kv::kWordElements;
      load_square<Kv>(now, element, num_elements, square);
      body(element, num_words, square, fetch_next);
      for (int64_t i = num_words; i < kLanes; ++i) fetch_next(i);
    }
  }
}

// K of 32 tokens, from `first` on, of a tile that ends after `num_tokens`: [head groups][32].
template <class Kv>
void pack_keys(const TileTokens<Kv>& tokens, int64_t first, int64_t num_tokens, int64_t head_dim,
               uint32_t* panel) {
  constexpr int64_t kStride = Kv::kWordElements / Kv::Product::kGroup * kPanelColumns;
  const int64_t end = std::min(first + kPanelColumns, num_tokens);
  for (; first < end; first += kLanes, panel += kLanes) {
    visit_squares(tokens, first, num_tokens, head_dim,
                  [&](int64_t element, auto num_words, const Words (&square)[kLanes],
                      const auto& fetch_next) {
                    uint32_t* to = panel + key_groups<Kv>(element) * kPanelColumns;
                    for_words(num_words, [&](int64_t i) {
                      fetch_next(i);
                      Kv::store_groups(to + i * kStride, square[i]);
                    });
                  });
  }
}

// scores[r][token] = sum of queries[group][r] * K[token][group], of a tile's first tokens. The sums
// are exact, so K is multiplied in the order in which it is read.
template <int rows>
void score_integers(const TileTokens<IntegerKv>& tokens, int64_t num_tokens, int64_t head_dim,
                    const uint32_t* queries, float* scores) {
  for (int64_t first = 0; first < num_tokens; first += kLanes) {
    Floats sums[rows][2] = {};  // of even groups and odd ones, so that more products are under way
    const auto multiply = [&](Words words, const uint32_t* operands)
        __attribute__((always_inline)) {
      const Int16::Columns even = IntegerKv::even_group(words), odd = IntegerKv::odd_group(words);
#pragma GCC unroll 16
      for (int row = 0; row < rows; ++row) {
        sums[row][0] = Int16::multiply_add(sums[row][0], even, operands[row]);
        sums[row][1] = Int16::multiply_add(sums[row][1], odd, operands[rows + row]);
      }
    };
    visit_squares(tokens, first, num_tokens, head_dim,
                  [&](int64_t element, auto num_words, const Words (&square)[kLanes],
                      const auto& fetch_next) {
                    const uint32_t* operands = queries + key_groups<IntegerKv>(element) * rows;
                    for_words(num_words, [&](int64_t i) {
                      fetch_next(i);
                      multiply(square[i], operands + 2 * rows * i);
                    });
                  });
#pragma GCC unroll 16
    for (int row = 0; row < rows; ++row) {
      store(scores + row * kTileTokens + first, (Masks)sums[row][0] + (Masks)sums[row][1]);
    }
  }
}

using IntegerScoreFunction = void (*)(const TileTokens<IntegerKv>&, int64_t, int64_t,
                                      const uint32_t*, float*);

template <int... counts>
inline IntegerScoreFunction integer_score_function(int rows,
                                                   std::integer_sequence<int, counts...>) {
  static constexpr IntegerScoreFunction functions[] = {score_integers<counts + 1>...};
  return functions[rows - 1];
}

// `score_integers` for 1 <= rows <= kTileRows.
inline IntegerScoreFunction integer_score_function(int rows) {
  return integer_score_function(rows, std::make_integer_sequence<int, kTileRows>{});
}

// One vector of the words that V of a group of tokens makes, by column of the head, of which the
// first `count` are stored; the others are 0.
template <class Kv>
inline __attribute__((always_inline)) Words value_words(const CachedToken<Kv>* tokens,
                                                        int64_t column, int64_t count) {
  const auto* even = tokens[0].value + column;
  const auto* odd = tokens[Kv::Product::kGroup - 1].value + column;
  if (count >= kLanes) return Kv::group_words(even, odd);
  typename Kv::Element rows[2][kLanes] = {};
  std::memcpy(rows[0], even, static_cast<size_t>(count) * sizeof *even);
  std::memcpy(rows[1], odd, static_cast<size_t>(count) * sizeof *odd);
  return Kv::group_words(rows[0], rows[1]);
}

// V of a tile's first tokens: [value_dim / 32][kTileTokens / kGroup][32], zero past value_dim.
template <class Kv>
void pack_values(const TileTokens<Kv>& tokens, int64_t num_tokens, int64_t value_dim,
                 uint32_t* panels) {
  constexpr int64_t kLine = 64 / sizeof(typename Kv::Element), kGroup = Kv::Product::kGroup;
  const int64_t num_fetched = kGroup * tokens.num_fetched(round_up(num_tokens, kGroup));
  const CachedToken<Kv>* now = tokens.now();
  const CachedToken<Kv>* next = tokens.next();
  for (int64_t group = 0; group * kGroup < num_tokens; ++group, now += kGroup) {
    for (int64_t column = 0; column < round_up(value_dim, kPanelColumns); column += kLanes) {
      uint32_t* to = panels + column % kPanelColumns +
                     (column / kPanelColumns * (kTileTokens / kGroup) + group) * kPanelColumns;
      const int64_t count = std::max<int64_t>(0, value_dim - column);
      store(to, value_words<Kv>(now, column, count));
    }
    for (int64_t i = 0; i < num_fetched; ++i, ++next) {
      for (int64_t element = 0; element < value_dim; element += kLine) fetch(next->value + element);
    }
  }
}

// A panel of V that is read from the cache without packing, which is faster if few rows use it.
// The width of V must be a whole number of panels.
template <class Kv>
class CachedValues {
 public:
  CachedValues(const TileTokens<Kv>& tokens, int64_t num_tokens, int64_t column)
      : now_(tokens.now()),
        next_(tokens.next()),
        num_fetched_(kGroup * tokens.num_fetched(round_up(num_tokens, kGroup))),
        column_(column) {}

  CachedValues from_column(int column) const {
    CachedValues panel = *this;
    panel.column_ += column;
    return panel;
  }

  // The same as `PackedPanel::next`.
  template <int vectors>
  void next(typename Kv::Product::Columns (&columns)[vectors]) {
    const auto* even = now_[0].value + column_;
    const auto* odd = now_[Kv::Product::kGroup - 1].value + column_;
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v += 2) {
      Kv::interleave(even + v * kLanes, odd + v * kLanes, columns[v], columns[v + 1]);
    }
    now_ += Kv::Product::kGroup;
    if (column_ % kLine) return;
    for (int64_t i = 0; i < num_fetched_; ++i, ++next_) fetch(next_->value + column_);
  }

 private:
  static constexpr int64_t kGroup = Kv::Product::kGroup;
  static constexpr int64_t kLine = 64 / sizeof(typename Kv::Element);

  const CachedToken<Kv>* now_;
  const CachedToken<Kv>* next_;
  int64_t num_fetched_;
  int64_t column_;
};

}  // namespace baton
