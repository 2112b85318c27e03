// Causal attention over paged KV: the same code for prompts, chunks and single tokens.
//
// The rows of a unit of work (see attention_plan.h) meet each tile of 128 cached tokens once it
// is packed. Tiles begin at multiples of 128 of a sequence's positions, so a token's result
// depends neither on the chunk it came in nor on other sequences.
#include <algorithm>
#include <utility>
#include <vector>

#include "attention_plan.h"
#include "commands.h"
#include "tile.h"

namespace baton {
namespace {

constexpr float kLog2E = 1.44269504f;
constexpr float kLowest = -1e30f;  // stands for -inf where a difference must not be NaN

static_assert(kTileRows <= kLanes && kTileTokens % kLanes == 0);

struct Indices {
  alignas(64) float values[kTileTokens];
  constexpr Indices() : values() {
    for (int i = 0; i < kTileTokens; ++i) values[i] = static_cast<float>(i);
  }
};
constexpr Indices kIndices;

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

template <class E>
class UnitAttention {
 public:
  using Stored = typename E::Stored;
  using Operand = typename E::Operand;

  // Without memory it can only fetch.
  UnitAttention(const PagedAttention& job, const Plan& plan, const Unit& unit)
      : job_(job),
        batch_(*job.batch),
        unit_(unit),
        query_tokens_(plan.tokens.data() + unit.first),
        num_query_tokens_(unit.last - unit.first),
        group_heads_(job.num_heads / job.num_kv_heads),
        num_rows_(num_query_tokens_ * group_heads_),
        head_groups_(groups_of<E>(job.head_dim)),
        width_(round_up(job.head_dim, kPanelColumns)) {}

  UnitAttention(const PagedAttention& job, const Plan& plan, const Unit& unit, void* memory)
      : UnitAttention(job, plan, unit) {
    place_memory(memory);
  }

  int64_t memory_bytes() const {
    return 4 * (num_rows_ * (width_ + 1 + kLanes) + kTileTokens * width_ +
                kTileTokens * head_groups_ + kTileRows * kTileTokens) +
           static_cast<int64_t>(sizeof(Operand)) *
               (num_rows_ * head_groups_ + kTileRows * kTokenGroups) +
           static_cast<int64_t>(sizeof(Stored)) * job_.head_dim + 64 * 9;
  }

  void fetch_first_tile() {
    begin_part(part_after(0, 0));
    visit_tokens(first_tile(), [this](int64_t, const Stored* key) { fetch(key); });
  }

  void run() {
    std::fill(outputs_, outputs_ + num_rows_ * width_, 0.0f);
    std::fill(sums_, sums_ + num_rows_ * kLanes, 0.0f);
    std::fill(maxima_, maxima_ + num_rows_, kLowest);
    if (unit_.shared_end) meet({0, num_query_tokens_, 0, unit_.shared_end});
    for (int64_t token = 0; token < num_query_tokens_;) {
      const Part part = part_after(token, unit_.shared_end);
      meet(part);
      token = part.last;
    }
    write_out();
  }

 private:
  static constexpr int64_t kTokenGroups = kTileTokens / E::kGroup;

  // Tokens [first, last) of the unit, which see nothing of one block table but [low, end).
  struct Part {
    int64_t first, last, low, end;
  };

  // The tokens of one sequence from `first` on, and what they see from `shared_end` on.
  Part part_after(int64_t first, int64_t shared_end) const {
    int64_t last = first + 1;
    while (last < num_query_tokens_ && query_tokens_[last].seq == query_tokens_[first].seq) ++last;
    const int64_t low = std::max(lowest_seen(query_tokens_[first].position), shared_end);
    return {first, last, low, query_tokens_[last - 1].position + 1};
  }

  void begin_part(const Part& part) {
    table_ = batch_.block_tables + query_tokens_[part.first].seq * batch_.table_stride;
    low_ = part.low;
    end_ = part.end;
  }

  void meet(const Part& part) {
    begin_part(part);
    const int64_t first_row = part.first * group_heads_, last_row = part.last * group_heads_;
    find_tokens(first_tile());
    pack_query(first_row, last_row);
    for (int64_t tile = first_tile(); tile < end_; tile += kTileTokens) {
      const int64_t stop = std::min(tile + kTileTokens, end_);
      std::swap(tokens_, next_tokens_);
      find_tokens(tile + kTileTokens);
      pack_keys(stop - tile);
      pack_values(stop - tile);
      for (int64_t row = first_row; row < last_row; row += kTileRows) {
        const auto rows = static_cast<int>(std::min<int64_t>(kTileRows, last_row - row));
        attend(tile, stop, row, rows);
      }
    }
  }

