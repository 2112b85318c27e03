// The gated delta rule: each head adds to a matrix what its keys do not predict yet.
//
// A task is one head of one sequence. It goes from token to token, so a token's result depends
// neither on where its prompt is cut nor on other sequences. Tokens are prepared in tiles, so that
// a range of the state's columns stays in the nearest cache for a whole tile. A single token goes
// over the state where it lies.
#include <cmath>

#include "commands.h"
#include "lanes.h"
#include "sequence_span.h"

namespace baton {
namespace {

constexpr int64_t kTokens = 16;  // of a tile
constexpr int kVectors = 4;      // of a range of columns; their sums do not wait for each other
constexpr int64_t kColumns = kVectors * kLanes;
constexpr float kNormEps = 1e-6f;

int64_t ranges_of(const GatedDelta& job) { return (job.value_dim + kColumns - 1) / kColumns; }

int64_t scratch_floats(const GatedDelta& job) {
  return ranges_of(job) * job.key_dim * kColumns + 2 * kTokens * (job.key_dim + kLanes + 1);
}

template <class E>
class Head {
 public:
  using Stored = typename E::Stored;

  Head(const GatedDelta& job, const SequenceSpan& span, int64_t head, float* memory)
      : job_(job), span_(span), head_(head), key_head_(head / (job.num_heads / job.num_key_heads)),
        key_width_(job.key_dim + kLanes), state_(memory),
        keys_(memory + ranges_of(job) * job.key_dim * kColumns),
        queries_(keys_ + kTokens * key_width_), updates_(queries_ + kTokens * key_width_),
        decays_(updates_ + kTokens) {}

  void run() {
    const int64_t source = span_.source();
    if (span_.end - span_.start == 1 && job_.value_dim % kColumns == 0 && source >= 0) {
      const int64_t target = span_.target(span_.start);
      if (target >= 0) return run_in_place(source, target);
    }
    load_state(source);
    for (int64_t position = span_.start, stop; position < span_.end; position = stop) {
      stop = span_.next_stop(position, kTokens);
      const int64_t row = span_.first_row + position - span_.start, count = stop - position;
      for (int64_t token = 0; token < count; ++token) prepare(row + token, token);
      for (int64_t first = 0; first < job_.value_dim; first += kColumns) {
        float* state = state_ + first * job_.key_dim;
        for (int64_t token = 0; token < count; ++token) {
          advance(row + token, token, first, {state, state, kColumns});
        }
      }
      const int64_t target = span_.target(stop - 1);
      if (target >= 0) store_state(target);
    }
  }

 private:
  // A range of the state's columns before and after a token. Rows are `stride` apart.
  struct Range {
    const float* from;
    float* to;
    int64_t stride;
  };

  // Computes the only token, from one slot to another or the same.
  void run_in_place(int64_t source, int64_t target) {
    prepare(span_.first_row, 0);
    for (int64_t first = 0; first < job_.value_dim; first += kColumns) {
      advance(span_.first_row, 0, first,
              {place_of(source) + first, place_of(target) + first, job_.value_dim});
    }
  }

  // Normalizes a token's key and query, and computes its share of the update and its decay.
  void prepare(int64_t row, int64_t token) {
    const int64_t key_place = key_head_ * job_.key_dim;
    normalize(element(job_.key, row * job_.key_stride + key_place), 1.0f,
              keys_ + token * key_width_);
    normalize(element(job_.query, row * job_.query_stride + key_place),
              1.0f / std::sqrt(static_cast<float>(job_.key_dim)), queries_ + token * key_width_);
    const float update = number(job_.update, row * job_.update_stride + head_);
    updates_[token] = E::widen_one(E::narrow_one(1.0f / (1.0f + std::exp(-update))));
    const float given = number(job_.decay, row * job_.decay_stride + head_) +
                        number(job_.decay_bias, head_);
    const float step = given > 20.0f ? given : std::log1p(std::exp(given));
    decays_[token] = std::exp(-std::exp(number(job_.log_rates, head_)) * step);
  }

  void normalize(const Stored* values, float scale, float* out) const {
    Floats squares{};
    for (int64_t i = 0; i < job_.key_dim; i += kLanes) {
      const Floats value = read_lanes<E>(values + i, job_.key_dim - i);
      squares += value * value;
    }
    const float factor = scale / std::sqrt(sum(squares) + kNormEps);
    for (int64_t i = 0; i < job_.key_dim; i += kLanes) {
      store(out + i, read_lanes<E>(values + i, job_.key_dim - i) * broadcast(factor));
    }
  }

