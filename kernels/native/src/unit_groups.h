// Units of attention that a thread computes together, and their memory.
#pragma once

#include <algorithm>
#include <vector>

#include "attention_plan.h"
#include "tile.h"

namespace baton {

constexpr int kMostGroupUnits = 8;

// Units [first, first + count) of the plan, which read the same tiles, each of another KV head: the
// heads of a block lie side by side, so memory is read in longer runs.
struct UnitGroup {
  int64_t first;
  int count;
};

template <class Attention>
std::vector<UnitGroup> group_units(const PagedAttention& job, const Plan& plan, int num_threads) {
  const auto num_units = static_cast<int64_t>(plan.units.size());
  const int64_t most = std::clamp<int64_t>(num_units / num_threads, 1, kMostGroupUnits);
  std::vector<UnitGroup> groups;
  for (int64_t index = 0; index < num_units; ++index) {
    const Unit& unit = plan.units[index];
    if (!groups.empty() && groups.back().count < most) {
      const Unit& other = plan.units[groups.back().first];
      const bool reads_same_tiles =
          other.first == unit.first && other.last == unit.last && other.segment == unit.segment;
      if (reads_same_tiles && Attention(job, plan, unit).has_few_rows()) {
        ++groups.back().count;
        continue;
      }
    }
    groups.push_back({index, 1});
  }
  return groups;
}

// Memory of any group, by thread. Allocated before the tasks begin: a task must not throw.
class UnitMemory {
 public:
  template <class Attention>
  static UnitMemory reserve(const PagedAttention& job, const Plan& plan,
                            const std::vector<UnitGroup>& groups, Workers& workers) {
    UnitMemory memory;
    int64_t most_bytes = 0;
    for (const UnitGroup& group : groups) {
      const Attention attention(job, plan, plan.units[group.first]);
      memory.tile_bytes_ = std::max(memory.tile_bytes_, attention.tile_bytes());
      most_bytes = std::max(most_bytes, attention.memory_bytes());
      if (group.count > 1) {
        memory.unit_bytes_ = std::max(memory.unit_bytes_, attention.memory_bytes());
      }
    }
    most_bytes = std::max(most_bytes, kMostGroupUnits * memory.unit_bytes_);
    for (Scratch& own : workers.own) {
      void* place = own.reserve(memory.tile_bytes_ + most_bytes);
      memory.of_threads_.push_back(static_cast<char*>(place));
    }
    return memory;
  }

  // Memory that is used while a tile is computed.
  char* of_tiles(int thread) const { return of_threads_[static_cast<size_t>(thread)]; }
  char* of_unit(int thread, int number) const {
    return of_tiles(thread) + tile_bytes_ + number * unit_bytes_;
  }

 private:
  int64_t tile_bytes_ = 0, unit_bytes_ = 0;
  std::vector<char*> of_threads_;
};

}  // namespace baton
