// The cached tokens that a unit of attention reads, a tile of 128 positions at a time.
#pragma once

#include <algorithm>
#include <utility>

#include "attention_plan.h"
#include "commands.h"
#include "kv_elements.h"
#include "tile.h"

namespace baton {

// A cached token's K and V of one head, or zeros for both.
template <class Kv>
struct CachedToken {
  const typename Kv::Element* key;
  const typename Kv::Element* value;
};

// Positions [low, end) of a block table.
struct Context {
  const int32_t* table;
  int64_t low, end;
};

// The tokens of a tile, and those of the next tile. The reader of a tile prefetches the next
// tile's tokens, a few with each token it reads: a core can wait for a few dozen cache lines at
// once, so more prefetches in a row would stall the computation.
template <class Kv>
class TileTokens {
 public:
  using Token = CachedToken<Kv>;

  // zeros: a head of zeros, which stands for missing tokens.
  explicit TileTokens(const typename Kv::Element* zeros) : zeros_{zeros, zeros} {
    for (Tile& tile : memory_) std::fill_n(tile.tokens, 2 * kTileTokens, zeros_);
  }

  // Tokens of the tile.
  const Token* now() const { return now_->tokens; }

  // Tokens of the next tile, followed by zeros for the indices that `num_fetched` may reach.
  const Token* next() const { return next_->tokens; }

  // Factors of the vectors of the tile's tokens, [kTileTokens], 0 for missing ones; without meaning
  // if the cache has none.
  const float* key_factors() const { return now_->key_factors; }
  const float* value_factors() const { return now_->value_factors; }

  // Tokens of the next tile to prefetch with each of the `num_tokens` that are read.
  int64_t num_fetched(int64_t num_tokens) const {
    return (num_next_ + num_tokens - 1) / num_tokens;
  }

  // Makes the tile that begins at position `tile` the next one. Tokens outside of the context are
  // zeros.
  void find_next(const PagedAttention& job, int64_t kv_head, const Context& context,
                 int64_t tile) {
    const int64_t first = std::max(tile, context.low);
    const int64_t stop = std::min(tile + kTileTokens, context.end);
    num_next_ = stop - tile;
    std::fill_n(next_->tokens, first - tile, zeros_);
    int64_t block = first / job.block_size, slot = first % job.block_size;
    for (int64_t position = first; position < stop; ++block, slot = 0) {
      const int64_t end = std::min(position + job.block_size - slot, stop);
      find_tokens(job, kv_head, context.table[block], slot, position - tile, end - tile);
      position = end;
    }
    const int64_t num_found = std::max(first, stop) - tile;
    std::fill(next_->tokens + num_found, next_->tokens + kTileTokens, zeros_);
    if constexpr (Kv::kHasFactors) {
      for (float* factors : {next_->key_factors, next_->value_factors}) {
        std::fill_n(factors, first - tile, 0.0f);
        std::fill(factors + num_found, factors + kTileTokens, 0.0f);
      }
    }
  }

  void find_none() { num_next_ = 0; }

  void advance() { std::swap(now_, next_); }

 private:
  struct Tile {
    Token tokens[2 * kTileTokens];
    float key_factors[kTileTokens], value_factors[kTileTokens];
  };

  // Tokens [begin, end) of the next tile, which lie in one block, from `slot` on.
  void find_tokens(const PagedAttention& job, int64_t kv_head, int64_t block, int64_t slot,
                   int64_t begin, int64_t end) {
    const auto* key = static_cast<const typename Kv::Element*>(job.cache) +
                      block * job.block_stride + kv_head * job.head_stride +
                      slot * job.slot_stride;
    for (int64_t token = begin; token < end; ++token, key += job.slot_stride) {
      next_->tokens[token] = {key, key + job.value_offset};
    }
    if constexpr (Kv::kHasFactors) {
      const float* factors = job.factors + block * job.factor_block_stride +
                             kv_head * job.factor_head_stride + slot;
      copy_factors(factors, end - begin, next_->key_factors + begin);
      copy_factors(factors + job.factor_value_offset, end - begin, next_->value_factors + begin);
    }
  }

  static void copy_factors(const float* from, int64_t count, float* to) {
    constexpr int64_t kBlock = 16;  // the usual size of a block: a call would take longer
    count == kBlock ? std::copy_n(from, kBlock, to) : std::copy_n(from, count, to);
  }

  const Token zeros_;
  Tile memory_[2];
  Tile* now_ = &memory_[0];
  Tile* next_ = &memory_[1];
  int64_t num_next_ = 0;
};

}  // namespace baton
