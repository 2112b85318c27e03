// How a step's attention is dealt out in units of work.
//
// A unit is some query tokens and the heads that share one KV head. The tokens are neighbours in
// a prompt, or the last ones of sequences that begin with the same cached blocks, which are then
// read and packed once for all of them.
#pragma once

#include <cstdint>
#include <vector>

#include "commands.h"

namespace baton {

constexpr int64_t kTileTokens = 128;  // cached ones that are packed at once

struct QueryToken {
  int64_t row;  // in the query
  int64_t seq;
  int64_t position;  // it sees those up to its own
};

// Query tokens [first, last) of the plan, for the heads of one KV head. What lies before
// `shared_end` is the same cached blocks for all of them.
struct Unit {
  int64_t first, last, kv_head, shared_end;
};

struct Plan {
  std::vector<QueryToken> tokens;
  std::vector<Unit> units;
};

Plan plan_attention(const PagedAttention& job, int num_threads);

}  // namespace baton
