// Linear layers over packed weights.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "activations.h"
#include "commands.h"
#include "pack.h"
#include "tile.h"

namespace baton {
namespace {

// Size of the packed operands that all panels are multiplied with before the next ones: they stay
// in the second-level cache, beside two panels.
constexpr int64_t kBlockBytes = 256 << 10;

template <class E>
void pack_as(const Pack& job) {
  const auto* source = static_cast<const typename E::Stored*>(job.source);
  const int64_t num_groups = groups_of<E>(job.num_columns);
  for (int64_t i = 0; i < job.num_rows; ++i) {
    int64_t row = job.first_row + i;
    if (job.paired_part >= 0) {
      row = row / kHalfPanel * kPanelColumns + job.paired_part * kHalfPanel + row % kHalfPanel;
    }
    uint32_t* words = job.weight + row / kPanelColumns * num_groups * kPanelColumns;
    auto* elements = reinterpret_cast<typename E::Stored*>(words + row % kPanelColumns);
    for (int64_t column = 0; column < job.num_columns; ++column) {
      const int64_t group = column / E::kGroup, within = column % E::kGroup;
      elements[group * kPanelColumns * E::kGroup + within] =
          source[i * job.row_stride + column * job.column_stride];
    }
  }
}

// Rows per tile if `num_rows` are divided evenly among as few tiles as possible.
struct Tiling {
  int64_t num_tiles, rows_per_tile, num_longer;

  explicit Tiling(int64_t num_rows)
      : num_tiles((num_rows + kTileRows - 1) / kTileRows),
        rows_per_tile(num_rows / num_tiles),
        num_longer(num_rows % num_tiles) {}

  int64_t start(int64_t tile) const {
    return tile * rows_per_tile + std::min(tile, num_longer);
  }
  int rows(int64_t tile) const { return static_cast<int>(rows_per_tile + (tile < num_longer)); }
};

// Packs rows of the input side by side; row i is row `rows[i]`, or row i if `rows` is null.
template <class E>
void pack_operands(const Linear& job, const int32_t* rows, int64_t start, int count,
                   typename E::Operand* out) {
  const auto* input = static_cast<const typename E::Stored*>(job.input);
  const int64_t whole = job.in_features / E::kGroup;
  for (int row = 0; row < count; ++row) {
    const int64_t number = rows ? rows[start + row] : start + row;
    const auto* elements = input + number * job.input_stride;
    for (int64_t group = 0; group < whole; ++group) {
      out[group * count + row] = E::operand(elements + group * E::kGroup);
    }
    if (job.in_features % E::kGroup) {
      const typename E::Stored last[2] = {elements[job.in_features - 1], 0};
      out[whole * count + row] = E::operand(last);
    }
  }
}

// Columns of the result that a panel of weights has.
int64_t panel_width(const Linear& job) { return job.is_gated ? kHalfPanel : kPanelColumns; }

template <class E>
class Epilogue {
 public:
  explicit Epilogue(const Linear& job) : job_(job) {}

  // Processes sums[rows][32] of one panel.
  void operator()(float* sums, int64_t start, int rows, int64_t panel) const {
    const int64_t width = panel_width(job_);
    const int64_t column = panel * width;
    const int64_t count = std::min(width, job_.out_features - column);
    const bool is_scaled = job_.scale != 1.0 || job_.soft_cap != 0.0;
    for (int row = 0; row < rows; ++row) {
      float* values = sums + row * kPanelColumns;
      if (job_.bias) add_bias(values, column, count);
      if (job_.activation != Activation::kNone) activate(values);
      if (is_scaled) scale(values);
      if (job_.residual) add_residual(values, start + row, column, count);
      if (job_.out_is_float) {
        write<Float32>(values, start + row, column, count);
      } else {
        write<E>(values, start + row, column, count);
      }
    }
  }

 private:
  void activate(float* values) const {
    with_activation(job_.activation, [&](auto function) {
      if (job_.is_gated) {
        for (int64_t i = 0; i < kHalfPanel; i += kLanes) {
          const Floats gate = rounded<E>(load<Floats>(values + i));
          const Floats up = rounded<E>(load<Floats>(values + kHalfPanel + i));
          store(values + i, rounded<E>(function(gate)) * gated_value<E>(job_.activation, up));
        }
      } else {
        for (int64_t i = 0; i < kPanelColumns; i += kLanes) {
          store(values + i, function(rounded<E>(load<Floats>(values + i))));
        }
      }
    });
  }

  void scale(float* values) const {
    const auto factor = static_cast<float>(job_.scale), cap = static_cast<float>(job_.soft_cap);
    for (int64_t i = 0; i < kPanelColumns; i += kLanes) {
      const Floats scaled = load<Floats>(values + i) * broadcast(factor);
      store(values + i, cap == 0.0f ? scaled : capped(scaled, cap));
    }
  }

