#include "thread_pool.h"

#include "spin.h"

namespace baton {
namespace {

constexpr uint64_t kOpen = uint64_t{1} << 31;
constexpr uint64_t kWorkers = kOpen - 1;
constexpr uint64_t kNextJob = uint64_t{1} << 32;

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  try {
    for (int thread = 1; thread < num_threads; ++thread) {
      workers_.emplace_back([this, thread] { serve(thread); });
    }
  } catch (...) {
    end_workers();
    throw;
  }
}

ThreadPool::~ThreadPool() { end_workers(); }

void ThreadPool::end_workers() {
  stopping_.store(true);
  signal_.fetch_add(1);
  signal_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::run_job(Job job) {
  if (job.num_tasks == 0) return;
  if (workers_.empty() || job.num_tasks == 1) {
    job.call(job.body, 0, job.num_tasks, 0);
    return;
  }
  job_ = job;
  next_.store(0, std::memory_order_relaxed);
  const uint64_t number = (state_.load(std::memory_order_relaxed) & ~(kNextJob - 1)) + kNextJob;
  state_.store(number | kOpen, std::memory_order_release);
  signal_.fetch_add(1, std::memory_order_release);
  signal_.notify_all();
  take_tasks(0);
  state_.fetch_and(~kOpen, std::memory_order_acq_rel);
  const auto is_alone = [this] {
    return (state_.load(std::memory_order_acquire) & kWorkers) == 0;
  };
  // A worker still at its last task may have lost its core to another process.
  while (!spin(is_alone)) std::this_thread::yield();
}

void ThreadPool::take_tasks(int thread) {
  int64_t begin = next_.load(std::memory_order_relaxed);
  while (begin < job_.num_tasks) {
    const int64_t left = job_.num_tasks - begin;
    const int64_t end = begin + (job_.share == 1 ? 1 : (left + job_.share - 1) / job_.share);
    if (next_.compare_exchange_weak(begin, end, std::memory_order_relaxed)) {
      job_.call(job_.body, begin, end, thread);
      begin = next_.load(std::memory_order_relaxed);
    }
  }
}

bool ThreadPool::join() {
  uint64_t state = state_.load(std::memory_order_acquire);
  while (state & kOpen) {
    if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) return true;
  }
  return false;
}

void ThreadPool::serve(int thread) {
  uint32_t seen = 0;
  for (;;) {
    const auto has_signal = [&] { return signal_.load(std::memory_order_acquire) != seen; };
    if (!spin(has_signal)) signal_.wait(seen, std::memory_order_acquire);
    seen = signal_.load(std::memory_order_acquire);
    if (stopping_.load()) return;
    if (join()) {
      take_tasks(thread);
      state_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }
}

}  // namespace baton
