// Threads that share the tasks of one job at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace baton {

// The caller works too. A worker that comes late finds the job closed and is not waited for, so
// a neighbour on the same core delays a job by the one task it interrupted. Idle workers
// spin for some microseconds, since the next job of a step is that near, and then sleep.
class ThreadPool {
 public:
  // Throws std::system_error when the system makes no more threads; then there are none.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls task(index, thread) for each index below `num_tasks`; returns when all are done.
  // A task must not throw: the other threads would still be at the job.
  template <class Task>
  void run(int64_t num_tasks, const Task& task) {
    auto call = [](const void* body, int64_t begin, int64_t end, int thread) noexcept {
      for (int64_t index = begin; index < end; ++index) {
        (*static_cast<const Task*>(body))(index, thread);
      }
    };
    run_job({call, &task, num_tasks, 1});
  }

  // Calls task(begin, end, thread) for runs of neighbouring indices below `count`. A run is a
  // part of what is left, so that runs are long at first and no thread has much left at the end.
  template <class Task>
  void run_ranges(int64_t count, const Task& task) {
    auto call = [](const void* body, int64_t begin, int64_t end, int thread) noexcept {
      (*static_cast<const Task*>(body))(begin, end, thread);
    };
    run_job({call, &task, count, 2 * num_threads()});
  }

 private:
  struct Job {
    void (*call)(const void* body, int64_t begin, int64_t end, int thread) noexcept;
    const void* body;
    int64_t num_tasks;
    int64_t share;  // one of how many parts of what is left is taken at a time; 1: one task
  };

  void end_workers();
  void run_job(Job job);
  void take_tasks(int thread);
  void serve(int thread);
  bool join();

  Job job_{};
  alignas(64) std::atomic<int64_t> next_{0};
  // Number of the job << 32 | open flag << 31 | workers at it.
  alignas(64) std::atomic<uint64_t> state_{0};
  // Changes with each job and at the end: what sleeping workers wait on.
  alignas(64) std::atomic<uint32_t> signal_{0};
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;
};

}  // namespace baton
