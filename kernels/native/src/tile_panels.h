// K and V of a tile of cached tokens as the panels of matrix products.
#pragma once

#include "cached_tokens.h"

namespace baton {

// Prefetches into the second-level cache, which can wait for more lines at once than the first.
template <class T>
inline void fetch(const T* line) {
  __builtin_prefetch(line, 0, 2);
}

// Loads a vector whose first `count` elements are those at `from`; the others are zero.
template <class V, class T>
inline __attribute__((always_inline)) V load_part(const T* from, int64_t count) {
  if (count * sizeof(T) == sizeof(V)) return load<V>(from);
  V values{};
  std::memcpy(&values, from, static_cast<size_t>(count) * sizeof(T));
  return values;
}

template <class E>
inline __attribute__((always_inline)) void pack_square(const CachedToken<E>* tokens,
                                                       int64_t group, int64_t num_groups,
                                                       uint32_t* to) {
  Words square[kLanes];
#pragma GCC unroll 16
  for (int lane = 0; lane < kLanes; ++lane) {
    square[lane] = load_part<Words>(tokens[lane].key + group * E::kGroup, num_groups * E::kGroup);
  }
  transpose(square);
  for (int64_t i = 0; i < num_groups; ++i) store(to + i * kPanelColumns, square[i]);
}

// K of 32 tokens, from `first` on, of a tile that ends after `num_tokens`: [head groups][32].
template <class E>
void pack_keys(const TileTokens<E>& tokens, int64_t first, int64_t num_tokens,
               int64_t head_groups, uint32_t* panel) {
  const int64_t end = std::min(first + kPanelColumns, num_tokens);
  const int64_t num_fetched = kLanes * tokens.num_fetched(round_up(num_tokens, kLanes));
  for (; first < end; first += kLanes, panel += kLanes) {
    const CachedToken<E>* next = tokens.next() + first / kLanes * num_fetched;
    for (int64_t group = 0; group < head_groups; group += kLanes) {
      for (int64_t i = 0; i < num_fetched; ++i) fetch(next[i].key + group * E::kGroup);
      const CachedToken<E>* now = tokens.now() + first;
      uint32_t* to = panel + group * kPanelColumns;
      if (group + kLanes <= head_groups) {
        pack_square<E>(now, group, kLanes, to);
      } else {
        pack_square<E>(now, group, head_groups - group, to);
      }
    }
  }
}

// One vector of the words that V of a group of tokens makes, by column of the head.
template <class E>
inline __attribute__((always_inline)) Words value_words(const CachedToken<E>* tokens,
                                                        int64_t column, int64_t count) {
  typedef typename E::Stored Elements
      __attribute__((vector_size(kLanes * sizeof(typename E::Stored))));
  const auto first = load_part<Elements>(tokens[0].value + column, count);
  if constexpr (E::kGroup == 1) {
    return (Words)first;
  } else {
    const auto second = load_part<Elements>(tokens[1].value + column, count);
    return __builtin_convertvector(first, Words) | __builtin_convertvector(second, Words) << 16;
  }
}

// V of a tile's first tokens: [value_dim / 32][kTileTokens / kGroup][32], zero past value_dim.
template <class E>
void pack_values(const TileTokens<E>& tokens, int64_t num_tokens, int64_t value_dim,
                 uint32_t* panels) {
  constexpr int64_t kLine = 64 / sizeof(typename E::Stored);
  const int64_t num_fetched = E::kGroup * tokens.num_fetched(round_up(num_tokens, E::kGroup));
  const CachedToken<E>* now = tokens.now();
  const CachedToken<E>* next = tokens.next();
  for (int64_t group = 0; group * E::kGroup < num_tokens; ++group, now += E::kGroup) {
    for (int64_t column = 0; column < round_up(value_dim, kPanelColumns); column += kLanes) {
      uint32_t* to = panels + column % kPanelColumns +
                     (column / kPanelColumns * (kTileTokens / E::kGroup) + group) * kPanelColumns;
      if (column + kLanes <= value_dim) {
        store(to, value_words<E>(now, column, kLanes));
      } else {
        store(to, value_words<E>(now, column, std::max<int64_t>(0, value_dim - column)));
      }
    }
    for (int64_t i = 0; i < num_fetched; ++i, ++next) {
      for (int64_t element = 0; element < value_dim; element += kLine) fetch(next->value + element);
    }
  }
}

// A panel of V that is read from the cache without packing, which is faster if few rows use it.
// The width of V must be a whole number of panels.
template <class E>
class CachedValues {
 public:
  CachedValues(const TileTokens<E>& tokens, int64_t num_tokens, int64_t column)
      : now_(tokens.now()),
        next_(tokens.next()),
        num_fetched_(E::kGroup * tokens.num_fetched(round_up(num_tokens, E::kGroup))),
        column_(column) {}

  CachedValues from_column(int column) const {
    CachedValues panel = *this;
    panel.column_ += column;
    return panel;
  }

  // The same as `PackedPanel::next`.
  template <int vectors>
  void next(typename E::Columns (&columns)[vectors]) {
    const auto* even = now_[0].value + column_;
    const auto* odd = now_[E::kGroup - 1].value + column_;
#pragma GCC unroll 2
    for (int v = 0; v < vectors; v += 2) {
      E::interleave(even + v * kLanes, odd + v * kLanes, columns[v], columns[v + 1]);
    }
    now_ += E::kGroup;
    for (int64_t i = 0; i < num_fetched_; ++i, ++next_) fetch(next_->value + column_);
  }

 private:
  const CachedToken<E>* now_;
  const CachedToken<E>* next_;
  int64_t num_fetched_;
  int64_t column_;
};

}  // namespace baton
