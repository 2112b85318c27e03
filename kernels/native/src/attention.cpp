// Causal attention over paged KV: the same code for prompts, chunks and single tokens.
//
// The rows of a unit of work (see attention_plan.h) process tiles of 128 cached tokens one by
// one. Tiles begin at multiples of 128 of a sequence's positions, so a token's result depends
// neither on the chunk it was computed in nor on other sequences.
#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <type_traits>
#include <vector>

#include "attention_plan.h"
#include "cached_tokens.h"
#include "commands.h"
#include "lanes.h"
#include "query_operands.h"
#include "running_softmax.h"
#include "tile.h"
#include "tile_panels.h"
#include "unit_groups.h"
#include "unit_tiles.h"

namespace baton {
namespace {

static_assert(kTileRows <= kLanes && kTileTokens % kPanelColumns == 0);

template <class E, class Kv>
class UnitAttention {
 public:
  using Stored = typename E::Stored;
  using Product = typename Kv::Product;
  using Operand = typename Product::Operand;
  static constexpr bool kIsInteger = std::is_same_v<Product, Int16>;

  // Without memory the object can only find tokens.
  UnitAttention(const PagedAttention& job, const Plan& plan, const Unit& unit)
      : job_(job),
        batch_(*job.batch),
        unit_(unit),
        query_tokens_(plan.tokens.data() + unit.first),
        num_query_tokens_(unit.last - unit.first),
        group_heads_(unit.num_heads),
        num_rows_(num_query_tokens_ * group_heads_),
        head_groups_(key_groups<Kv>(job.head_dim)),
        width_(round_up(job.value_dim, kPanelColumns)),
        has_merged_(unit.segment < 0 && has_several_segments()),
        tiles_(job, plan, unit) {}

  // memory: `memory_bytes` of the unit's own, and `tile_bytes` that units in turn may share.
  // partials: rows of the units of one segment.
  UnitAttention(const PagedAttention& job, const Plan& plan, const Unit& unit, char* memory,
                char* tile_memory, const RowStates& partials)
      : UnitAttention(job, plan, unit) {
    if (unit.segment >= 0) states_ = partials.from(unit.first_partial);
    place_memory(memory, tile_memory);
  }

  int64_t memory_bytes() const {
    const int64_t query_bytes = static_cast<int64_t>(sizeof(Operand)) * num_rows_ * head_groups_;
    return round_up(
        2 * RowStates::num_bytes(num_rows_, width_) + 12 * num_rows_ + query_bytes + 64 * 5, 64);
  }

  int64_t tile_bytes() const {
    const int64_t weight_bytes = static_cast<int64_t>(sizeof(Operand)) * kTileRows * kTokenGroups;
    return round_up(
        4 * kTileTokens * (width_ + head_groups_ + kTileRows) + weight_bytes + 64 * 4, 64);
  }

  // Units that read the same tiles, each of another KV head, may be computed together.
  bool has_few_rows() const { return num_rows_ <= kTileRows; }

  void find_first_tile(TileTokens<Kv>& tokens) const { find(tiles_.first(), tokens); }

  // Computes units of the same tokens tile by tile: the heads of a block lie side by side, so that
  // memory is read in longer runs. Expects the first unit's first tile in `tokens`, and leaves the
  // first tile of unit `after` there.
  template <class Units>
  static void run(Units& units, int count, TileTokens<Kv>& tokens, const UnitAttention* after) {
    UnitAttention& first = *units[0];
    Tile tile = first.tiles_.first();
    for (bool is_last = false; !is_last;) {
      Tile next = tile;
      is_last = !first.tiles_.advance(next);
      for (int number = 0; number < count; ++number) {
        tokens.advance();
        if (number + 1 < count) {
          units[number + 1]->find(tile, tokens);
        } else if (!is_last) {
          first.find(next, tokens);
        } else if (after) {
          after->find_first_tile(tokens);
        } else {
          tokens.find_none();
        }
        units[number]->meet(tile, tokens);
      }
      tile = next;
    }
    for (int number = 0; number < count; ++number) units[number]->finish();
  }

  // Merges the partial results of the rows' segments, of which each is a unit, and writes them.
  void write_merged(const Unit* units, const RowStates& partials) {
    for (int64_t row = 0; row < num_rows_; ++row) {
      const auto states_of = [&](int64_t segment) {
        return partials.from(units[segment - units[0].segment].first_partial + row);
      };
      const RowStates merged = states_of(first_segment(row));
      for (int64_t segment = first_segment(row) + 1; segment <= last_segment(row); ++segment) {
        merged.add(0, states_of(segment));
      }
      write_row(row, merged);
    }
  }

