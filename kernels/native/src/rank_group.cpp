#include "rank_group.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#endif

#include "spin.h"

namespace baton {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLongestSleep = std::chrono::milliseconds(100);
constexpr int64_t kLengthBytes = 8;

// Sleeps while `word` has a value, for a while at most. Processes share the word.
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
  const timespec time{0, std::chrono::nanoseconds(kLongestSleep).count()};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &time, nullptr, 0);
#else
  if (word.load() == value) std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

void wake_sleepers([[maybe_unused]] std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

}  // namespace

struct RankGroup::Region {
  struct alignas(64) Progress {
    std::atomic<uint32_t> published;  // the number of the last exchange
    std::atomic<uint32_t> num_sleepers;
  };
  alignas(64) std::atomic<uint32_t> is_aborted;
  Progress ranks[kMaxRanks];
  alignas(4096) char slots[];
};

RankGroup::RankGroup(int file, int rank, int size) : rank_(rank), size_(size) {
  num_bytes_ = static_cast<int64_t>(sizeof(Region)) + 2 * size * kSlotBytes;
  if (ftruncate(file, num_bytes_) != 0) throw std::bad_alloc();
  void* memory = mmap(nullptr, static_cast<size_t>(num_bytes_), PROT_READ | PROT_WRITE, MAP_SHARED,
                      file, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  region_ = static_cast<Region*>(memory);
}

RankGroup::~RankGroup() { munmap(region_, static_cast<size_t>(num_bytes_)); }

char* RankGroup::slot(int rank) const {
  return region_->slots + (sequence_ % 2 * size_ + rank) * kSlotBytes;
}

void* RankGroup::begin() {
  for (int rank = 0; rank < size_; ++rank) wait(rank, sequence_, timeout_s_);
  ++sequence_;
  return slot(rank_);
}

void RankGroup::publish() {
  region_->ranks[rank_].published.store(sequence_, std::memory_order_release);
  wake_waiting();
}

void RankGroup::read_all(std::array<const float*, kMaxRanks>& parts) {
  region_->ranks[rank_].published.store(sequence_, std::memory_order_release);
  // A rank that sleeps is woken a microsecond later than by `publish`: its memory barrier would
  // delay the others' slots, which mostly are about to arrive.
  int num_arrived = 0;
  for (int look = 0; look < kPausesPerLook && num_arrived < size_; ++look) {
    if (num_arrived == rank_ || is_published(num_arrived, sequence_)) {
      ++num_arrived;
    } else {
      pause();
    }
  }
  wake_waiting();
  for (int rank = 0; rank < size_; ++rank) {
    parts[static_cast<size_t>(rank)] = static_cast<const float*>(slot_of(rank));
  }
}

const void* RankGroup::slot_of(int rank) {
  wait(rank, sequence_, timeout_s_);
  return slot(rank);
}

void RankGroup::wake_waiting() {
  auto& own = region_->ranks[rank_];
  // A rank that goes to sleep counts itself before it looks: one of the two sees the other.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (own.num_sleepers.load()) wake_sleepers(own.published);
}

bool RankGroup::is_published(int rank, uint32_t sequence) const {
  const uint32_t published = region_->ranks[rank].published.load(std::memory_order_acquire);
  return static_cast<int32_t>(published - sequence) >= 0;
}

void RankGroup::wait(int rank, uint32_t sequence, double limit_s) {
  auto& other = region_->ranks[rank];
  const auto is_there = [&] { return is_published(rank, sequence); };
  if (rank == rank_ || is_there() || spin(is_there)) return;
  const auto began = Clock::now();
  const std::chrono::duration<double> limit(limit_s);
  for (;;) {
    if (region_->is_aborted.load()) throw RanksLost();
    other.num_sleepers.fetch_add(1);
    const uint32_t seen = other.published.load();
    if (static_cast<int32_t>(seen - sequence) < 0) sleep_while(other.published, seen);
    other.num_sleepers.fetch_sub(1);
    if (is_there()) return;
    if (limit_s >= 0 && Clock::now() - began > limit) {
      abort();
      throw RanksLost();
    }
  }
}

void RankGroup::abort() {
  region_->is_aborted.store(1);
  for (int rank = 0; rank < size_; ++rank) wake_sleepers(region_->ranks[rank].published);
}

void RankGroup::send(const void* data, int64_t num_bytes) {
  const char* from = static_cast<const char*>(data);
  int64_t left = num_bytes;
  do {
    char* to = static_cast<char*>(begin());
    const int64_t part = std::min(left, kSlotBytes - kLengthBytes);
    std::memcpy(to, &left, kLengthBytes);
    std::memcpy(to + kLengthBytes, from, static_cast<size_t>(part));
    publish();
    from += part;
    left -= part;
  } while (left > 0);
}

void RankGroup::receive(bool waits_forever) {
  inbox_.clear();
  int64_t left;
  do {
    begin();
    publish();
    wait(0, sequence_, waits_forever ? -1 : timeout_s_);
    const char* part = slot(0);
    std::memcpy(&left, part, kLengthBytes);
    part += kLengthBytes;
    const int64_t length = std::min(left, kSlotBytes - kLengthBytes);
    inbox_.insert(inbox_.end(), part, part + length);
    left -= length;
  } while (left > 0);
}

}  // namespace baton