  // Computes columns [first, first + kColumns) of one token.
  void advance(int64_t row, int64_t token, int64_t first, const Range& range) const {
    const float *key = keys_ + token * key_width_, *query = queries_ + token * key_width_;
    const Floats decay = broadcast(decays_[token]), update = broadcast(updates_[token]);
    Floats predicted[kVectors] = {}, change[kVectors], out[kVectors] = {};
    for (int64_t i = 0; i < job_.key_dim; ++i) {
      for (int v = 0; v < kVectors; ++v) {
        const float* place = range.from + i * range.stride + v * kLanes;
        predicted[v] += load<Floats>(place) * broadcast(key[i]);
      }
    }
    const Stored* values =
        element(job_.value, row * job_.value_stride + head_ * job_.value_dim + first);
    for (int v = 0; v < kVectors; ++v) {
      const Floats value = read_lanes<E>(values + v * kLanes, left(first, v));
      change[v] = (value - decay * predicted[v]) * update;
    }
    for (int64_t i = 0; i < job_.key_dim; ++i) {
      for (int v = 0; v < kVectors; ++v) {
        const int64_t place = i * range.stride + v * kLanes;
        const Floats next =
            load<Floats>(range.from + place) * decay + broadcast(key[i]) * change[v];
        store(range.to + place, next);
        out[v] += next * broadcast(query[i]);
      }
    }
    auto* to = static_cast<Stored*>(job_.out) + (row * job_.num_heads + head_) * job_.value_dim;
    for (int v = 0; v < kVectors; ++v) {
      write_lanes<E>(to + first + v * kLanes, out[v], left(first, v));
    }
  }

  // Columns from vector v of a range on.
  int64_t left(int64_t first, int v) const { return job_.value_dim - first - v * kLanes; }

  // The scratch memory holds ranges of columns one after the other, padded with zeros.
  void load_state(int64_t slot) {
    for (int64_t first = 0; first < job_.value_dim; first += kColumns) {
      const int64_t count = slot < 0 ? 0 : std::min(kColumns, job_.value_dim - first);
      for (int64_t i = 0; i < job_.key_dim; ++i) {
        float* to = state_ + first * job_.key_dim + i * kColumns;
        if (count) std::copy_n(place_of(slot) + i * job_.value_dim + first, count, to);
        std::fill(to + count, to + kColumns, 0.0f);
      }
    }
  }

  void store_state(int64_t slot) const {
    for (int64_t first = 0; first < job_.value_dim; first += kColumns) {
      const int64_t count = std::min(kColumns, job_.value_dim - first);
      for (int64_t i = 0; i < job_.key_dim; ++i) {
        std::copy_n(state_ + first * job_.key_dim + i * kColumns, count,
                    place_of(slot) + i * job_.value_dim + first);
      }
    }
  }

  float* place_of(int64_t slot) const {
    return job_.states + slot * job_.slot_stride +
           head_ / job_.heads_per_slice * job_.slice_stride +
           head_ % job_.heads_per_slice * job_.key_dim * job_.value_dim;
  }

  static const Stored* element(const void* from, int64_t place) {
    return static_cast<const Stored*>(from) + place;
  }
  static float number(const void* from, int64_t place) {
    return E::widen_one(*element(from, place));
  }

  const GatedDelta& job_;
  const SequenceSpan& span_;
  int64_t head_, key_head_, key_width_;
  float *state_, *keys_, *queries_, *updates_, *decays_;
};

template <class E>
void run_gated_delta(const GatedDelta& job, Workers& workers) {
  const int64_t num_bytes = scratch_floats(job) * static_cast<int64_t>(sizeof(float));
  for (Scratch& scratch : workers.own) scratch.reserve(num_bytes);  // a task must not throw
  workers.pool.run(job.batch->num_seqs * job.num_heads, [&](int64_t task, int thread) {
    const SequenceSpan span(*job.batch, task / job.num_heads, job.block_size);
    auto* memory = static_cast<float*>(workers.own[static_cast<size_t>(thread)].reserve(num_bytes));
    Head<E>(job, span, task % job.num_heads, memory).run();
  });
}

}  // namespace

void run(const GatedDelta& job, Workers& workers) {
  job.element == ElementType::kBfloat16 ? run_gated_delta<Bfloat16>(job, workers)
                                        : run_gated_delta<Float32>(job, workers);
}

}  // namespace baton
