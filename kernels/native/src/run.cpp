// The library's interface: plain C, for ctypes.
#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>
#include <system_error>
#include <utility>
#include <vector>

#include "blocks.h"
#include "commands.h"
#include "pack.h"

namespace baton {

void* Scratch::reserve(int64_t num_bytes) {
  if (num_bytes > num_bytes_) {
    std::free(memory_);
    num_bytes_ = (num_bytes + 4095) / 4096 * 4096;
    memory_ = std::aligned_alloc(64, static_cast<size_t>(num_bytes_));
    if (!memory_) {
      num_bytes_ = 0;
      throw std::bad_alloc();
    }
  }
  return memory_;
}

Scratch::~Scratch() { std::free(memory_); }

namespace {

std::mutex running;  // one step computes at a time: all steps use the same cores
Workers* workers = nullptr;  // never freed: at exit a Python thread may still compute
int64_t wanted_threads = 1;

Workers& ready_workers() {
  if (!workers) workers = new Workers(static_cast<int>(wanted_threads));
  return *workers;
}

// A fork copies the memory, but only the calling thread: in the child neither the workers exist
// nor the thread that held the lock. The child creates new ones when it first computes.
void forget_threads() {
  new (&running) std::mutex;
  workers = nullptr;
}

const int watches_forks = pthread_atfork(nullptr, nullptr, forget_threads);

template <class Arguments>
void run_as(const Command& command) {
  static_assert(sizeof(Arguments) <= sizeof command.fields);
  run(*reinterpret_cast<const Arguments*>(command.fields), ready_workers());
}

void run_one(const Command& command) {
  switch (command.code) {
    case Code::kLinear: return run_as<Linear>(command);
    case Code::kTakeRows: return run_as<TakeRows>(command);
    case Code::kRmsNorm: return run_as<RmsNorm>(command);
    case Code::kRotaryAngles: return run_as<RotaryAngles>(command);
    case Code::kRotateAndWriteKv: return run_as<RotateAndWriteKv>(command);
    case Code::kPagedAttention: return run_as<PagedAttention>(command);
    case Code::kArgmax: return run_as<Argmax>(command);
    case Code::kApplyLogitRules: return run_as<ApplyLogitRules>(command);
    case Code::kDrawTokens: return run_as<DrawTokens>(command);
    case Code::kReduceRanks: return run_as<ReduceRanks>(command);
    case Code::kGatherColumns: return run_as<GatherColumns>(command);
    case Code::kRouteExperts: return run_as<RouteExperts>(command);
    case Code::kExpertLinear: return run_as<ExpertLinear>(command);
    case Code::kCombineExperts: return run_as<CombineExperts>(command);
    case Code::kShortConv: return run_as<ShortConv>(command);
    case Code::kGateRows: return run_as<GateRows>(command);
    case Code::kGatedDelta: return run_as<GatedDelta>(command);
    case Code::kLayerNorm: return run_as<LayerNorm>(command);
    case Code::kHeadLinear: return run_as<HeadLinear>(command);
    case Code::kRotateAndWriteLatent: return run_as<RotateAndWriteLatent>(command);
  }
}

// Return values of the functions below; kernels/library/commands.py mirrors them.
enum Outcome : int64_t { kDone = 0, kNoMemory = 1, kNoThreads = 2, kRanksLost = 3 };

template <class Body>
Outcome outcome_of(const Body& body) {
  try {
    body();
    return kDone;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  } catch (const std::system_error&) {
    return kNoThreads;
  } catch (const RanksLost&) {
    return kRanksLost;
  }
}

}  // namespace
}  // namespace baton

using namespace baton;