 private:
  static constexpr int64_t kTokenGroups = kTileTokens / Product::kGroup;
  using Tile = UnitTiles::Tile;
  using Part = UnitTiles::Part;

  void find(const Tile& tile, TileTokens<Kv>& tokens) const {
    const Part& part = tile.part;
    const int32_t* table =
        batch_.block_tables + query_tokens_[part.first].seq * batch_.table_stride;
    tokens.find_next(job_, kv_head(), {table, part.low, part.end}, tile.start);
  }

  void finish() {
    if (unit_.segment < 0) write_out();
  }

  void place_memory(char* free, char* tile_memory) {
    const auto take = [&free](auto*& pointer, int64_t count) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(free);
      free += round_up(count * static_cast<int64_t>(sizeof *pointer), 64);
    };
    take(queries_, num_rows_ * head_groups_);
    take(query_factors_, num_rows_);
    take(segments_, num_rows_);
    const auto take_states = [&] {
      const RowStates states = RowStates::at(free, num_rows_, width_);
      free += round_up(RowStates::num_bytes(num_rows_, width_), 64);
      return states;
    };
    if (unit_.segment < 0) states_ = take_states();
    if (has_merged_) merged_ = take_states();
    std::fill_n(segments_, num_rows_, -1);
    for (int64_t row = 0; row < num_rows_; ++row) states_.clear(row);
    free = tile_memory;
    take(keys_, kTileTokens * head_groups_);
    take(values_, kTokenGroups * width_);
    take(scores_, kTileRows * kTileTokens);
    take(weights_, kTileRows * kTokenGroups);
  }

  bool has_several_segments() const {
    for (int64_t row = 0; row < num_rows_; row += group_heads_) {
      if (first_segment(row) != first_segment(0) || last_segment(row) != first_segment(0)) {
        return true;
      }
    }
    return false;
  }

  int64_t position_of(int64_t row) const { return query_tokens_[row / group_heads_].position; }
  int64_t first_segment(int64_t row) const {
    return lowest_seen(job_, position_of(row)) / kSegmentTokens;
  }
  int64_t last_segment(int64_t row) const { return position_of(row) / kSegmentTokens; }
  int64_t kv_head() const { return unit_.first_head * job_.num_kv_heads / job_.num_heads; }
  int64_t head_of(int64_t row) const { return unit_.first_head + row % group_heads_; }
  int64_t token_of(int64_t row) const { return query_tokens_[row / group_heads_].row; }

  // Rows [first, last), which are in one segment, go on to this one.
  void enter(int64_t segment, int64_t first, int64_t last) {
    if (segments_[first] == segment) return;
    const auto* sinks = static_cast<const Stored*>(job_.sinks);
    for (int64_t row = first; row < last; ++row) {
      merge(row);
      states_.clear(row);
      segments_[row] = segment;
      if (sinks && segment == first_segment(row)) {
        add_sink(states_, row, E::widen_one(sinks[head_of(row)]));
      }
    }
  }

  // Adds a row's segment to merged_, unless the row attends to none of its positions.
  void merge(int64_t row) {
    if (segments_[row] < first_segment(row) || segments_[row] > last_segment(row)) return;
    if (segments_[row] == first_segment(row)) {
      if (has_merged_) merged_.copy(row, states_.from(row));
    } else {
      merged_.add(row, states_.from(row));
    }
  }

  // queries_ of rows [begin, end): tile by tile, [head groups][rows of the tile].
  void pack_queries(int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += kTileRows) {
      const auto rows = static_cast<int>(std::min<int64_t>(kTileRows, end - first));
      Operand* operands = queries_ + first * head_groups_;
      for (int row = 0; row < rows; ++row) {
        const Stored* from = static_cast<const Stored*>(job_.query) +
                             token_of(first + row) * job_.query_stride +
                             head_of(first + row) * job_.head_dim;
        query_factors_[first + row] = pack_query<E, Kv>(from, job_.head_dim, rows, operands + row);
      }
    }
  }

