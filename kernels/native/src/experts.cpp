// Mixtures of experts: the choice of each row's experts, and the weighted sum of their outputs.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "commands.h"
#include "element.h"

namespace baton {
namespace {

constexpr int64_t kLogitsPerTask = 1024;
constexpr int64_t kTermsPerTask = 16384;
constexpr int64_t kColumnsPerTask = 512;
constexpr float kMinWeightSum = 1e-20f;  // see kernels.MIN_WEIGHT_SUM

using Score = std::pair<float, int64_t>;  // and the number of the expert

constexpr auto is_higher = [](const Score& a, const Score& b) {
  return (std::isnan(a.first) && !std::isnan(b.first)) || a.first > b.first;
};

// Moves the `k` highest scores to the front, in descending order. Equal ones are in the order that
// `torch.topk` leaves them in on a CPU, which uses the same algorithms (ATen/native/TopKImpl.h).
void move_highest(Score* scores, int64_t count, int64_t k) {
  if (k * 64 <= count) {
    std::partial_sort(scores, scores + k, scores + count, is_higher);
  } else {
    std::nth_element(scores, scores + k - 1, scores + count, is_higher);
    std::sort(scores, scores + k - 1, is_higher);
  }
}

// Replaces values by their softmax.
void softmax(float* values, int64_t count) {
  const float maximum = *std::max_element(values, values + count);
  float total = 0;
  for (int64_t i = 0; i < count; ++i) {
    values[i] = std::exp(values[i] - maximum);
    total += values[i];
  }
  for (int64_t i = 0; i < count; ++i) values[i] /= total;
}

// Memory of a thread for one row.
struct RowMemory {
  float* scores;   // [num_experts]
  Score* ranking;  // [num_experts]
  Score* groups;   // [num_groups]
  Score* terms;    // [experts of a group]

  RowMemory(const RouteExperts& job, Scratch& scratch) {
    ranking = static_cast<Score*>(scratch.reserve(num_bytes(job)));
    groups = ranking + job.num_experts;
    terms = groups + job.num_groups;
    scores = reinterpret_cast<float*>(terms + job.num_experts / job.num_groups);
  }

  static int64_t num_bytes(const RouteExperts& job) {
    const int64_t num_scores =
        job.num_experts + job.num_groups + job.num_experts / job.num_groups;
    return num_scores * static_cast<int64_t>(sizeof(Score)) +
           job.num_experts * static_cast<int64_t>(sizeof(float));
  }
};

// Replaces the scores of experts outside of the groups with the highest scores by -infinity.
void keep_highest_groups(const RouteExperts& job, const RowMemory& memory) {
  const int64_t size = job.num_experts / job.num_groups;
  for (int64_t group = 0; group < job.num_groups; ++group) {
    std::copy_n(memory.ranking + group * size, size, memory.terms);
    move_highest(memory.terms, size, job.group_terms);
    float total = 0;
    for (int64_t i = 0; i < job.group_terms; ++i) total += memory.terms[i].first;
    memory.groups[group] = {total, group};
  }
  move_highest(memory.groups, job.num_groups, job.top_groups);
  for (int64_t i = job.top_groups; i < job.num_groups; ++i) {
    Score* group = memory.ranking + memory.groups[i].second * size;
    for (int64_t j = 0; j < size; ++j) group[j].first = -std::numeric_limits<float>::infinity();
  }
}

// Makes weights of the scores of a row's experts, which have the numbers `experts`.
template <class E>
void weigh(const RouteExperts& job, float* weights, const int32_t* experts) {
  if (job.scores == ExpertScores::kSoftmaxOfChosen) softmax(weights, job.top_k);
  float total = kMinWeightSum;
  for (int64_t i = 0; i < job.top_k; ++i) total += weights[i];
  for (int64_t i = 0; i < job.top_k; ++i) {
    if (job.normalizes) weights[i] /= total;
    weights[i] *= static_cast<float>(job.scale);
    if (job.expert_scales) weights[i] *= job.expert_scales[experts[i]];
    if (job.rounds) weights[i] = E::widen_one(E::narrow_one(weights[i]));
  }
}

// Writes the weights of a row's experts; `slots` gets the experts' numbers.
template <class E>
void choose(const RouteExperts& job, int64_t row, const RowMemory& memory) {
  const auto* logits =
      static_cast<const typename E::Stored*>(job.logits) + row * job.logits_stride;
  float* scores = memory.scores;
  for (int64_t i = 0; i < job.num_experts; ++i) scores[i] = E::widen_one(logits[i]);
  if (job.scores == ExpertScores::kSoftmax) softmax(scores, job.num_experts);
  if (job.scores == ExpertScores::kSigmoid) {
    for (int64_t i = 0; i < job.num_experts; ++i) scores[i] = 1 / (1 + std::exp(-scores[i]));
  }
  for (int64_t i = 0; i < job.num_experts; ++i) {
    memory.ranking[i] = {job.bias ? scores[i] + job.bias[i] : scores[i], i};
  }
  if (job.top_groups < job.num_groups) keep_highest_groups(job, memory);
  move_highest(memory.ranking, job.num_experts, job.top_k);
  float* weights = job.weights + row * job.top_k;
  int32_t* experts = job.slots + row * job.top_k;
  for (int64_t i = 0; i < job.top_k; ++i) {
    const int64_t expert = memory.ranking[i].second;
    weights[i] = scores[expert];
    experts[i] = static_cast<int32_t>(expert);
  }
  weigh<E>(job, weights, experts);
}

// Sorts the pairs of rows and experts by expert, and replaces experts by slots.
void assign_slots(const RouteExperts& job, int32_t* next) {
  const int64_t count = job.end_expert - job.first_expert, num_pairs = job.num_rows * job.top_k;
  std::fill_n(job.starts, count + 1, 0);
  const auto number = [&](int64_t pair) {
    const int64_t expert = job.slots[pair];
    return expert < job.end_expert ? expert - job.first_expert : -1;  // -1 or less: of other ranks
  };
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    if (number(pair) >= 0) ++job.starts[number(pair) + 1];
  }
  for (int64_t i = 0; i < count; ++i) {
    next[i] = job.starts[i];
    job.starts[i + 1] += job.starts[i];
  }
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    const int64_t expert = number(pair);
    const int32_t slot = expert < 0 ? -1 : next[expert]++;
    job.slots[pair] = slot;
    if (slot >= 0) job.rows[slot] = static_cast<int32_t>(pair / job.top_k);
  }
}

