// The cached tokens that a unit of attention meets, a tile of 128 positions at a time.
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

// The tokens of a tile, and those of the tile after it, which whoever reads this one fetches
// from memory as he goes, some with each: a core waits for a few dozen lines at once, so more
// of them in a row would hold up the computing.
template <class E>
class TileTokens {
 public:
  using Token = CachedToken<E>;

  // `zeros`: a head's, read where there is no token.
  explicit TileTokens(const typename E::Stored* zeros) : zeros_{zeros, zeros} {
    std::fill(memory_[0], memory_[0] + 4 * kTileTokens, zeros_);
  }

  // Of the tile.
  const Token* now() const { return now_; }

  // Of the tile after it; zeros past its end, for as many as `num_fetched` leads to.
  const Token* next() const { return next_; }

  // How many tokens of the next tile to fetch with one, of the `num_tokens` that are read.
  int64_t num_fetched(int64_t num_tokens) const {
    return (num_next_ + num_tokens - 1) / num_tokens;
  }

  // The tile that begins at position `tile` comes next. What is outside of the context is zeros.
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