  void meet(const Tile& tile, const TileTokens<Kv>& tokens) {
    const Part& part = tile.part;
    const int64_t num_tokens = std::min(kTileTokens, part.end - tile.start);
    if (num_tokens == 0) return;  // all positions it attends to are shared
    const int64_t first = part.first * group_heads_, last = part.last * group_heads_;
    enter(tile.start / kSegmentTokens, first, last);
    if (tile.is_first) pack_queries(first, last);
    if (last - first <= kTileRows && job_.value_dim % kPanelColumns == 0) {
      meet_few(tile.start, first, static_cast<int>(last - first), num_tokens, tokens);
    } else {
      meet_many(tile.start, first, last, num_tokens, tokens);
    }
  }

  // K is multiplied while it is packed, V is read from the cache.
  void meet_few(int64_t tile, int64_t first, int rows, int64_t num_tokens,
                const TileTokens<Kv>& tokens) {
    if constexpr (kIsInteger) {
      integer_score_function(rows)(tokens, num_tokens, job_.head_dim,
                                   queries_ + first * head_groups_, scores_);
    } else {
      for (int64_t token = 0; token < num_tokens; token += kPanelColumns) {
        pack_keys(tokens, token, num_tokens, job_.head_dim, keys_);
        score(first, rows, token, keys_);
      }
    }
    attend(tile, first, rows, num_tokens, tokens, [&](int64_t column) {
      return CachedValues<Kv>(tokens, num_tokens, column);
    });
  }

  void meet_many(int64_t tile, int64_t first, int64_t last, int64_t num_tokens,
                 const TileTokens<Kv>& tokens) {
    for (int64_t token = 0; token < num_tokens; token += kPanelColumns) {
      pack_keys(tokens, token, num_tokens, job_.head_dim, keys_ + token * head_groups_);
    }
    pack_values(tokens, num_tokens, job_.value_dim, values_);
    for (int64_t row = first; row < last; row += kTileRows) {
      const auto rows = static_cast<int>(std::min<int64_t>(kTileRows, last - row));
      const int64_t num_seen = std::min(num_tokens, position_of(row + rows - 1) + 1 - tile);
      if (num_seen <= 0) continue;
      for (int64_t token = 0; token < num_seen; token += kPanelColumns) {
        score(row, rows, token, keys_ + token * head_groups_);
      }
      attend(tile, row, rows, num_seen, tokens, [&](int64_t column) {
        return PackedPanel<Product>(values_ + column * kTokenGroups);
      });
    }
  }

  // scores_ of rows [first, first + rows) and the panel of tokens from `token` on.
  void score(int64_t first, int rows, int64_t token, const uint32_t* panel) {
    tile_function<Product, PackedPanel<Product>, kPackedRows, 1>(rows)(
        queries_ + first * head_groups_, PackedPanel<Product>(panel), head_groups_, scores_ + token,
        kTileTokens, nullptr);
  }

  // Continues from the scores of the tile's first `num_tokens`; values_at(column) is a panel of V.
  template <class ValuesAt>
  void attend(int64_t tile, int64_t first, int rows, int64_t num_tokens,
              const TileTokens<Kv>& tokens, const ValuesAt& values_at) {
    const auto range_of = [&](int64_t row) {
      const int64_t position = position_of(row);
      return AttendedRange{lowest_seen(job_, position) - tile, position - tile};
    };
    const int64_t width = round_up(num_tokens, kLanes);
    const float* value_factors = nullptr;
    if constexpr (Kv::kHasFactors) {
      scale_scores<Product>(rows, width, tokens.key_factors(), query_factors_ + first, scores_);
      value_factors = tokens.value_factors();
    }
    auto scale = static_cast<float>(job_.scale);
    if (job_.soft_cap != 0.0) {
      cap_scores(rows, width, scale, static_cast<float>(job_.soft_cap), scores_);
      scale = 1.0f;
    }
    alignas(64) float factors[kLanes], shares[kLanes];
    weigh<Product>(states_, first, rows, width, scale * kLog2E, range_of, value_factors, scores_,
                   weights_, factors, shares);
    for (int64_t column = 0; column < width_; column += kPanelColumns) {
      const auto panel = values_at(column);
      const auto multiply =
          tile_function<Product, std::remove_const_t<decltype(panel)>, 1, kTokenGroups>(rows);
      const int64_t num_groups = groups_of<Product>(num_tokens);
      float* outputs = states_.outputs + first * width_ + column;
      if constexpr (kIsInteger) {
        alignas(64) float sums[kTileRows * kPanelColumns];
        multiply(weights_, panel, num_groups, sums, kPanelColumns, nullptr);
        add_integers(rows, sums, factors, shares, outputs, width_);
      } else {
        multiply(weights_, panel, num_groups, outputs, width_, factors);
      }
    }
  }