extern "C" {

// Runs commands in order.
int64_t baton_run(const void* commands, int64_t count) {
  const std::lock_guard<std::mutex> lock(running);
  return outcome_of([=] {
    const auto* first = static_cast<const Command*>(commands);
    for (int64_t i = 0; i < count; ++i) run_one(first[i]);
  });
}

// Creates the threads at once, so that a caller that requests too many gets an error; the number
// then stays as it was.
int64_t baton_set_num_threads(int64_t num_threads) {
  const std::lock_guard<std::mutex> lock(running);
  if (num_threads == wanted_threads) return kDone;
  delete workers;
  workers = nullptr;
  const int64_t former = std::exchange(wanted_threads, num_threads);
  const Outcome outcome = outcome_of(ready_workers);
  if (outcome != kDone) wanted_threads = former;
  return outcome;
}

int64_t baton_num_threads() {
  const std::lock_guard<std::mutex> lock(running);
  return wanted_threads;
}

// Packs rows of a matrix [num_rows, num_columns] into a weight; see pack.h.
void baton_pack(int64_t element, const void* source, int64_t row_stride, int64_t column_stride,
                int64_t num_rows, int64_t num_columns, uint32_t* weight, int64_t first_row,
                int64_t paired_part) {
  pack({static_cast<ElementType>(element), source, row_stride, column_stride, num_rows,
        num_columns, weight, first_row, paired_part});
}

// Packs rows of blocks [num_rows, row_bytes] into a weight with a storage format; see formats.h.
void baton_pack_blocks(int64_t format, const void* source, int64_t row_bytes, int64_t num_rows,
                       int64_t num_columns, void* weight, int64_t first_row,
                       int64_t paired_part) {
  pack_blocks({static_cast<Format>(format), static_cast<const uint8_t*>(source), row_bytes,
               num_rows, num_columns, static_cast<uint8_t*>(weight), first_row, paired_part});
}

// Decodes rows of blocks into `out`: [num_rows, num_columns].
int64_t baton_decode_rows(int64_t format, const void* source, int64_t row_bytes, int64_t num_rows,
                          int64_t num_columns, float* out) {
  return outcome_of([=] {
    const auto stored = static_cast<Format>(format);
    const auto num_bytes = geometry_of(stored).panel_bytes(num_columns);
    std::vector<uint8_t> panel(static_cast<size_t>(num_bytes));
    const auto* rows = static_cast<const uint8_t*>(source);
    for (int64_t i = 0; i < num_rows; i += kPanelColumns) {
      const int64_t count = std::min<int64_t>(kPanelColumns, num_rows - i);
      pack_blocks({stored, rows + i * row_bytes, row_bytes, count, num_columns, panel.data(), 0,
                   -1});
      decode_outputs(stored, panel.data(), num_columns, 0, static_cast<int>(count),
                     out + i * num_columns);
    }
  });
}

// Returns the bytes of a weight with a storage format, also of one that pairs two parts.
int64_t baton_quantized_bytes(int64_t format, int64_t num_rows, int64_t num_columns) {
  const int64_t num_panels = (num_rows + kPanelColumns - 1) / kPanelColumns;
  return num_panels * geometry_of(static_cast<Format>(format)).panel_bytes(num_columns);
}

// Returns a rank's view of its group; null if the system refuses the memory. See rank_group.h.
RankGroup* baton_open_ranks(int64_t file, int64_t rank, int64_t size) {
  try {
    return new RankGroup(static_cast<int>(file), static_cast<int>(rank), static_cast<int>(size));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void baton_close_ranks(RankGroup* ranks) { delete ranks; }

void baton_limit_rank_waits(RankGroup* ranks, double timeout_s) { ranks->limit_waits(timeout_s); }

void baton_abort_ranks(RankGroup* ranks) { ranks->abort(); }

int64_t baton_send_to_ranks(RankGroup* ranks, const void* data, int64_t num_bytes) {
  return outcome_of([=] { ranks->send(data, num_bytes); });
}

int64_t baton_receive_from_rank_0(RankGroup* ranks, int64_t waits_forever) {
  return outcome_of([=] { ranks->receive(waits_forever != 0); });
}

const char* baton_inbox(const RankGroup* ranks) { return ranks->inbox().data(); }

int64_t baton_inbox_bytes(const RankGroup* ranks) {
  return static_cast<int64_t>(ranks->inbox().size());
}

}  // extern "C"
