// Row look-ups in packed weights and other matrices.
#include <algorithm>
#include <type_traits>

#include "blocks.h"
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

// Floats of the rows of a task.
int64_t decoded_floats(const TakeRows& job) { return kRowsPerTask * job.num_columns; }

// Working memory for decoding them, and for a panel of rows that the matrix has one after another.
int64_t decoding_bytes(const TakeRows& job) {
  return decoded_floats(job) * static_cast<int64_t>(sizeof(float)) +
         geometry_of(job.format).panel_bytes(job.num_columns);
}

bool has_row(const TakeRows& job, int64_t row) { return row >= 0 && row < job.num_matrix_rows; }

// Decodes `count` rows from index `first` on, as far as the matrix has them.
const float* decode_rows(const TakeRows& job, int64_t first, int64_t count, void* memory) {
  auto* rows = static_cast<float*>(memory);
  auto* panel = reinterpret_cast<uint8_t*>(rows + decoded_floats(job));
  const auto* matrix = static_cast<const uint8_t*>(job.matrix);
  const int64_t panel_bytes = geometry_of(job.format).panel_bytes(job.num_columns);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = job.rows[first + i] - job.first_row;
    if (!has_row(job, row)) continue;
    if (job.is_packed) {
      decode_outputs(job.format, matrix + row / kPanelColumns * panel_bytes, job.num_columns,
                     static_cast<int>(row % kPanelColumns), 1, rows + i * job.num_columns);
    } else {
      pack_blocks({job.format, matrix + row * job.row_stride, job.row_stride, 1, job.num_columns,
                   panel, i, -1});
    }
  }
  if (!job.is_packed) {
    decode_outputs(job.format, panel, job.num_columns, 0, static_cast<int>(count), rows);
  }
  return rows;
}

// Writes one row of the matrix; a row of zeros if the matrix has no such row. `decoded` is the row
// of a matrix with a storage format.
template <class E, class Out>
void take_row(const TakeRows& job, int64_t row, const float* decoded, Out* out) {
  const int64_t width = job.num_columns;
  const auto converted = [](typename E::Stored value) {
    if constexpr (std::is_same_v<Out, typename E::Stored>) return value;
    else return E::widen_one(value);
  };
  if (!has_row(job, row)) {
    std::fill_n(out, width, Out{});
  } else if (job.format != Format::kDense) {
    for (int64_t i = 0; i < width; ++i) out[i] = converted(E::narrow_one(decoded[i]));
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
  const bool is_decoded = job.format != Format::kDense;
  if (is_decoded) {
    for (Scratch& own : workers.own) own.reserve(decoding_bytes(job));
  }
  const int64_t num_tasks = (job.num_rows + kRowsPerTask - 1) / kRowsPerTask;
  workers.pool.run(num_tasks, [&](int64_t task, int thread) {
    const int64_t first = task * kRowsPerTask, end = std::min(job.num_rows, first + kRowsPerTask);
    const float* decoded = nullptr;
    if (is_decoded) {
      void* memory = workers.own[static_cast<size_t>(thread)].reserve(0);
      decoded = decode_rows(job, first, end - first, memory);
    }
    for (int64_t i = first; i < end; ++i) {
      Out* out = static_cast<Out*>(job.out) + i * job.num_columns;
      take_row<E>(job, job.rows[i] - job.first_row, decoded, out);
      if (decoded) decoded += job.num_columns;
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