  void add_bias(float* values, int64_t column, int64_t count) const {
    const auto* bias = static_cast<const typename E::Stored*>(job_.bias) + column;
    for (int64_t i = 0; i < count; ++i) values[i] += E::widen_one(bias[i]);
    if (!job_.is_gated) return;
    bias += job_.out_features;
    for (int64_t i = 0; i < count; ++i) values[kHalfPanel + i] += E::widen_one(bias[i]);
  }

  void add_residual(float* values, int64_t row, int64_t column, int64_t count) const {
    const auto* from =
        static_cast<const typename E::Stored*>(job_.residual) + row * job_.residual_stride + column;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      store(values + i, load<Floats>(values + i) + E::widen_lanes(from + i));
    }
    for (; i < count; ++i) values[i] += E::widen_one(from[i]);
  }

  template <class Out>
  void write(const float* values, int64_t row, int64_t column, int64_t count) const {
    auto* to = static_cast<typename Out::Stored*>(job_.out) + row * job_.out_stride + column;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) Out::narrow_lanes(to + i, load<Floats>(values + i));
    for (; i < count; ++i) to[i] = Out::narrow_one(values[i]);
  }

  const Linear& job_;
};

// A panel of weights that prefetches the next one into the second-level cache while it is read.
template <class E>
class WeightPanel {
 public:
  // Both panels have `num_words`; `next` is null if there is none. A single tile prefetches all of
  // it, of several tiles the first two prefetch a half each.
  WeightPanel(const uint32_t* words, const uint32_t* next, int64_t num_words, int64_t tile,
              int64_t num_tiles)
      : panel_(words), ahead_(words), step_(0) {
    if (!next || tile > 1) return;
    ahead_ = next + tile * (num_words / 2);
    step_ = num_tiles == 1 ? kPanelColumns : kLineWords;
  }

  WeightPanel from_column(int column) const {
    WeightPanel panel = *this;
    panel.panel_ = panel_.from_column(column);
    return panel;
  }

  void next(typename E::Columns& first, typename E::Columns& second) {
    panel_.next(first, second);
    __builtin_prefetch(ahead_, 0, 2);
    __builtin_prefetch(ahead_ + kLineWords, 0, 2);
    ahead_ += step_;
  }

 private:
  PackedPanel<E> panel_;
  const uint32_t* ahead_;
  int64_t step_;
};

template <class E>
int64_t operand_bytes(int64_t num_rows, int64_t in_features) {
  return num_rows * groups_of<E>(in_features) * static_cast<int64_t>(sizeof(typename E::Operand));
}

int64_t panels_of(const Linear& job) {
  return (job.out_features + panel_width(job) - 1) / panel_width(job);
}

template <class E>
int64_t panel_words(const Linear& job) {
  return groups_of<E>(job.in_features) * kPanelColumns;
}

// Multiplies packed operands with panels begin to end. Meanwhile the panel that this thread needs
// afterwards is prefetched from `after`, unless that is null.
template <class E>
void multiply_panels(const Linear& job, const typename E::Operand* operands, int64_t begin,
                     int64_t end, const uint32_t* after) {
  const Tiling tiling(job.num_rows);
  const Epilogue<E> finish(job);
  const int64_t num_groups = groups_of<E>(job.in_features);
  const int64_t num_words = panel_words<E>(job);
  const int64_t tile_bytes = operand_bytes<E>(kTileRows, job.in_features);
  const int64_t block_tiles = std::max<int64_t>(2, kBlockBytes / std::max<int64_t>(1, tile_bytes));
  const auto multiply = [&](int64_t first_tile, int64_t last_tile, int64_t panel) {
    alignas(64) float sums[kTileRows * kPanelColumns];
    const uint32_t* words = job.weight + panel * num_words;
    for (int64_t tile = first_tile; tile < last_tile; ++tile) {
      const int64_t start = tiling.start(tile);
      const int rows = tiling.rows(tile);
      const WeightPanel<E> weights(words, panel + 1 == end ? after : words + num_words, num_words,
                                   tile - first_tile, last_tile - first_tile);
      tile_function<E, WeightPanel<E>, kPackedRows, 1>(rows)(
          operands + start * num_groups, weights, num_groups, sums, kPanelColumns, nullptr);
      finish(sums, start, rows, panel);
    }
  };
  for (int64_t first = 0; first < tiling.num_tiles; first += block_tiles) {
    const int64_t last = std::min(first + block_tiles, tiling.num_tiles);
    for (int64_t panel = begin; panel < end; ++panel) multiply(first, last, panel);
  }
}

