// Row look-ups in packed weights and other matrices.
#include <algorithm>
#include <type_traits>

#include "commands.h"
#include "tile.h"

namespace baton {
namespace {

constexpr int64_t kRowsPerTask = 8;

template <class E>
typename E::Stored packed_element(const uint32_t* words, int64_t column) {
  const int64_t group = column / E::kGroup, within = column % E::kGroup;
  return reinterpret_cast<const typename E::Stored*>(words + group * kPanelColumns)[within];
}

// Writes one row of the matrix; a row of zeros if the matrix has no such row.
template <class E, class Out>
void take_row(const TakeRows& job, int64_t row, Out* out) {
  const int64_t width = job.num_columns;
  const auto converted = [](typename E::Stored value) {
    if constexpr (std::is_same_v<Out, typename E::Stored>) return value;
    else return E::widen_one(value);
  };
  if (row < 0 || row >= job.num_matrix_rows) {
    std::fill_n(out, width, Out{});
  } else if (job.is_packed) {
    const uint32_t* words = static_cast<const uint32_t*>(job.matrix) +
                            row / kPanelColumns * groups_of<E>(width) * kPanelColumns +
                            row % kPanelColumns;
    for (int64_t i = 0; i < width; ++i) out[i] = converted(packed_element<E>(words, i));
  } else {
    const auto* from = static_cast<const typename E::Stored*>(job.matrix) + row * job.row_stride;
    for (int64_t i = 0; i < width; ++i) out[i] = converted(from[i]);
  }
}

// Multiplies a row that was taken, and adds one to it.
template <class E>
void adjust_row(const TakeRows& job, int64_t index, typename E::Stored* out) {
  const int64_t width = job.num_columns;
  if (job.scale != 1.0) {
    const Floats factor = broadcast(static_cast<float>(job.scale));
    combine_rows<E>(out, out, width, out, [=](Floats x, Floats) { return x * factor; });
  }
  if (job.addend) {
    const auto* addend =
        static_cast<const typename E::Stored*>(job.addend) + index * job.addend_stride;
    combine_rows<E>(out, addend, width, out, [](Floats x, Floats y) { return x + y; });
  }
}

template <class E, class Out>
void run_take_rows(const TakeRows& job, Workers& workers) {
  workers.pool.run((job.num_rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int) {
    const int64_t end = std::min(job.num_rows, (task + 1) * kRowsPerTask);
    for (int64_t i = task * kRowsPerTask; i < end; ++i) {
      Out* out = static_cast<Out*>(job.out) + i * job.num_columns;
      take_row<E>(job, job.rows[i] - job.first_row, out);
      if constexpr (std::is_same_v<Out, typename E::Stored>) adjust_row<E>(job, i, out);
    }
  });
}

}  // namespace

void run(const TakeRows& job, Workers& workers) {
  if (job.element == ElementType::kFloat32) {
    run_take_rows<Float32, float>(job, workers);
  } else if (job.out_is_float) {
    run_take_rows<Bfloat16, float>(job, workers);
  } else {
    run_take_rows<Bfloat16, uint16_t>(job, workers);
  }
}

}  // namespace baton
