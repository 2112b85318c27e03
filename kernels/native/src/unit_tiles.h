// The tiles of cached tokens that a unit of attention reads, in order.
#pragma once

#include <algorithm>
#include <limits>

#include "attention_plan.h"

namespace baton {

class UnitTiles {
 public:
  // Tokens [first, last) of the unit, which attend to [low, end) of one block table.
  struct Part {
    int64_t first, last, low, end;
    bool is_shared;
  };

  struct Tile {
    Part part;
    int64_t start;
    bool is_first;
  };

  UnitTiles(const PagedAttention& job, const Plan& plan, const Unit& unit)
      : job_(job),
        tokens_(plan.tokens.data() + unit.first),
        num_tokens_(unit.last - unit.first),
        shared_end_(unit.shared_end) {
    if (unit.segment >= 0) {
      low_ = unit.segment * kSegmentTokens;
      end_ = low_ + kSegmentTokens;
    }
  }

  Tile first() const {
    const int64_t shared_end = std::min(shared_end_, end_);
    if (low_ >= shared_end) return first_of(part_after(0));
    return first_of({0, num_tokens_, low_, shared_end, true});
  }

  // False if the tile is the unit's last.
  bool advance(Tile& tile) const {
    if (tile.start + kTileTokens < tile.part.end) {
      tile = {tile.part, tile.start + kTileTokens, false};
      return true;
    }
    const int64_t done = tile.part.is_shared ? 0 : tile.part.last;
    if (done == num_tokens_) return false;
    tile = first_of(part_after(done));
    return true;
  }

 private:
  static Tile first_of(const Part& part) {
    return {part, part.low / kTileTokens * kTileTokens, true};
  }

  // The tokens of one sequence from `first` on, and the positions they attend to that the unit does
  // not share: none if all of these are shared, or lie in other units' segments.
  Part part_after(int64_t first) const {
    int64_t last = first + 1;
    while (last < num_tokens_ && tokens_[last].seq == tokens_[first].seq) ++last;
    int64_t low = std::max({lowest_seen(job_, tokens_[first].position), shared_end_, low_});
    int64_t end = std::min(tokens_[last - 1].position + 1, end_);
    if (low >= end) low = end = low / kTileTokens * kTileTokens;
    return {first, last, low, end, false};
  }

  const PagedAttention& job_;
  const QueryToken* const tokens_;
  const int64_t num_tokens_, shared_end_;
  int64_t low_ = 0, end_ = std::numeric_limits<int64_t>::max();
};

}  // namespace baton
