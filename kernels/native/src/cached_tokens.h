// The cached tokens that a unit of attention reads, a tile of 128 positions at a time.
#pragma once

#include <algorithm>
#include <utility>

#include "attention_plan.h"
#include "commands.h"
#include "tile.h"

namespace baton {

// A cached token's K and V of one head, or zeros for both.
template <class E>
struct CachedToken {
  const typename E::Stored* key;
  const typename E::Stored* value;
};

// Positions [low, end) of a block table.
struct Context {
  const int32_t* table;
  int64_t low, end;
};

// The tokens of a tile, and those of the next tile. The reader of a tile prefetches the next
// tile's tokens, a few with each token it reads: a core can wait for a few dozen cache lines at
// once, so more prefetches in a row would stall the computation.
template <class E>
class TileTokens {
 public:
  using Token = CachedToken<E>;

  // zeros: a head of zeros, which stands for missing tokens.
  explicit TileTokens(const typename E::Stored* zeros) : zeros_{zeros, zeros} {
    std::fill(memory_[0], memory_[0] + 4 * kTileTokens, zeros_);
  }

  // Tokens of the tile.
  const Token* now() const { return now_; }

  // Tokens of the next tile, followed by zeros for the indices that `num_fetched` may reach.
  const Token* next() const { return next_; }

  // Tokens of the next tile to prefetch with each of the `num_tokens` that are read.
  int64_t num_fetched(int64_t num_tokens) const {
    return (num_next_ + num_tokens - 1) / num_tokens;
  }

  // Makes the tile that begins at position `tile` the next one. Tokens outside of the context are
  // zeros.
  void find_next(const PagedAttention& job, int64_t kv_head, const Context& context,
                 int64_t tile) {
    int64_t position = std::max(tile, context.low);
    const int64_t stop = std::min(tile + kTileTokens, context.end);
    num_next_ = stop - tile;
    Token* token = std::fill_n(next_, position - tile, zeros_);
    int64_t block = position / job.block_size, slot = position % job.block_size;
    for (; position < stop; ++block, slot = 0) {
      const auto* key = static_cast<const typename E::Stored*>(job.cache) +
                        context.table[block] * job.block_stride + kv_head * job.head_stride +
                        slot * job.slot_stride;
      for (; slot < job.block_size && position < stop; ++slot, ++position) {
        *token++ = {key, key + job.value_offset};
        key += job.slot_stride;
      }
    }
    std::fill(token, next_ + kTileTokens, zeros_);
  }

  void find_none() { num_next_ = 0; }

  void advance() { std::swap(now_, next_); }

 private:
  const Token zeros_;
  Token memory_[2][2 * kTileTokens];
  Token* now_ = memory_[0];
  Token* next_ = memory_[1];
  int64_t num_next_ = 0;
};

}  // namespace baton