template <class E>
void run_route(const RouteExperts& job, Workers& workers) {
  const int64_t num_bytes = RowMemory::num_bytes(job);
  // Tasks must not throw, so memory is reserved first; each thread has its own.
  for (Scratch& scratch : workers.own) scratch.reserve(num_bytes);
  const int64_t rows_per_task = std::max<int64_t>(1, kLogitsPerTask / job.num_experts);
  const int64_t num_tasks = (job.num_rows + rows_per_task - 1) / rows_per_task;
  workers.pool.run(num_tasks, [&](int64_t task, int thread) {
    const RowMemory memory(job, workers.own[static_cast<size_t>(thread)]);
    const int64_t end = std::min(job.num_rows, (task + 1) * rows_per_task);
    for (int64_t row = task * rows_per_task; row < end; ++row) choose<E>(job, row, memory);
  });
  assign_slots(job, static_cast<int32_t*>(workers.own[0].reserve(num_bytes)));
}

template <class E, class Out>
class Combination {
 public:
  explicit Combination(const CombineExperts& job) : job_(job) {}

  // Computes columns begin to end of a row.
  void operator()(int64_t row, int64_t begin, int64_t end) const {
    auto* out = static_cast<typename Out::Stored*>(job_.out) + row * job_.width;
    const float gate = shared_gate(row);
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) Out::narrow_lanes(out + i, total<Floats>(row, i, gate));
    for (; i < end; ++i) out[i] = Out::narrow_one(total<float>(row, i, gate));
  }

 private:
  using Stored = typename E::Stored;

  template <class V>
  static V widen(const Stored* from) {
    if constexpr (sizeof(V) == sizeof(float)) return E::widen_one(*from);
    else return E::widen_lanes(from);
  }

  // The sum at a column, or at as many columns as V has lanes.
  template <class V>
  V total(int64_t row, int64_t column, float gate) const {
    V sum{};
    for (int64_t pair = row * job_.top_k; pair < (row + 1) * job_.top_k; ++pair) {
      const int64_t slot = job_.slots[pair];
      if (slot < 0) continue;  // an expert of another rank
      const auto* output = static_cast<const Stored*>(job_.outputs) + slot * job_.width + column;
      sum += widen<V>(output) * job_.weights[pair];
    }
    if (job_.shared) sum += load<V>(job_.shared + row * job_.width + column) * gate;
    if (job_.residual) {
      sum += widen<V>(static_cast<const Stored*>(job_.residual) + row * job_.residual_stride +
                      column);
    }
    return sum;
  }

  float shared_gate(int64_t row) const {
    if (!job_.shared_gate) return 1;
    const auto* gates = static_cast<const Stored*>(job_.shared_gate);
    return 1 / (1 + std::exp(-E::widen_one(gates[row * job_.gate_stride])));
  }

  const CombineExperts& job_;
};

template <class E, class Out>
void run_combine(const CombineExperts& job, Workers& workers) {
  const Combination<E, Out> combine(job);
  // A task is some rows, or a part of a row if it is long.
  const int64_t terms = job.width * (job.top_k + 1);
  const int64_t rows_per_task = std::max<int64_t>(1, kTermsPerTask / std::max<int64_t>(1, terms));
  const int64_t columns = terms <= kTermsPerTask ? job.width : kColumnsPerTask;
  const int64_t num_parts = (job.width + columns - 1) / columns;
  const int64_t num_runs = (job.num_rows + rows_per_task - 1) / rows_per_task;
  workers.pool.run(num_runs * num_parts, [&](int64_t task, int) {
    const int64_t first = task / num_parts * rows_per_task, part = task % num_parts;
    const int64_t last = std::min(job.num_rows, first + rows_per_task);
    const int64_t end = std::min(job.width, (part + 1) * columns);
    for (int64_t row = first; row < last; ++row) combine(row, part * columns, end);
  });
}

}  // namespace

void run(const RouteExperts& job, Workers& workers) {
  job.element == ElementType::kBfloat16 ? run_route<Bfloat16>(job, workers)
                                        : run_route<Float32>(job, workers);
}

void run(const CombineExperts& job, Workers& workers) {
  if (job.element == ElementType::kFloat32) {
    run_combine<Float32, Float32>(job, workers);
  } else if (job.out_is_float) {
    run_combine<Bfloat16, Float32>(job, workers);
  } else {
    run_combine<Bfloat16, Bfloat16>(job, workers);
  }
}

}  // namespace baton
