// Causal convolutions by channel with a short state.
//
// A task is a range of channels of one sequence. It goes from token to token, so a channel's
// results depend on its own inputs alone: not on where a prompt is cut, nor on other sequences.
#include <algorithm>

#include "activations.h"
#include "commands.h"
#include "lanes.h"
#include "sequence_span.h"

namespace baton {
namespace {

constexpr int64_t kTaskChannels = 1024;  // kernels/native/recurrent.py knows the widths
constexpr int kMaxWidth = 4;
static_assert(kTaskChannels % kLanes == 0);

// Channels [first, first + count) of one sequence.
template <class E, int width, bool is_gated>
class ChannelRange {
 public:
  using Stored = typename E::Stored;

  ChannelRange(const ShortConv& job, const SequenceSpan& span, int64_t first)
      : job_(job), span_(span), first_(first),
        count_(std::min(kTaskChannels, job.channels - first)) {}

  void run() {
    span_.source() < 0 ? clear() : load_state(span_.source());
    for (int64_t position = span_.start; position < span_.end; ++position) {
      const int64_t row = span_.first_row + position - span_.start;
      for (int64_t channel = 0; channel < count_; channel += kLanes) advance(row, channel);
      const int64_t target = span_.target(position);
      if (target >= 0) store_state(target);
    }
  }

 private:
  static constexpr int kPast = width - 1;

  void advance(int64_t row, int64_t channel) {
    const int64_t place = first_ + channel, count = count_ - channel, size = job_.channels;
    const auto* input = static_cast<const Stored*>(job_.input) + row * job_.input_stride + place;
    const auto* weight = static_cast<const Stored*>(job_.weight) + place;
    Floats newest = read_lanes<E>(input, count);
    if constexpr (is_gated) {
      newest = rounded<E>(newest * read_lanes<E>(input + 2 * size, count));
    }
    Floats total{};
    for (int j = 0; j < kPast; ++j) {
      const Floats value = load<Floats>(past_[j] + channel);
      total += value * read_lanes<E>(weight + j * size, count);
      if (j > 0) store(past_[j - 1] + channel, value);
    }
    store(past_[kPast - 1] + channel, newest);
    total += newest * read_lanes<E>(weight + kPast * size, count);
    if (job_.bias) total += read_lanes<E>(static_cast<const Stored*>(job_.bias) + place, count);
    total = rounded<E>(total);
    const Floats result =
        is_gated ? read_lanes<E>(input + size, count) * total : times_sigmoid(total, total);
    write_lanes<E>(static_cast<Stored*>(job_.out) + row * size + place, result, count);
  }

  void clear() {
    for (auto& values : past_) std::fill(values, values + count_, 0.0f);
  }

  void load_state(int64_t slot) {
    for_runs(slot, [&](int64_t channel, const Stored* values, int64_t count) {
      for (int64_t i = 0; i < count; ++i, values += kPast) {
        for (int j = 0; j < kPast; ++j) past_[j][channel + i] = E::widen_one(values[j]);
      }
    });
  }

  void store_state(int64_t slot) const {
    for_runs(slot, [&](int64_t channel, Stored* values, int64_t count) {
      for (int64_t i = 0; i < count; ++i, values += kPast) {
        for (int j = 0; j < kPast; ++j) values[j] = E::narrow_one(past_[j][channel + i]);
      }
    });
  }

  // Calls body(first channel, its state, count) for runs of channels that lie in one slice.
  template <class Body>
  void for_runs(int64_t slot, const Body& body) const {
    auto* states = static_cast<Stored*>(job_.states) + slot * job_.slot_stride;
    for (int64_t channel = 0, count; channel < count_; channel += count) {
      const int64_t slice = (first_ + channel) / job_.channels_per_slice;
      const int64_t place = (first_ + channel) % job_.channels_per_slice;
      count = std::min(count_ - channel, job_.channels_per_slice - place);
      body(channel, states + slice * job_.slice_stride + place * kPast, count);
    }
  }

  const ShortConv& job_;
  const SequenceSpan& span_;
  int64_t first_, count_;
  // The latest values of each channel, the oldest first.
  alignas(64) float past_[kPast][kTaskChannels];
};

template <class E, int width, bool is_gated>
void run_width(const ShortConv& job, Workers& workers) {
  if constexpr (width <= kMaxWidth) {
    if (job.width != width) return run_width<E, width + 1, is_gated>(job, workers);
    const int64_t ranges = (job.channels + kTaskChannels - 1) / kTaskChannels;
    workers.pool.run(job.batch->num_seqs * ranges, [&](int64_t task, int) {
      const SequenceSpan span(*job.batch, task / ranges, job.block_size);
      ChannelRange<E, width, is_gated>(job, span, task % ranges * kTaskChannels).run();
    });
  }
}

template <class E>
void run_short_conv(const ShortConv& job, Workers& workers) {
  job.is_gated ? run_width<E, 2, true>(job, workers) : run_width<E, 2, false>(job, workers);
}

}  // namespace

void run(const ShortConv& job, Workers& workers) {
  job.element == ElementType::kBfloat16 ? run_short_conv<Bfloat16>(job, workers)
                                        : run_short_conv<Float32>(job, workers);
}

}  // namespace baton
