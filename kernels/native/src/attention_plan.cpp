#include "attention_plan.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace baton {
namespace {

constexpr int64_t kFewestUnitRows = 48, kMostUnitRows = 384;
constexpr int64_t kUnitsPerThread = 4;  // so that all threads end at about the same time
constexpr int64_t kFewestHeads = 8;     // of a unit that has only some of a KV head's heads
constexpr int64_t kMostPartials = 8192;  // bounds the memory of units of one segment

// Divides a step into units of work.
class Planner {
 public:
  Planner(const PagedAttention& job, int num_threads)
      : job_(job), batch_(*job.batch), num_threads_(num_threads) {
    // Long units pack K and V less often; there must be enough of them for all threads.
    const int64_t group_heads = job.num_heads / job.num_kv_heads;
    const int64_t share = batch_.num_tokens * job.num_heads / (kUnitsPerThread * num_threads);
    tokens_per_unit_ =
        std::max<int64_t>(1, std::clamp(share, kFewestUnitRows, kMostUnitRows) / group_heads);
    // Each part of a KV head's heads packs its K and V again: only for threads without a unit.
    const int64_t num_units =
        std::max(batch_.num_seqs, batch_.num_tokens / tokens_per_unit_) * job.num_kv_heads *
        most_segments();
    const int64_t most_parts = std::max<int64_t>(1, group_heads / kFewestHeads);
    const int64_t num_parts =
        std::clamp<int64_t>(num_threads / std::max<int64_t>(1, num_units), 1, most_parts);
    heads_per_unit_ = (group_heads + num_parts - 1) / num_parts;
  }

  Plan plan() {
    for (int64_t seq = 0; seq < batch_.num_seqs; ++seq) {
      const int64_t query_len = batch_.query_starts[seq + 1] - batch_.query_starts[seq];
      if (query_len == 1 && !job_.sliding_window) {
        join(seq);
      } else {
        add_prompt(seq, query_len);
      }
    }
    for (const Sharers& sharers : groups_) add_sharers(sharers);
    divide_units();
    return std::move(plan_);
  }

 private:
  // Sequences of one query token each whose first tiles are the same blocks.
  struct Sharers {
    std::vector<int64_t> seqs;
    int64_t num_tiles;
  };

  // Later tokens attend to more positions: their units come first, so that the longest unit is not
  // the last.
  void add_prompt(int64_t seq, int64_t query_len) {
    for (int64_t end = query_len; end > 0; end -= tokens_per_unit_) {
      const auto first = static_cast<int64_t>(plan_.tokens.size());
      for (int64_t i = std::max<int64_t>(0, end - tokens_per_unit_); i < end; ++i) {
        add_token(seq, i, query_len);
      }
      add_units(first, 0);
    }
  }

  void join(int64_t seq) {
    for (auto sharers = groups_.rbegin(); sharers != groups_.rend(); ++sharers) {
      if (table(sharers->seqs[0])[0] != table(seq)[0]) continue;
      const int64_t num_tiles = std::min(common_tiles(sharers->seqs[0], seq), sharers->num_tiles);
      if (num_tiles == 0) break;
      sharers->seqs.push_back(seq);
      sharers->num_tiles = num_tiles;
      return;
    }
    groups_.push_back({{seq}, batch_.context_lens[seq] / kTileTokens});
  }

  void add_sharers(const Sharers& sharers) {
    const auto count = static_cast<int64_t>(sharers.seqs.size());
    for (int64_t begin = 0; begin < count; begin += tokens_per_unit_) {
      const auto first = static_cast<int64_t>(plan_.tokens.size());
      const int64_t end = std::min(begin + tokens_per_unit_, count);
      for (int64_t i = begin; i < end; ++i) add_token(sharers.seqs[i], 0, 1);
      add_units(first, end - begin > 1 ? sharers.num_tiles * kTileTokens : 0);
    }
  }

  void add_token(int64_t seq, int64_t index, int64_t query_len) {
    plan_.tokens.push_back({batch_.query_starts[seq] + index, seq,
                            batch_.context_lens[seq] - query_len + index});
  }

  void add_units(int64_t first, int64_t shared_end) {
    const auto last = static_cast<int64_t>(plan_.tokens.size());
    const int64_t group_heads = job_.num_heads / job_.num_kv_heads;
    for (int64_t group = 0; group < job_.num_heads; group += group_heads) {
      for (int64_t head = 0; head < group_heads; head += heads_per_unit_) {
        const int64_t num_heads = std::min(heads_per_unit_, group_heads - head);
        plan_.units.push_back({first, last, group + head, num_heads, shared_end});
      }
    }
  }

  // Segments of the last token with the most of them.
  int64_t most_segments() const {
    int64_t most = 1;
    for (int64_t seq = 0; seq < batch_.num_seqs; ++seq) {
      const int64_t position = batch_.context_lens[seq] - 1;
      const int64_t first = lowest_seen(job_, position) / kSegmentTokens;
      most = std::max(most, position / kSegmentTokens - first + 1);
    }
    return most;
  }

  // Makes a unit of each segment if there are too few units for the threads.
  void divide_units() {
    const auto num_units = static_cast<int64_t>(plan_.units.size());
    if (num_threads_ == 1 || 2 * num_units > kUnitsPerThread * num_threads_) return;
    for (const Unit& unit : std::exchange(plan_.units, {})) {
      const auto first = static_cast<int64_t>(plan_.units.size());
      const int64_t num_rows = (unit.last - unit.first) * unit.num_heads;
      const auto [low, high] = segments_of(unit);
      if (low == high || plan_.num_partials + (high - low + 1) * num_rows > kMostPartials) {
        plan_.units.push_back(unit);
        continue;
      }
      for (int64_t segment = low; segment <= high; ++segment) {
        plan_.units.push_back(unit);
        plan_.units.back().segment = segment;
        plan_.units.back().first_partial = plan_.num_partials;
        plan_.num_partials += num_rows;
      }
      plan_.splits.push_back({first, static_cast<int64_t>(plan_.units.size())});
    }
  }

  // The first and the last segment of any of a unit's tokens.
  std::pair<int64_t, int64_t> segments_of(const Unit& unit) const {
    int64_t low = std::numeric_limits<int64_t>::max(), high = 0;
    for (int64_t token = unit.first; token < unit.last; ++token) {
      const int64_t position = plan_.tokens[token].position;
      low = std::min(low, lowest_seen(job_, position) / kSegmentTokens);
      high = std::max(high, position / kSegmentTokens);
    }
    return {low, high};
  }

  const int32_t* table(int64_t seq) const {
    return batch_.block_tables + seq * batch_.table_stride;
  }

  // Whole tiles that both sequences attend to and store in the same blocks.
  int64_t common_tiles(int64_t a, int64_t b) const {
    const int64_t seen = std::min(batch_.context_lens[a], batch_.context_lens[b]);
    const int64_t num_blocks = (seen + job_.block_size - 1) / job_.block_size;
    const int64_t common =
        std::mismatch(table(a), table(a) + num_blocks, table(b)).first - table(a);
    return std::min(seen, common * job_.block_size) / kTileTokens;
  }

  const PagedAttention& job_;
  const Batch& batch_;
  const int num_threads_;
  int64_t tokens_per_unit_, heads_per_unit_;
  std::vector<Sharers> groups_;
  Plan plan_;
};

}  // namespace

Plan plan_attention(const PagedAttention& job, int num_threads) {
  return Planner(job, num_threads).plan();
}

}  // namespace baton
