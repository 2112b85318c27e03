// Linear layers of every storage format: their inputs, their results, and the driver of the kernels
// that multiply.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "activations.h"
#include "commands.h"
#include "pack.h"
#include "tile.h"

namespace baton {

// Size of the prepared inputs that all panels are multiplied with before the next ones: they stay in
// the second-level cache, beside two panels.
constexpr int64_t kBlockBytes = 256 << 10;

// A linear layer of some rows: row i of its input is row `rows[i]`, or row i if `rows` is null.
struct LayerOfRows {
  Linear layer;
  const int32_t* rows;
};

using Layers = std::vector<LayerOfRows>;

// Rows per tile, at most `most_rows`, if `num_rows` are divided evenly among as few tiles as
// possible.
struct Tiling {
  int64_t num_tiles, rows_per_tile, num_longer;

  Tiling(int64_t num_rows, int64_t most_rows)
      : num_tiles((num_rows + most_rows - 1) / most_rows),
        rows_per_tile(num_rows / num_tiles),
        num_longer(num_rows % num_tiles) {}

  int64_t start(int64_t tile) const {
    return tile * rows_per_tile + std::min(tile, num_longer);
  }
  int rows(int64_t tile) const { return static_cast<int>(rows_per_tile + (tile < num_longer)); }
};

// Columns of the result that a panel of weights has.
inline int64_t panel_width(const Linear& job) { return job.is_gated ? kHalfPanel : kPanelColumns; }

inline int64_t panels_of(const Linear& job) {
  return (job.out_features + panel_width(job) - 1) / panel_width(job);
}

// Processes and writes the sums of a layer, whose other tensors have the element type E. Values
// between two operations are rounded as if they were stored as `Inner`.
template <class E, class Inner = E>
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
          const Floats gate = rounded<Inner>(load<Floats>(values + i));
          const Floats up = rounded<Inner>(load<Floats>(values + kHalfPanel + i));
          const Floats factor = gated_value<Inner>(job_.activation, up);
          store(values + i, rounded<Inner>(function(gate)) * factor);
        }
      } else {
        for (int64_t i = 0; i < kPanelColumns; i += kLanes) {
          store(values + i, function(rounded<Inner>(load<Floats>(values + i))));
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

// The part of a kernel of `run_layers` that prepares inputs as operands of `multiply_tile`.
template <class E>
struct FloatInputs {
  static constexpr int64_t kMostRows = kTileRows;

  static int64_t left_bytes(const Linear& job, int64_t num_rows) {
    return num_rows * groups_of<E>(job.in_features) *
           static_cast<int64_t>(sizeof(typename E::Operand));
  }

  static void prepare(const Linear& job, const int32_t* rows, int64_t start, int count,
                      void* left) {
    pack_operands<E>(job, rows, start, count, static_cast<typename E::Operand*>(left));
  }

  // Tiles whose operands have kBlockBytes.
  static int64_t block_tiles(const Linear& job) {
    const int64_t tile_bytes = std::max<int64_t>(1, left_bytes(job, kMostRows));
    return std::max<int64_t>(2, kBlockBytes / tile_bytes);
  }
};

// Computes layers of equal shapes, whose numbers of rows may differ; each has some.
//
// A `Kernel` has the static members
//   kMostRows: rows of a tile at most
//   left_bytes(layer, num_rows): the size of inputs that are prepared for the product
//   prepare(layer, rows, start, count, left): prepares `count` rows of the input from `start` on
//   multiply(layer, left, begin, end, after): multiplies all rows with panels begin to end, writes
//     the results, and meanwhile prefetches the panel that this thread needs afterwards from
//     `after`, unless that is null
template <class Kernel>
void run_layers(const Layers& layers, Workers& workers) {
  const auto count = static_cast<int64_t>(layers.size());
  if (!count) return;
  const auto at = [](const auto& values, int64_t index) -> const auto& {
    return values[static_cast<size_t>(index)];
  };
  std::vector<int64_t> left_starts(1), tile_starts(1);  // of each layer
  for (const auto& [layer, rows] : layers) {
    left_starts.push_back(left_starts.back() + Kernel::left_bytes(layer, layer.num_rows));
    const Tiling tiling(layer.num_rows, Kernel::kMostRows);
    tile_starts.push_back(tile_starts.back() + tiling.num_tiles);
  }
  auto* left = static_cast<char*>(workers.shared.reserve(left_starts.back()));
  workers.pool.run(tile_starts.back(), [&](int64_t number, int) {
    const auto next = std::upper_bound(tile_starts.begin(), tile_starts.end(), number);
    const int64_t index = next - tile_starts.begin() - 1;
    const auto& [layer, rows] = at(layers, index);
    const Tiling tiling(layer.num_rows, Kernel::kMostRows);
    const int64_t tile = number - at(tile_starts, index), start = tiling.start(tile);
    Kernel::prepare(layer, rows, start, tiling.rows(tile),
                    left + at(left_starts, index) + Kernel::left_bytes(layer, start));
  });
  const int64_t num_panels = panels_of(layers[0].layer);
  workers.pool.run_ranges(count * num_panels, [&](int64_t begin, int64_t end, int) {
    for (int64_t panel = begin; panel < end;) {
      const int64_t index = panel / num_panels, stop = std::min(end, (index + 1) * num_panels);
      const uint32_t* after = stop < end ? at(layers, index + 1).layer.weight : nullptr;
      Kernel::multiply(at(layers, index).layer, left + at(left_starts, index),
                       panel - index * num_panels, stop - index * num_panels, after);
      panel = stop;
    }
  });
}

}  // namespace baton
