// Operations on single rows: norms, gates, rotary angles and rotation, KV writes, maxima.
#include <algorithm>
#include <cmath>
#include <limits>

#include "activations.h"
#include "commands.h"
#include "element.h"
#include "row_maximum.h"

namespace baton {
namespace {

constexpr int64_t kElementsPerTask = 8192;  // some microseconds: enough for a task

// Divides `num_rows` into runs of rows that are large enough for a task.
template <class Body>
void for_rows(int64_t num_rows, int64_t row_size, Workers& workers, const Body& body) {
  const int64_t rows_per_task =
      std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, row_size));
  workers.pool.run((num_rows + rows_per_task - 1) / rows_per_task, [&](int64_t task, int) {
    const int64_t end = std::min(num_rows, (task + 1) * rows_per_task);
    for (int64_t row = task * rows_per_task; row < end; ++row) body(row);
  });
}

// A normalized value times the norm's factor.
template <class E, NormKind kind>
Floats times_weight(Floats normed, Floats weight) {
  if constexpr (kind == NormKind::kWide) return normed * weight;
  if constexpr (kind == NormKind::kOffset) return normed * (broadcast(1.0f) + weight);
  return rounded<E>(normed) * weight;
}

template <class E, NormKind kind>
float times_weight(float normed, float weight) {
  if constexpr (kind == NormKind::kWide) return normed * weight;
  if constexpr (kind == NormKind::kOffset) return normed * (1.0f + weight);
  return E::widen_one(E::narrow_one(normed)) * weight;
}

// The factor that makes the mean of a row's squares 1.
template <class E>
float norm_factor(const typename E::Stored* input, int64_t size, double eps) {
  Floats squares{};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Floats values = E::widen_lanes(input + i);
    squares += values * values;
  }
  float total = sum(squares);
  for (; i < size; ++i) total += E::widen_one(input[i]) * E::widen_one(input[i]);
  return 1.0f / std::sqrt(total / static_cast<float>(size) + static_cast<float>(eps));
}

// `out` may be `input`.
template <class E, NormKind kind>
void normalize(const typename E::Stored* input, const typename E::Stored* weight, int64_t size,
               double eps, typename E::Stored* out) {
  const float factor = norm_factor<E>(input, size, eps);
  int64_t i;
  for (i = 0; i + kLanes <= size; i += kLanes) {
    const Floats normed = E::widen_lanes(input + i) * broadcast(factor);
    E::narrow_lanes(out + i, times_weight<E, kind>(normed, E::widen_lanes(weight + i)));
  }
  for (; i < size; ++i) {
    const float normed = E::widen_one(input[i]) * factor;
    out[i] = E::narrow_one(times_weight<E, kind>(normed, E::widen_one(weight[i])));
  }
}

// The same without a weight, in place.
template <class E>
void normalize_plainly(typename E::Stored* row, int64_t size, double eps) {
  const float factor = norm_factor<E>(row, size, eps);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    E::narrow_lanes(row + i, E::widen_lanes(row + i) * broadcast(factor));
  }
  for (; i < size; ++i) row[i] = E::narrow_one(E::widen_one(row[i]) * factor);
}

template <class E>
void normalize_as(NormKind kind, const typename E::Stored* input,
                  const typename E::Stored* weight, int64_t size, double eps,
                  typename E::Stored* out) {
  switch (kind) {
    case NormKind::kRounded:
      return normalize<E, NormKind::kRounded>(input, weight, size, eps, out);
    case NormKind::kWide: return normalize<E, NormKind::kWide>(input, weight, size, eps, out);
    case NormKind::kOffset: return normalize<E, NormKind::kOffset>(input, weight, size, eps, out);
  }
}

// Rotates the first 2 * half_dim elements of one head by the token's angles (arXiv:2104.09864,
// half-split pairs).
template <class E>
void rotate(typename E::Stored* head, const float* cos, const float* sin, int64_t half_dim) {
  auto* upper = head + half_dim;
  int64_t i = 0;
  for (; i + kLanes <= half_dim; i += kLanes) {
    const Floats a = E::widen_lanes(head + i), b = E::widen_lanes(upper + i);
    const Floats c = load<Floats>(cos + i), s = load<Floats>(sin + i);
    E::narrow_lanes(head + i, a * c - b * s);
    E::narrow_lanes(upper + i, b * c + a * s);
  }
  for (; i < half_dim; ++i) {
    const float a = E::widen_one(head[i]), b = E::widen_one(upper[i]);
    head[i] = E::narrow_one(a * cos[i] - b * sin[i]);
    upper[i] = E::narrow_one(b * cos[i] + a * sin[i]);
  }
}

