// Divides a step's attention into units of work.
//
// A unit is a set of query tokens and heads that share one KV head. The tokens are adjacent in
// a prompt, or are the last tokens of sequences that begin with the same cached blocks, which are
// then read and packed once for all of them.
//
// Each row attends to *segments* of positions by themselves, whose results are then merged in
// order: so a unit may have one segment, and all threads work on one long sequence.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "commands.h"

namespace baton {

constexpr int64_t kTileTokens = 128;  // cached tokens that are packed at once
constexpr int64_t kSegmentTokens = 2048;  // part of every result: never change it for speed

struct QueryToken {
  int64_t row;  // in the query
  int64_t seq;
  int64_t position;  // it attends to positions up to this one
};

// Query tokens [first, last) of the plan, for heads of one KV head. Positions before `shared_end`
// lie in the same cached blocks for all of the tokens. A unit of one segment leaves its rows in the
// partial results, from `first_partial` on; others have the segment -1.
struct Unit {
  int64_t first, last, first_head, num_heads, shared_end;
  int64_t segment = -1, first_partial = 0;
};

// Units [first, last) of the plan, which have the same rows and segments that follow each other.
struct Split {
  int64_t first, last;
};

struct Plan {
  std::vector<QueryToken> tokens;
  std::vector<Unit> units;
  std::vector<Split> splits;
  int64_t num_partials = 0;
};

// The first position that a token at `position` attends to.
inline int64_t lowest_seen(const PagedAttention& job, int64_t position) {
  return job.sliding_window ? std::max<int64_t>(0, position - job.sliding_window + 1) : 0;
}

Plan plan_attention(const PagedAttention& job, int num_threads);

}  // namespace baton
