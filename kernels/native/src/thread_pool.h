// Threads that share the tasks of one job at a time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace baton {

// The caller works too. A worker that wakes late finds the job closed and is not waited for, so
// another process on the same core delays a job by no more than the task it interrupted. Idle
// workers spin for some microseconds, since a step's next job usually follows that soon, and then
// sleep.
class ThreadPool {
 public:
  // Throws std::system_error if the system refuses to create a thread; then none are left running.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls task(index, thread) for each index below `num_tasks`; returns when all are done.
  // A task must not throw: the other threads would still be working on the job.
  template <class Task>
  void run(int64_t num_tasks, const Task& task) {
    auto call = [](const void* body, int64_t begin, int64_t end, int thread) noexcept {
      for (int64_t index = begin; index < end; ++index) {
        (*static_cast<const Task*>(body))(index, thread);
      }
    };
    run_job({call, &task, num_tasks, 1});
  }

  // Calls task(begin, end, thread) for runs of adjacent indices below `count`. A run is a share of
  // the indices left, so that runs are long at first and short at the end.
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
    int64_t share;  // a run takes 1 / share of the indices left; 1: a single index
  };

  void end_workers();
  void run_job(Job job);
  void take_tasks(int thread);
  void serve(int thread);
  bool join();

  Job job_{};
  alignas(64) std::atomic<int64_t> next_{0};
  // Number of the job << 32 | open flag << 31 | workers working on it.
  alignas(64) std::atomic<uint64_t> state_{0};
  // Changes with each job and on shutdown; sleeping workers wait for a change.
  alignas(64) std::atomic<uint32_t> signal_{0};
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> workers_;
};

}  // namespace baton