template <class E>
void prepare_head(const RotateAndWriteKv& job, int64_t token, typename E::Stored* head,
                  const void* norm) {
  if (norm) {
    normalize_as<E>(job.norm_kind, head, static_cast<const typename E::Stored*>(norm),
                    job.head_dim, job.eps, head);
  }
  if (job.cos) {
    const int64_t half_dim = job.rotary_half;
    rotate<E>(head, job.cos + token * half_dim, job.sin + token * half_dim, half_dim);
  }
}

template <class E>
void rotate_and_write_token(const RotateAndWriteKv& job, int64_t token) {
  using Stored = typename E::Stored;
  const int64_t slot = job.batch->slot_mapping[token];
  auto* query = static_cast<Stored*>(job.query) + token * job.query_stride;
  auto* key = static_cast<Stored*>(job.key) + token * job.key_stride;
  const auto* value = static_cast<const Stored*>(job.value) + token * job.value_stride;
  auto* place = static_cast<Stored*>(job.cache) + slot / job.block_size * job.block_stride +
                slot % job.block_size * job.slot_stride;
  const auto num_bytes = static_cast<size_t>(job.head_dim) * sizeof(Stored);
  for (int64_t head = 0; head < job.num_heads; ++head) {
    prepare_head<E>(job, token, query + head * job.head_dim, job.query_norm);
  }
  for (int64_t head = 0; head < job.num_kv_heads; ++head) {
    // The value comes first, as it may lie where the key is prepared.
    auto* key_place = place + head * job.head_stride;
    auto* value_place = key_place + job.value_offset;
    std::memcpy(value_place, value + head * job.head_dim, num_bytes);
    if (job.norms_values) normalize_plainly<E>(value_place, job.head_dim, job.eps);
    prepare_head<E>(job, token, key + head * job.head_dim, job.key_norm);
    std::memcpy(key_place, key + head * job.head_dim, num_bytes);
  }
}

template <class E>
void rotate_and_write_latent(const RotateAndWriteLatent& job, int64_t token) {
  using Stored = typename E::Stored;
  const float* cos = job.cos + token * job.rotary_half;
  const float* sin = job.sin + token * job.rotary_half;
  auto* query = static_cast<Stored*>(job.query) + token * job.query_stride;
  for (int64_t head = 1; head <= job.num_heads; ++head) {
    rotate<E>(query + head * job.query_dim - 2 * job.rotary_half, cos, sin, job.rotary_half);
  }
  auto* latent = static_cast<Stored*>(job.latent) + token * job.latent_stride;
  normalize<E, NormKind::kRounded>(latent, static_cast<const Stored*>(job.norm), job.latent_dim,
                                   job.eps, latent);
  rotate<E>(latent + job.latent_dim, cos, sin, job.rotary_half);
  const int64_t slot = job.batch->slot_mapping[token];
  auto* place = static_cast<Stored*>(job.cache) + slot / job.block_size * job.block_stride +
                slot % job.block_size * job.slot_stride;
  const int64_t size = job.latent_dim + 2 * job.rotary_half;
  std::memcpy(place, latent, static_cast<size_t>(size) * sizeof(Stored));
}

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

template <class E>
void run_rotate_and_write(const RotateAndWriteKv& job, Workers& workers) {
  const int64_t token_size = (job.num_heads + 2 * job.num_kv_heads) * job.head_dim;
  for_rows(job.batch->num_tokens, token_size, workers,
           [&](int64_t token) { rotate_and_write_token<E>(job, token); });
}

template <class E>
void run_rotate_and_write_latent(const RotateAndWriteLatent& job, Workers& workers) {
  const int64_t token_size = 2 * job.num_heads * job.rotary_half + job.latent_dim;
  for_rows(job.batch->num_tokens, token_size, workers,
           [&](int64_t token) { rotate_and_write_latent<E>(job, token); });
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

void run(const RotateAndWriteKv& job, Workers& workers) {
  job.element == ElementType::kBfloat16 ? run_rotate_and_write<Bfloat16>(job, workers)
                                        : run_rotate_and_write<Float32>(job, workers);
}

void run(const RotateAndWriteLatent& job, Workers& workers) {
  job.element == ElementType::kBfloat16 ? run_rotate_and_write_latent<Bfloat16>(job, workers)
                                        : run_rotate_and_write_latent<Float32>(job, workers);
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
