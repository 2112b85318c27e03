// Operations on single rows: norms, gates, rotary angles, maxima.
#include <algorithm>
#include <cmath>
#include <limits>

#include "activations.h"
#include "commands.h"
#include "element.h"
#include "norms.h"
#include "row_maximum.h"
#include "row_tasks.h"

namespace baton {
namespace {

// Sums function(x) over a row; the function takes a Floats or a float.
template <class E, class Function>
float sum_of(const typename E::Stored* input, int64_t size, const Function& function) {
  Floats lanes{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) lanes += function(E::widen_lanes(input + i));
  float total = sum(lanes);
  for (; i < size; ++i) total += function(E::widen_one(input[i]));
  return total;
}

template <class E>
void normalize_centered(const LayerNorm& job, const typename E::Stored* input,
                        typename E::Stored* out) {
  const auto* weight = static_cast<const typename E::Stored*>(job.weight);
  const auto* bias = static_cast<const typename E::Stored*>(job.bias);
  const auto size = static_cast<float>(job.size);
  const float mean = sum_of<E>(input, job.size, [](auto x) { return x; }) / size;
  const float squares =
      sum_of<E>(input, job.size, [mean](auto x) { return (x - mean) * (x - mean); });
  const float factor = 1.0f / std::sqrt(squares / size + static_cast<float>(job.eps));
  int64_t i = 0;
  for (; i + kLanes <= job.size; i += kLanes) {
    Floats normed = (E::widen_lanes(input + i) - mean) * factor;
    if (weight) normed *= E::widen_lanes(weight + i);
    if (bias) normed += E::widen_lanes(bias + i);
    E::narrow_lanes(out + i, normed);
  }
  for (; i < job.size; ++i) {
    float normed = (E::widen_one(input[i]) - mean) * factor;
    if (weight) normed *= E::widen_one(weight[i]);
    if (bias) normed += E::widen_one(bias[i]);
    out[i] = E::narrow_one(normed);
  }
}

// Calls normalize(input, out) for each row of a norm, then adds the residual.
template <class E, class Norm, class Normalize>
void run_norm(const Norm& job, Workers& workers, const Normalize& normalize) {
  using Stored = typename E::Stored;
  for_rows(job.num_rows, job.size, workers, [&](int64_t row) {
    auto* out = static_cast<Stored*>(job.out) + row * job.size;
    normalize(static_cast<const Stored*>(job.input) + row * job.input_stride, out);
    if (job.residual) {
      const auto* residual = static_cast<const Stored*>(job.residual) + row * job.residual_stride;
      combine_rows<E>(out, residual, job.size, out, [](Floats x, Floats y) { return x + y; });
    }
  });
}

template <class E>
void run_layer_norm(const LayerNorm& job, Workers& workers) {
  run_norm<E>(job, workers, [&](const auto* input, auto* out) {
    normalize_centered<E>(job, input, out);
  });
}

template <class E>
void run_rms_norm(const RmsNorm& job, Workers& workers) {
  const auto* weight = static_cast<const typename E::Stored*>(job.weight);
  run_norm<E>(job, workers, [&](const auto* input, auto* out) {
    normalize_as<E>(job.kind, input, weight, job.size, job.eps, out);
  });
}

template <class E>
void run_gate_rows(const GateRows& job, Workers& workers) {
  using Stored = typename E::Stored;
  with_activation(job.activation, [&](auto function) {
    const auto gated = [&](Floats value, Floats gate) {
      return gated_value<E>(job.activation, value) * rounded<E>(function(gate));
    };
    for_rows(job.num_rows, job.size, workers, [&](int64_t row) {
      combine_rows<E>(static_cast<const Stored*>(job.values) + row * job.values_stride,
                      static_cast<const Stored*>(job.gates) + row * job.gates_stride, job.size,
                      static_cast<Stored*>(job.out) + row * job.size, gated);
    });
  });
}

}  // namespace

void run(const RmsNorm& job, Workers& workers) {
  job.element == ElementType::kBfloat16 ? run_rms_norm<Bfloat16>(job, workers)
                                        : run_rms_norm<Float32>(job, workers);
}

void run(const LayerNorm& job, Workers& workers) {
  job.element == ElementType::kBfloat16 ? run_layer_norm<Bfloat16>(job, workers)
                                        : run_layer_norm<Float32>(job, workers);
}

void run(const RotaryAngles& job, Workers& workers) {
  const auto amplitude = static_cast<float>(job.amplitude);
  // A sine takes as long as some tens of elements of the other operations.
  for_rows(job.num_tokens, job.half_dim * 32, workers, [&](int64_t token) {
    const auto position = static_cast<float>(job.positions[token]);
    for (int64_t i = 0; i < job.half_dim; ++i) {
      const float angle = position * job.frequencies[i];
      job.cos[token * job.half_dim + i] = std::cos(angle) * amplitude;
      job.sin[token * job.half_dim + i] = std::sin(angle) * amplitude;
    }
  });
}

void run(const GateRows& job, Workers& workers) {
  job.element == ElementType::kBfloat16 ? run_gate_rows<Bfloat16>(job, workers)
                                        : run_gate_rows<Float32>(job, workers);
}

void run(const Argmax& job, Workers& workers) {
  for_rows(job.num_rows, job.size, workers, [&](int64_t row) {
    find_maximum(job.logits + row * job.logits_stride, job.size, job.maxima + row,
                 job.indices + row);
  });
}

}  // namespace baton