template <class E>
void run_linear(const Linear& job, Workers& workers) {
  if (!job.num_rows) return;
  using Operand = typename E::Operand;
  const Tiling tiling(job.num_rows);
  auto* operands = static_cast<Operand*>(
      workers.shared.reserve(operand_bytes<E>(job.num_rows, job.in_features)));
  workers.pool.run(tiling.num_tiles, [&](int64_t tile, int) {
    const int64_t start = tiling.start(tile);
    pack_operands<E>(job, nullptr, start, tiling.rows(tile),
                     operands + start * groups_of<E>(job.in_features));
  });
  workers.pool.run_ranges(panels_of(job), [&](int64_t begin, int64_t end, int) {
    multiply_panels<E>(job, operands, begin, end, nullptr);
  });
}

// The experts of a command that have rows; each is a linear layer of its rows.
template <class E>
class ActiveExperts {
 public:
  explicit ActiveExperts(const ExpertLinear& job) : job_(job) {
    for (int64_t expert = 0; expert < job.num_experts; ++expert) {
      if (job.starts[expert] < job.starts[expert + 1]) numbers_.push_back(expert);
    }
  }

  int64_t count() const { return static_cast<int64_t>(numbers_.size()); }

  // Slot of the first row of active expert `index`.
  int64_t first_slot(int64_t index) const { return job_.starts[number(index)]; }

  // The input has the rows of all experts.
  Linear layer(int64_t index) const {
    using Stored = typename E::Stored;
    const int64_t expert = number(index), first = job_.starts[expert];
    const int64_t num_columns = job_.out_features * (job_.is_gated ? 2 : 1);
    Linear layer{};
    layer.element = job_.element;
    layer.input = job_.input;
    layer.input_stride = job_.input_stride;
    layer.num_rows = job_.starts[expert + 1] - first;
    layer.in_features = job_.in_features;
    layer.weight = job_.weight + expert * job_.expert_words;
    layer.out_features = job_.out_features;
    if (job_.bias) layer.bias = static_cast<const Stored*>(job_.bias) + expert * num_columns;
    layer.is_gated = job_.is_gated;
    layer.activation = job_.activation;
    layer.scale = 1.0;
    layer.out = static_cast<Stored*>(job_.out) + first * job_.out_features;
    layer.out_stride = job_.out_features;
    return layer;
  }

 private:
  int64_t number(int64_t index) const { return numbers_[static_cast<size_t>(index)]; }

  const ExpertLinear& job_;
  std::vector<int64_t> numbers_;
};

template <class E>
void run_expert_linear(const ExpertLinear& job, Workers& workers) {
  using Operand = typename E::Operand;
  const ActiveExperts<E> experts(job);
  if (!experts.count()) return;
  const int64_t num_groups = groups_of<E>(job.in_features);
  auto* memory = static_cast<Operand*>(
      workers.shared.reserve(operand_bytes<E>(job.num_slots, job.in_features)));
  const auto operands = [&](int64_t index) {
    return memory + experts.first_slot(index) * num_groups;
  };
  workers.pool.run(experts.count(), [&](int64_t index, int) {
    const Linear layer = experts.layer(index);
    const Tiling tiling(layer.num_rows);
    for (int64_t tile = 0; tile < tiling.num_tiles; ++tile) {
      const int64_t start = tiling.start(tile);
      const int64_t slot = experts.first_slot(index) + start;
      pack_operands<E>(layer, job.rows, slot, tiling.rows(tile),
                       operands(index) + start * num_groups);
    }
  });
  const int64_t num_panels = panels_of(experts.layer(0));
  workers.pool.run_ranges(experts.count() * num_panels, [&](int64_t begin, int64_t end, int) {
    for (int64_t at = begin; at < end;) {
      const int64_t index = at / num_panels, stop = std::min(end, (index + 1) * num_panels);
      const uint32_t* after = stop < end ? experts.layer(index + 1).weight : nullptr;
      multiply_panels<E>(experts.layer(index), operands(index), at - index * num_panels,
                         stop - index * num_panels, after);
      at = stop;
    }
  });
}

}  // namespace

void pack(const Pack& job) {
  job.element == ElementType::kBfloat16 ? pack_as<Bfloat16>(job) : pack_as<Float32>(job);
}

void run(const Linear& job, Workers& workers) {
  job.element == ElementType::kBfloat16 ? run_linear<Bfloat16>(job, workers)
                                        : run_linear<Float32>(job, workers);
}

void run(const ExpertLinear& job, Workers& workers) {
  job.element == ElementType::kBfloat16 ? run_expert_linear<Bfloat16>(job, workers)
                                        : run_expert_linear<Float32>(job, workers);
}

}  // namespace baton