  void place_memory(void* memory) {
    auto* free = static_cast<char*>(memory);
    const auto take = [&free](auto*& pointer, int64_t count) {
      pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(free);
      free += round_up(count * static_cast<int64_t>(sizeof *pointer), 64);
    };
    take(queries_, num_rows_ * head_groups_);
    take(outputs_, num_rows_ * width_);
    take(maxima_, num_rows_);
    take(sums_, num_rows_ * kLanes);
    take(keys_, kTileTokens * head_groups_);
    take(values_, kTileTokens / E::kGroup * width_);
    take(scores_, kTileRows * kTileTokens);
    take(weights_, kTileRows * kTokenGroups);
    take(zeros_, job_.head_dim);
    std::fill(zeros_, zeros_ + job_.head_dim, Stored{});
  }

  int64_t position_of(int64_t row) const { return query_tokens_[row / group_heads_].position; }
  int64_t lowest_seen(int64_t position) const {
    return job_.sliding_window ? std::max<int64_t>(0, position - job_.sliding_window + 1) : 0;
  }
  int64_t place_in_query(int64_t row, int64_t stride) const {
    const int64_t head = unit_.kv_head * group_heads_ + row % group_heads_;
    return query_tokens_[row / group_heads_].row * stride + head * job_.head_dim;
  }

  // A cached token's K and V, or zeros for both.
  struct Token {
    const Stored* key;
    const Stored* value;
  };

  // The part's tokens see positions [low_, end_), each some of them.
  int64_t first_tile() const { return low_ / kTileTokens * kTileTokens; }

  // next_tokens_[i]: what lies at position `tile + i`; zeros where that is not within
  // [low_, end_). It is fetched from memory while another tile computes.
  void find_tokens(int64_t tile) {
    std::fill(next_tokens_, next_tokens_ + kTileTokens, Token{zeros_, zeros_});
    visit_tokens(tile, [&](int64_t position, const Stored* key) {
      next_tokens_[position - tile] = {key, key + job_.value_offset};
      fetch(key);
    });
  }

  // Calls visit(position, K) for the tokens of a tile that are within [low_, end_).
  template <class Visit>
  void visit_tokens(int64_t tile, const Visit& visit) const {
    const int64_t stop = std::min(tile + kTileTokens, end_);
    int64_t position = std::max(tile, low_);
    int64_t block = position / job_.block_size, slot = position % job_.block_size;
    for (; position < stop; ++block, slot = 0) {
      const Stored* key = static_cast<const Stored*>(job_.cache) +
                          table_[block] * job_.block_stride + unit_.kv_head * job_.head_stride +
                          slot * job_.slot_stride;
      for (; slot < job_.block_size && position < stop; ++slot, ++position) {
        visit(position, key);
        key += job_.slot_stride;
      }
    }
  }

  // Into the second-level cache, which waits for more lines at once than the first.
  void fetch(const Stored* key) const {
    constexpr int64_t kLine = 64 / sizeof(Stored);
    for (int64_t i = 0; i < job_.head_dim; i += kLine) {
      __builtin_prefetch(key + i, 0, 2);
      __builtin_prefetch(key + job_.value_offset + i, 0, 2);
    }
  }

  // queries_ of rows [begin, end): tile by tile, [head groups][rows of the tile].
  void pack_query(int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; first += kTileRows) {
      const auto rows = static_cast<int>(std::min<int64_t>(kTileRows, end - first));
      Operand* operands = queries_ + first * head_groups_;
      for (int row = 0; row < rows; ++row) {
        const Stored* from = static_cast<const Stored*>(job_.query) +
                             place_in_query(first + row, job_.query_stride);
        for (int64_t group = 0; group < head_groups_; ++group) {
          operands[group * rows + row] = E::operand(from + group * E::kGroup);
        }
      }
    }
  }

