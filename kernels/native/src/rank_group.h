// Ranks: processes of one machine that compute a model together, and the memory that they share.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <exception>
#include <vector>

namespace baton {

// Another rank has failed, was lost, or is late; the group cannot be used any more.
class RanksLost : public std::exception {};

// What one rank sees of its group. All ranks exchange the same messages in the same order. In each
// exchange a rank writes its slot, publishes it, and reads the slots of others. There are two slots
// per rank: a slot is written again once all ranks have published the exchange after the one that
// it was written for, and so have read it.
//
// A rank that waits spins for some microseconds and then sleeps, until the deadline or until any
// rank aborts the group.
class RankGroup {
 public:
  static constexpr int64_t kSlotBytes = int64_t{4} << 20;  // touched only as far as it is used
  static constexpr int kMaxRanks = 64;

  // Maps a file of zeros, which is made as long as necessary. Throws std::bad_alloc if the system
  // refuses.
  RankGroup(int file, int rank, int size);
  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // Sets the longest wait for another rank; a negative one never ends, as at first.
  void limit_waits(double timeout_s) { timeout_s_ = timeout_s; }

  // Begins an exchange; returns this rank's slot.
  void* begin();
  // Shows the slot to the other ranks.
  void publish();
  // Waits until a rank has published its slot, and returns it.
  const void* slot_of(int rank);
  // Does the work of `publish` and of `slot_of` for each rank, faster.
  void read_all(std::array<const float*, kMaxRanks>& parts);

  // Sends bytes to all ranks.
  void send(const void* data, int64_t num_bytes);
  // Waits for what rank 0 sends, as long as it takes if `waits_forever`; it is in the inbox until the
  // next call.
  void receive(bool waits_forever);
  const std::vector<char>& inbox() const { return inbox_; }

  // Makes all waits of all ranks fail, now and later. Any thread may call it.
  void abort();

 private:
  struct Region;
  char* slot(int rank) const;
  void wait(int rank, uint32_t sequence, double limit_s);
  void wake_waiting();
  bool is_published(int rank, uint32_t sequence) const;

  const int rank_, size_;
  double timeout_s_ = -1;
  int64_t num_bytes_ = 0;
  Region* region_ = nullptr;
  uint32_t sequence_ = 0;
  std::vector<char> inbox_;
};

}  // namespace baton
