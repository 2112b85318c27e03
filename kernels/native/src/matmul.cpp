// Linear layers over packed weights.
#include <algorithm>
#include <cstring>

#include "exact.h"
#include "quantized.h"

namespace baton {
namespace {

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

// Products with packed weights; see `run_layers`.
template <class E>
struct Dense : FloatInputs<E> {
  using FloatInputs<E>::kMostRows;

  static void multiply(const Linear& job, const void* left, int64_t begin, int64_t end,
                       const uint32_t* after) {
    const auto* operands = static_cast<const typename E::Operand*>(left);
    const Tiling tiling(job.num_rows, kMostRows);
    const Epilogue<E> finish(job);
    const int64_t num_groups = groups_of<E>(job.in_features);
    const int64_t num_words = num_groups * kPanelColumns;
    const int64_t block_tiles = FloatInputs<E>::block_tiles(job);
    const auto multiply_block = [&](int64_t first_tile, int64_t last_tile, int64_t panel) {
      alignas(64) float sums[kTileRows * kPanelColumns];
      const uint32_t* words = job.weight + panel * num_words;
      for (int64_t tile = first_tile; tile < last_tile; ++tile) {
        const int64_t start = tiling.start(tile);
        const int rows = tiling.rows(tile);
        const WeightPanel<E> weights(words, panel + 1 == end ? after : words + num_words,
                                     num_words, tile - first_tile, last_tile - first_tile);
        tile_function<E, WeightPanel<E>, kPackedRows, 1>(rows)(
            operands + start * num_groups, weights, num_groups, sums, kPanelColumns, nullptr);
        finish(sums, start, rows, panel);
      }
    };
    for (int64_t first = 0; first < tiling.num_tiles; first += block_tiles) {
      const int64_t last = std::min(first + block_tiles, tiling.num_tiles);
      for (int64_t panel = begin; panel < end; ++panel) multiply_block(first, last, panel);
    }
  }
};

// Computes layers whose weights have one format.
void run_layers(ElementType element, const Layers& layers, Workers& workers) {
  if (layers.empty()) return;
  const Linear& first = layers[0].layer;
  if (first.format != Format::kDense) {
    return first.is_exact ? run_exact(element, layers, workers)
                          : run_quantized(element, layers, workers);
  }
  element == ElementType::kBfloat16 ? run_layers<Dense<Bfloat16>>(layers, workers)
                                    : run_layers<Dense<Float32>>(layers, workers);
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
  layer.format = job.format;
  layer.is_exact = job.is_exact;
  return layer;
}

template <class E>
Layers layers_of(const ExpertLinear& job) {
  Layers layers;
  for (int64_t expert = 0; expert < job.num_experts; ++expert) {
    if (job.starts[expert] == job.starts[expert + 1]) continue;
    layers.push_back({layer_of<E>(job, expert),
                      job.rows ? job.rows + job.starts[expert] : nullptr});
  }
  return layers;
}

template <class E>
void run_head_linear(const HeadLinear& job, Workers& workers) {
  using Stored = typename E::Stored;
  if (!job.num_tokens) return;
  const int64_t out_width = job.out_features + job.num_copied;
  const auto* input = static_cast<const Stored*>(job.input);
  auto* out = static_cast<Stored*>(job.out);
  Layers layers;
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
  run_layers(job.element, layers, workers);
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
  if (job.num_rows) run_layers(job.element, {{job, nullptr}}, workers);
}

void run(const ExpertLinear& job, Workers& workers) {
  const Layers layers = job.element == ElementType::kBfloat16 ? layers_of<Bfloat16>(job)
                                                              : layers_of<Float32>(job);
  run_layers(job.element, layers, workers);
}

void run(const HeadLinear& job, Workers& workers) {
  job.element == ElementType::kBfloat16 ? run_head_linear<Bfloat16>(job, workers)
                                        : run_head_linear<Float32>(job, workers);
}

}  // namespace baton