  // keys_[tokens / 32][head groups][32] of the tile's first tokens.
  void pack_keys(int64_t num_tokens) {
    for (int64_t first = 0; first < num_tokens; first += kLanes) {
      uint32_t* panel = keys_ + first / kPanelColumns * head_groups_ * kPanelColumns +
                        first % kPanelColumns;
      int64_t group = 0;
      for (; group + kLanes <= head_groups_; group += kLanes) {
        pack_square(first, group, kLanes, panel + group * kPanelColumns);
      }
      if (group < head_groups_) {
        pack_square(first, group, head_groups_ - group, panel + group * kPanelColumns);
      }
    }
  }

  inline __attribute__((always_inline)) void pack_square(int64_t first, int64_t group,
                                                         int64_t num_groups, uint32_t* to) {
    Words square[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      const Stored* from = tokens_[first + lane].key + group * E::kGroup;
      square[lane] = load_part<Words>(from, num_groups * E::kGroup);
    }
    transpose(square);
    for (int64_t i = 0; i < num_groups; ++i) store(to + i * kPanelColumns, square[i]);
  }

  // values_[head_dim / 32][token groups][32] of the tile's first tokens; zero past head_dim.
  void pack_values(int64_t num_tokens) {
    for (int64_t group = 0; group * E::kGroup < num_tokens; ++group) {
      const Token* tokens = tokens_ + group * E::kGroup;
      for (int64_t column = 0; column < width_; column += kLanes) {
        uint32_t* to = values_ + (column / kPanelColumns * kTokenGroups + group) * kPanelColumns +
                       column % kPanelColumns;
        if (column + kLanes <= job_.head_dim) {
          store(to, value_words(tokens, column, kLanes));
        } else {
          store(to, value_words(tokens, column, std::max<int64_t>(0, job_.head_dim - column)));
        }
      }
    }
  }

  inline __attribute__((always_inline)) static Words value_words(const Token* tokens,
                                                                 int64_t column, int64_t count) {
    typedef Stored Elements __attribute__((vector_size(kLanes * sizeof(Stored))));
    const auto first = load_part<Elements>(tokens[0].value + column, count);
    if constexpr (E::kGroup == 1) {
      return (Words)first;
    } else {
      const auto second = load_part<Elements>(tokens[1].value + column, count);
      return __builtin_convertvector(first, Words) | __builtin_convertvector(second, Words) << 16;
    }
  }

  // A vector whose first `count` elements are those at `from`, and the others zero.
  template <class V>
  inline __attribute__((always_inline)) static V load_part(const Stored* from, int64_t count) {
    if (count * sizeof(Stored) == sizeof(V)) return load<V>(from);
    V values{};
    std::memcpy(&values, from, static_cast<size_t>(count) * sizeof(Stored));
    return values;
  }

  // Rows [first, first + rows) meet the packed tokens [tile, stop).
  void attend(int64_t tile, int64_t stop, int64_t first, int rows) {
    const Operand* queries = queries_ + first * head_groups_;
    for (int64_t token = 0; token < stop - tile; token += kPanelColumns) {
      tile_function<E, kPackedRows, 1>(rows)(queries, keys_ + token * head_groups_, head_groups_,
                                             scores_ + token, kTileTokens, nullptr,
                                             {keys_, 0});
    }
    alignas(64) float factors[kLanes];
    weigh(tile, first, rows, factors);
    const int64_t num_groups = groups_of<E>(stop - tile);
    for (int64_t column = 0; column < width_; column += kPanelColumns) {
      tile_function<E, 1, kTokenGroups>(rows)(weights_, values_ + column * kTokenGroups,
                                              num_groups, outputs_ + first * width_ + column,
                                              width_, factors, {values_, 0});
    }
  }

  // From scores to weights; factors[r] brings what row r has summed to its new maximum.
  void weigh(int64_t tile, int64_t first, int rows, float* factors) {
    const float scale = static_cast<float>(job_.scale) * kLog2E;
    Floats largest[kTileRows];
    for (int row = 0; row < rows; ++row) {
      largest[row] = larger_scores(tile, position_of(first + row), scores_ + row * kTileTokens);
    }
    alignas(64) float maxima[kLanes] = {};
    std::copy_n(maxima_ + first, rows, maxima);
    const Floats former = load<Floats>(maxima);
    const Floats now = larger(maxima_of(largest, rows) * broadcast(scale), former);
    store(factors, exp2_of_negative(former - now));
    store(maxima, now);
    std::copy_n(maxima, rows, maxima_ + first);
    for (int row = 0; row < rows; ++row) {
      Floats total{};
      for (int i = 0; i < kTileTokens; i += kLanes) {
        const Floats score = load<Floats>(scores_ + row * kTileTokens + i);
        const Floats weight =
            exp2_of_negative(score * broadcast(scale) - broadcast(maxima[row]));
        total += weight;
        E::store_operands(weights_ + row * kTokenGroups, i, weight);
      }
      float* sums = sums_ + (first + row) * kLanes;
      store(sums, load<Floats>(sums) * broadcast(factors[row]) + total);
    }
  }