  void write_out() {
    for (int64_t row = 0; row < num_rows_; ++row) {
      merge(row);
      write_row(row, (has_merged_ && segments_[row] >= 0 ? merged_ : states_).from(row));
    }
  }

  void write_row(int64_t row, const RowStates& states) {
    const float total = sum(load<Floats>(states.sums));
    const float share = total == 0.0f ? 0.0f : 1.0f / total;
    auto* to = static_cast<Stored*>(job_.out) +
               (token_of(row) * job_.num_heads + head_of(row)) * job_.value_dim;
    int64_t i = 0;
    for (; i + kLanes <= job_.value_dim; i += kLanes) {
      E::narrow_lanes(to + i, load<Floats>(states.outputs + i) * broadcast(share));
    }
    for (; i < job_.value_dim; ++i) to[i] = E::narrow_one(states.outputs[i] * share);
  }

  const PagedAttention& job_;
  const Batch& batch_;
  const Unit unit_;
  const QueryToken* const query_tokens_;
  const int64_t num_query_tokens_, group_heads_, num_rows_;
  const int64_t head_groups_;  // of one head's elements
  const int64_t width_;        // value_dim in whole panels
  const bool has_merged_;
  const UnitTiles tiles_;
  Operand* queries_;
  float* query_factors_;  // of queries that are integers
  RowStates states_;   // of the rows' segments
  RowStates merged_;   // of segments before, if the unit has several
  int64_t* segments_;  // [rows]
  uint32_t* keys_;    // [kTileTokens / 32][head groups][32]
  uint32_t* values_;  // [width / 32][kTokenGroups][32]
  float* scores_;     // [kTileRows][kTileTokens]
  Operand* weights_;  // [kTileRows][kTokenGroups]
};

template <class E, class Kv>
void run_attention(const PagedAttention& job, Workers& workers) {
  using Attention = UnitAttention<E, Kv>;
  const Plan plan = plan_attention(job, workers.pool.num_threads());
  const std::vector<UnitGroup> groups =
      group_units<Attention>(job, plan, workers.pool.num_threads());
  const auto memory = UnitMemory::reserve<Attention>(job, plan, groups, workers);
  const int64_t width = round_up(job.value_dim, kPanelColumns);
  const auto partials =
      RowStates::at(workers.shared.reserve(RowStates::num_bytes(plan.num_partials, width)),
                    plan.num_partials, width);
  const std::vector<typename Kv::Element> zeros(round_up(job.head_dim, kPanelColumns));
  const auto count = static_cast<int64_t>(groups.size());
  workers.pool.run_ranges(count, [&](int64_t begin, int64_t end, int thread) {
    TileTokens<Kv> tokens(zeros.data());
    Attention(job, plan, plan.units[groups[begin].first]).find_first_tile(tokens);
    for (int64_t index = begin; index < end; ++index) {
      std::array<std::optional<Attention>, kMostGroupUnits> units;
      for (int number = 0; number < groups[index].count; ++number) {
        units[number].emplace(job, plan, plan.units[groups[index].first + number],
                              memory.of_unit(thread, number), memory.of_tiles(thread), partials);
      }
      const int64_t next = std::min(index + 1, end - 1);
      const Attention after(job, plan, plan.units[groups[next].first]);
      Attention::run(units, groups[index].count, tokens, next > index ? &after : nullptr);
    }
  });
  workers.pool.run(static_cast<int64_t>(plan.splits.size()), [&](int64_t index, int) {
    const Unit* units = plan.units.data() + plan.splits[index].first;
    Attention(job, plan, *units).write_merged(units, partials);
  });
}

template <class E>
void run_with(const PagedAttention& job, Workers& workers) {
  with_cache_type<E>(job.cache_type, [&](auto kv) {
    run_attention<E, decltype(kv)>(job, workers);
  });
}

}  // namespace

void run(const PagedAttention& job, Workers& workers) {
  job.element == ElementType::kBfloat16 ? run_with<Bfloat16>(job, workers)
                                        : run_with<Float32>(job, workers);
}

}  // namespace baton
