// Rotation of queries and keys, and writes to the KV cache.
#include <algorithm>
#include <cstring>
#include <limits>

#include "kv_elements.h"
#include "lanes.h"
#include "norms.h"
#include "row_tasks.h"

namespace baton {
namespace {

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

// The largest magnitude of a vector; infinity or NaN if it is not finite.
template <class Values>
float largest_of(int64_t size, const Values& values) {
  Masks largest{};
  for (int64_t i = 0; i < size; i += kLanes) largest = larger_magnitudes(largest, values(i));
  const int32_t bits = largest_lane(largest);
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Writes a vector as elements of the type T with their factor, like quantize_kv of the reference.
// values(i): kLanes elements from i on, 0 past `size`.
template <class T, class Values>
void write_narrow(int64_t size, const Values& values, uint8_t* to, float* factor) {
  const float share = largest_of(size, values) / T::kLargest;
  const bool is_finite = share <= std::numeric_limits<float>::max();
  *factor = is_finite ? std::max(share, std::numeric_limits<float>::min())
                      : std::numeric_limits<float>::quiet_NaN();
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats quotients = is_finite ? values(i) / broadcast(*factor) : Floats{};
    const Octets octets = T::narrow(quotients);
    std::memcpy(to + i, &octets, static_cast<size_t>(std::min<int64_t>(kLanes, size - i)));
  }
}

// A place of the cache for one vector, and for its factor.
template <class Kv>
struct Place {
  typename Kv::Element* elements;
  float* factor;
};

// Writes a vector of the step's type, which is multiplied by `scale` and rounded, if that is not 1.
template <class E, class Kv>
void write_vector(const typename E::Stored* vector, int64_t size, float scale,
                  const Place<Kv>& place) {
  if constexpr (Kv::kHasFactors) {
    const auto values = [=](int64_t i) {
      const Floats lanes = read_lanes<E>(vector + i, size - i);
      return scale == 1.0f ? lanes : rounded<E>(lanes * broadcast(scale));
    };
    write_narrow<typename Kv::Type>(size, values, place.elements, place.factor);
  } else {
    std::memcpy(place.elements, vector, static_cast<size_t>(size) * sizeof *vector);
    if (scale != 1.0f) scale_row<E>(place.elements, size, scale);
  }
}

template <class E, class Kv>
void rotate_and_write_token(const RotateAndWriteKv& job, int64_t token) {
  using Stored = typename E::Stored;
  auto* query = static_cast<Stored*>(job.query) + token * job.query_stride;
  auto* key = static_cast<Stored*>(job.key) + token * job.key_stride;
  const auto* value = static_cast<const Stored*>(job.value) + token * job.value_stride;
  for (int64_t head = 0; head < job.num_heads; ++head) {
    prepare_head<E>(job, token, query + head * job.head_dim, job.query_norm);
  }
  const int64_t slot = job.batch->slot_mapping[token];
  const int64_t block = slot / job.block_size, offset = slot % job.block_size;
  auto* elements = static_cast<typename Kv::Element*>(job.cache) + block * job.block_stride +
                   offset * job.slot_stride;
  float* factors = job.factors + block * job.factor_block_stride + offset;
  for (int64_t head = 0; head < job.num_kv_heads; ++head) {
    // The value comes first, as it may lie where the key is prepared.
    const Place<Kv> key_place{elements + head * job.head_stride,
                              factors + head * job.factor_head_stride};
    const Place<Kv> value_place{key_place.elements + job.value_offset,
                                key_place.factor + job.factor_value_offset};
    const auto* value_head = value + head * job.head_dim;
    const float scale =
        job.norms_values ? norm_factor<E>(value_head, job.head_dim, job.eps) : 1.0f;
    write_vector<E>(value_head, job.head_dim, scale, value_place);
    prepare_head<E>(job, token, key + head * job.head_dim, job.key_norm);
    write_vector<E>(key + head * job.head_dim, job.head_dim, 1.0f, key_place);
  }
}

template <class E, class Kv>
void rotate_and_write_token(const RotateAndWriteLatent& job, int64_t token) {
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
  const int64_t block = slot / job.block_size, offset = slot % job.block_size;
  const Place<Kv> place{static_cast<typename Kv::Element*>(job.cache) +
                            block * job.block_stride + offset * job.slot_stride,
                        job.factors + block * job.factor_block_stride + offset};
  write_vector<E>(latent, job.latent_dim + 2 * job.rotary_half, 1.0f, place);
}

template <class E, class Job>
void run_as(const Job& job, int64_t token_size, Workers& workers) {
  with_cache_type<E>(job.cache_type, [&](auto kv) {
    for_rows(job.batch->num_tokens, token_size, workers, [&](int64_t token) {
      rotate_and_write_token<E, decltype(kv)>(job, token);
    });
  });
}

template <class Job>
void run_job(const Job& job, int64_t token_size, Workers& workers) {
  job.element == ElementType::kBfloat16 ? run_as<Bfloat16>(job, token_size, workers)
                                        : run_as<Float32>(job, token_size, workers);
}

}  // namespace

void run(const RotateAndWriteKv& job, Workers& workers) {
  run_job(job, (job.num_heads + 2 * job.num_kv_heads) * job.head_dim, workers);
}

void run(const RotateAndWriteLatent& job, Workers& workers) {
  run_job(job, 2 * job.num_heads * job.rotary_half + job.latent_dim, workers);
}

}  // namespace baton
