// Linear layers over packed weights.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

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

  template <int vectors>
  void next(typename E::Columns (&columns)[vectors]) {
    panel_.next(columns);
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

// A linear layer of some rows: row i of its input is row `rows[i]`, or row i if `rows` is null.
struct LayerOfRows {
  Linear layer;
  const int32_t* rows;
};

// Computes layers of equal shapes, whose numbers of rows may differ.
template <class E>
void run_layers(const std::vector<LayerOfRows>& layers, Workers& workers) {
  using Operand = typename E::Operand;
  const auto count = static_cast<int64_t>(layers.size());
  if (!count) return;
  const Linear& first = layers[0].layer;
  const int64_t num_groups = groups_of<E>(first.in_features), num_panels = panels_of(first);
  std::vector<int64_t> starts(1);  // of each layer's operands
  for (const LayerOfRows& each : layers) {
    starts.push_back(starts.back() + each.layer.num_rows * num_groups);
  }
  const auto num_bytes = starts.back() * static_cast<int64_t>(sizeof(Operand));
  auto* operands = static_cast<Operand*>(workers.shared.reserve(num_bytes));
  const auto at = [](const auto& values, int64_t index) -> const auto& {
    return values[static_cast<size_t>(index)];
  };
  workers.pool.run(count, [&](int64_t index, int) {
    const auto& [layer, rows] = at(layers, index);
    const Tiling tiling(layer.num_rows);
    for (int64_t tile = 0; tile < tiling.num_tiles; ++tile) {
      const int64_t start = tiling.start(tile);
      pack_operands<E>(layer, rows, start, tiling.rows(tile),
                       operands + at(starts, index) + start * num_groups);
    }
  });
  workers.pool.run_ranges(count * num_panels, [&](int64_t begin, int64_t end, int) {
    for (int64_t panel = begin; panel < end;) {
      const int64_t index = panel / num_panels, stop = std::min(end, (index + 1) * num_panels);
      const uint32_t* after = stop < end ? at(layers, index + 1).layer.weight : nullptr;
      multiply_panels<E>(at(layers, index).layer, operands + at(starts, index),
                         panel - index * num_panels, stop - index * num_panels, after);
      panel = stop;
    }
  });
}

// The layer of one expert of a command. Those without rows have none.
template <class E>
Linear layer_of(const ExpertLinear& job, int64_t expert) {
  using Stored = typename E::Stored;
  const int64_t first = job.starts[expert], num_columns = job.out_features * (job.is_gated ? 2 : 1);
  Linear layer{};
  layer.element = job.element;
  layer.input = static_cast<const Stored*>(job.input) + (job.rows ? 0 : first * job.input_stride);
  layer.input_stride = job.input_stride;
  layer.num_rows = job.starts[expert + 1] - first;
  layer.in_features = job.in_features;
  layer.weight = job.weight + expert * job.expert_words;
  layer.out_features = job.out_features;
  if (job.bias) layer.bias = static_cast<const Stored*>(job.bias) + expert * num_columns;
  layer.is_gated = job.is_gated;
  layer.activation = job.activation;
  layer.scale = 1.0;
  layer.out = static_cast<Stored*>(job.out) + first * job.out_features;
  layer.out_stride = job.out_features;
  return layer;
}

template <class E>
void run_expert_linear(const ExpertLinear& job, Workers& workers) {
  std::vector<LayerOfRows> layers;
  for (int64_t expert = 0; expert < job.num_experts; ++expert) {
    if (job.starts[expert] == job.starts[expert + 1]) continue;
    layers.push_back({layer_of<E>(job, expert),
                      job.rows ? job.rows + job.starts[expert] : nullptr});
  }
  run_layers<E>(layers, workers);
}

template <class E>
void run_head_linear(const HeadLinear& job, Workers& workers) {
  using Stored = typename E::Stored;
  if (!job.num_tokens) return;
  const int64_t out_width = job.out_features + job.num_copied;
  const auto* input = static_cast<const Stored*>(job.input);
  auto* out = static_cast<Stored*>(job.out);
  std::vector<LayerOfRows> layers;
  for (int64_t head = 0; head < job.num_heads; ++head) {
    Linear layer{};
    layer.element = job.element;
    layer.input = input + head * job.head_stride;
    layer.input_stride = job.token_stride;
    layer.num_rows = job.num_tokens;
    layer.in_features = job.in_features;
    layer.weight = job.weight + head * job.head_words;
    layer.out_features = job.out_features;
    layer.scale = 1.0;
    layer.out = out + head * out_width;
    layer.out_stride = job.num_heads * out_width;
    layers.push_back({layer, nullptr});
  }
  run_layers<E>(layers, workers);
  if (!job.num_copied) return;
  const auto num_bytes = static_cast<size_t>(job.num_copied) * sizeof(Stored);
  workers.pool.run_ranges(job.num_tokens, [&](int64_t begin, int64_t end, int) {
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t head = 0; head < job.num_heads; ++head) {
        const int64_t to = (token * job.num_heads + head) * out_width + job.out_features;
        const int64_t from = token * job.token_stride + head * job.head_stride + job.in_features;
        std::memcpy(out + to, input + from, num_bytes);
      }
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

void run(const HeadLinear& job, Workers& workers) {
  job.element == ElementType::kBfloat16 ? run_head_linear<Bfloat16>(job, workers)
                                        : run_head_linear<Float32>(job, workers);
}

}  // namespace baton