  // Hides what a row does not see of the tile; returns the largest of what is left, by lane.
  Floats larger_scores(int64_t tile, int64_t position, float* scores) const {
    const int64_t low = lowest_seen(position);
    if (tile < low || tile + kTileTokens > position + 1) {
      const Floats from = broadcast(static_cast<float>(low - tile));
      const Floats to = broadcast(static_cast<float>(position - tile));
      for (int i = 0; i < kTileTokens; i += kLanes) {
        const Floats index = load<Floats>(kIndices.values + i);
        const Masks seen = (index >= from) & (index <= to);
        store(scores + i, select(seen, load<Floats>(scores + i), broadcast(-__builtin_inff())));
      }
    }
    Floats best = load<Floats>(scores);
    for (int i = kLanes; i < kTileTokens; i += kLanes) {
      best = larger(load<Floats>(scores + i), best);
    }
    return best;
  }

  void write_out() {
    for (int64_t row = 0; row < num_rows_; ++row) {
      const float total = sum(load<Floats>(sums_ + row * kLanes));
      const float share = total == 0.0f ? 0.0f : 1.0f / total;
      auto* to = static_cast<Stored*>(job_.out) +
                 place_in_query(row, job_.num_heads * job_.head_dim);
      const float* from = outputs_ + row * width_;
      int64_t i = 0;
      for (; i + kLanes <= job_.head_dim; i += kLanes) {
        E::narrow_lanes(to + i, load<Floats>(from + i) * broadcast(share));
      }
      for (; i < job_.head_dim; ++i) to[i] = E::narrow_one(from[i] * share);
    }
  }

  const PagedAttention& job_;
  const Batch& batch_;
  const Unit unit_;
  const QueryToken* const query_tokens_;
  const int64_t num_query_tokens_, group_heads_, num_rows_;
  const int64_t head_groups_;  // of one head's elements
  const int64_t width_;        // head_dim in whole panels
  const int32_t* table_;
  int64_t low_, end_;
  Operand* queries_;
  float* outputs_;     // [rows][width]
  float* maxima_;      // [rows], in log2
  float* sums_;        // [rows][kLanes]: of the weights, to be added up
  uint32_t* keys_;
  uint32_t* values_;
  float* scores_;      // [kTileRows][kTileTokens]
  Operand* weights_;   // [kTileRows][token groups]
  Stored* zeros_;      // [head_dim]
  Token token_memory_[2][kTileTokens];
  Token* tokens_ = token_memory_[0];
  Token* next_tokens_ = token_memory_[1];
};

// Memory for any unit, by thread. Got before the tasks begin: a task must not throw.
template <class E>
std::vector<void*> reserve_memory(const PagedAttention& job, const Plan& plan, Workers& workers) {
  int64_t num_bytes = 0;
  for (const Unit& unit : plan.units) {
    num_bytes = std::max(num_bytes, UnitAttention<E>(job, plan, unit).memory_bytes());
  }
  std::vector<void*> memory;
  for (Scratch& own : workers.own) memory.push_back(own.reserve(num_bytes));
  return memory;
}

template <class E>
void run_attention(const PagedAttention& job, Workers& workers) {
  const Plan plan = plan_attention(job, workers.pool.num_threads());
  const std::vector<void*> memory = reserve_memory<E>(job, plan, workers);
  const auto count = static_cast<int64_t>(plan.units.size());
  workers.pool.run_ranges(count, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t index = begin; index < end; ++index) {
      UnitAttention<E> attention(job, plan, plan.units[index], memory[thread]);
      if (index + 1 < end) UnitAttention<E>(job, plan, plan.units[index + 1]).fetch_first_tile();
      attention.run();
    }
  });
}

}  // namespace

void run(const PagedAttention& job, Workers& workers) {
  job.element == ElementType::kBfloat16 ? run_attention<Bfloat16>(job, workers)
                                        : run_attention<Float32>(job, workers);
}

}  // namespace baton
