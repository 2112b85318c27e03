// One sequence's tokens of a step, and the slots that hold its state.
#pragma once

#include <algorithm>

#include "commands.h"

namespace baton {

// Positions [start, end) of a sequence, by the rule of kernels.LayerState.
struct SequenceSpan {
  SequenceSpan(const Batch& batch, int64_t sequence, int64_t tokens_per_block)
      : table(batch.block_tables + sequence * batch.table_stride), block_size(tokens_per_block),
        first_row(batch.query_starts[sequence]), end(batch.context_lens[sequence]),
        start(end - (batch.query_starts[sequence + 1] - first_row)),
        kept_end(end - (batch.num_unkept ? batch.num_unkept[sequence] : 0)) {}

  // The slot of the state before the first token; -1: the state is 0.
  int64_t source() const { return start ? table[(start - 1) / block_size] : -1; }

  // The slot that the state after the token at `position` is stored into; -1 for none.
  int64_t target(int64_t position) const {
    const int64_t next = position + 1;
    const bool is_kept = next == kept_end || (next < kept_end && next % block_size == 0);
    return is_kept ? table[position / block_size] : -1;
  }

  // The next position after `position` at which a state may be stored, or the end; at most
  // `max_tokens` further.
  int64_t next_stop(int64_t position, int64_t max_tokens) const {
    const int64_t block_end = (position / block_size + 1) * block_size;
    const int64_t stop = std::min({position + max_tokens, block_end, end});
    return position < kept_end ? std::min(stop, kept_end) : stop;
  }

  const int32_t* table;
  int64_t block_size, first_row, end, start, kept_end;
};

}  // namespace baton
