// Sums and joins of what ranks have computed.
#include <algorithm>
#include <array>
#include <cstring>

#include "commands.h"
#include "element.h"

namespace baton {
namespace {

constexpr int64_t kFloatBytes = sizeof(float);
constexpr int64_t kRowsPerTask = 4;
// Longer sums are computed in pieces of this size, which stay in the cache.
constexpr int64_t kPieceFloats = 1 << 16;

// Adds up one row: the ranks' parts in their order, so that all ranks get the same bits.
template <class E>
void sum_row(const ReduceRanks& job, const std::array<const float*, RankGroup::kMaxRanks>& parts,
             int64_t in_piece, int64_t row) {
  using Stored = typename E::Stored;
  const int64_t size = job.size, num_ranks = job.ranks->size();
  const auto* bias = static_cast<const Stored*>(job.bias);
  const auto* residual = static_cast<const Stored*>(job.residual);
  if (residual) residual += row * job.residual_stride;
  auto* out = static_cast<Stored*>(job.out) + row * size;
  const auto scale = static_cast<float>(job.scale);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    Floats total = load<Floats>(parts[0] + in_piece * size + i);
    for (int64_t rank = 1; rank < num_ranks; ++rank) {
      total += load<Floats>(parts[static_cast<size_t>(rank)] + in_piece * size + i);
    }
    if (bias) total += E::widen_lanes(bias + i);
    total *= broadcast(scale);
    if (residual) total += E::widen_lanes(residual + i);
    E::narrow_lanes(out + i, total);
  }
  for (; i < size; ++i) {
    float total = parts[0][in_piece * size + i];
    for (int64_t rank = 1; rank < num_ranks; ++rank) {
      total += parts[static_cast<size_t>(rank)][in_piece * size + i];
    }
    if (bias) total += E::widen_one(bias[i]);
    total *= scale;
    if (residual) total += E::widen_one(residual[i]);
    out[i] = E::narrow_one(total);
  }
}

template <class E>
void run_reduce(const ReduceRanks& job, Workers& workers) {
  RankGroup& ranks = *job.ranks;
  std::array<const float*, RankGroup::kMaxRanks> parts{};
  const int64_t rows_per_piece = std::max<int64_t>(1, kPieceFloats / std::max<int64_t>(1, job.size));
  for (int64_t first = 0; first < job.num_rows; first += rows_per_piece) {
    const int64_t count = std::min(rows_per_piece, job.num_rows - first);
    std::memcpy(ranks.begin(), job.partial + first * job.size,
                static_cast<size_t>(count * job.size * kFloatBytes));
    ranks.read_all(parts);
    workers.pool.run((count + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int) {
      const int64_t end = std::min(count, (task + 1) * kRowsPerTask);
      for (int64_t row = task * kRowsPerTask; row < end; ++row) {
        sum_row<E>(job, parts, row, first + row);
      }
    });
  }
}

}  // namespace

void run(const ReduceRanks& job, Workers& workers) {
  job.element == ElementType::kBfloat16 ? run_reduce<Bfloat16>(job, workers)
                                        : run_reduce<Float32>(job, workers);
}

void run(const GatherColumns& job, Workers&) {
  RankGroup& ranks = *job.ranks;
  const auto first_column = [&](int rank) { return rank * job.num_columns / ranks.size(); };
  const auto width_of = [&](int rank) { return first_column(rank + 1) - first_column(rank); };
  const int64_t width = width_of(ranks.rank());
  const int64_t widest = (job.num_columns + ranks.size() - 1) / ranks.size();
  const int64_t rows_per_piece = std::max<int64_t>(1, RankGroup::kSlotBytes / kFloatBytes / widest);
  for (int64_t first = 0; first < job.num_rows; first += rows_per_piece) {
    const int64_t count = std::min(rows_per_piece, job.num_rows - first);
    std::memcpy(ranks.begin(), job.part + first * width,
                static_cast<size_t>(count * width * kFloatBytes));
    ranks.publish();
    if (!job.out) continue;
    for (int rank = 0; rank < ranks.size(); ++rank) {
      const auto* part = static_cast<const float*>(ranks.slot_of(rank));
      for (int64_t row = 0; row < count; ++row) {
        std::copy_n(part + row * width_of(rank), width_of(rank),
                    job.out + (first + row) * job.num_columns + first_column(rank));
      }
    }
  }
}

}  // namespace baton
