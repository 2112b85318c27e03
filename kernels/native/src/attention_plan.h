// Divides a step's attention into units of work.
//
// A unit is a set of query tokens and heads that share one KV head. The tokens are adjacent in
// a prompt, or are the last tokens of sequences that begin with the same cached blocks, which are
// then read and packed once for all of them.
#pragma once

#include <cstdint>
#include <vector>

#include "commands.h"

namespace baton {

constexpr int64_t kTileTokens = 128;  // cached tokens that are packed at once

struct QueryToken {
  int64_t row;  // in the query
  int64_t seq;
  int64_t position;  // it attends to positions up to this one
};

// Query tokens [first, last) of the plan, for heads of one KV head. Positions before `shared_end`
// lie in the same cached blocks for all of the tokens.
struct Unit {
  int64_t first, last, first_head, num_heads, shared_end;
};

struct Plan {
  std::vector<QueryToken> tokens;
  std::vector<Unit> units;
};

Plan plan_attention(const PagedAttention& job, int num_threads);

}  // namespace baton
