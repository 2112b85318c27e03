// Operations on rows that divide them among the threads.
#pragma once

#include <algorithm>

#include "commands.h"

namespace baton {

constexpr int64_t kElementsPerTask = 8192;  // some microseconds: enough for a task

// Divides `num_rows` into runs of rows that are large enough for a task.
template <class Body>
void for_rows(int64_t num_rows, int64_t row_size, Workers& workers, const Body& body) {
  const int64_t rows_per_task =
      std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, row_size));
  workers.pool.run((num_rows + rows_per_task - 1) / rows_per_task, [&](int64_t task, int) {
    const int64_t end = std::min(num_rows, (task + 1) * rows_per_task);
    for (int64_t row = task * rows_per_task; row < end; ++row) body(row);
  });
}

}  // namespace baton
