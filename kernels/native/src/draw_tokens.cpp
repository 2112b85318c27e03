// Draws tokens from logits: temperature, top-k, top-p, min-p. kernels/reference/sampling.py defines
// what is drawn; see there for the noise.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "commands.h"
#include "simd.h"

namespace baton {
namespace {

constexpr double kKeepAll = -std::numeric_limits<double>::infinity();
constexpr double kWeightScale = 4294967296.0;  // 2**32: the weight of the likeliest token
// The largest noise is -log(-log(1 - 2**-33)); a weight rounds to 0 from -log(2**33) down.
constexpr double kMostNoise = 22.88;
constexpr double kLeastScaled = -22.88;
constexpr int kBinBits = 11;
constexpr int kNumBins = 1 << kBinBits;

// Philox4x32-10 (Salmon et al. 2011), with the counter (counter, position, 0, 0).
struct Philox {
  uint32_t key[2];
  uint32_t position;

  void words(uint32_t counter, uint32_t (&out)[4]) const {
    uint32_t word[4] = {counter, position, 0, 0};
    uint32_t key0 = key[0], key1 = key[1];
    for (int round = 0; round < 10; ++round) {
      const uint64_t low = uint64_t{0xD2511F53} * word[0], high = uint64_t{0xCD9E8D57} * word[2];
      const uint32_t next0 = static_cast<uint32_t>(high >> 32) ^ word[1] ^ key0;
      const uint32_t next2 = static_cast<uint32_t>(low >> 32) ^ word[3] ^ key1;
      word[0] = next0;
      word[1] = static_cast<uint32_t>(high);
      word[2] = next2;
      word[3] = static_cast<uint32_t>(low);
      key0 += 0x9E3779B9;
      key1 += 0xBB67AE85;
    }
    for (int i = 0; i < 4; ++i) out[i] = word[i];
  }
};

// Bits with the order of the floats.
uint32_t ordered_bits(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return bits >> 31 ? ~bits : bits | 0x80000000;
}

int bin_of(float value) { return static_cast<int>(ordered_bits(value) >> (32 - kBinBits)); }

struct Weighted {
  float logit;
  int64_t weight;
};

// Scratch memory of a thread.
struct DrawScratch {
  explicit DrawScratch(void* memory)
      : bins(static_cast<int64_t*>(memory)), entries(reinterpret_cast<Weighted*>(bins + kNumBins)) {}

  int64_t* const bins;      // [kNumBins]
  Weighted* const entries;  // as many as there are tokens
};

// One draw.
struct Draw {
  Draw(const DrawTokens& job, int64_t index)
      : row(job.logit_rows ? job.logit_rows[index] : index),
        logits(job.logits + row * job.logits_stride),
        size(job.vocab_size),
        maximum(job.maxima[row]),
        temperature(job.temperatures[job.draw_ids[index]]),
        top_k(job.top_ks[job.draw_ids[index]]),
        top_p(job.top_ps[job.draw_ids[index]]),
        log_min_p(job.log_min_ps[job.draw_ids[index]]) {
    const auto seed = static_cast<uint64_t>(job.seeds[job.draw_ids[index]]);
    noise = {{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
             static_cast<uint32_t>(job.positions[index])};
  }

  double scaled(float logit) const { return (static_cast<double>(logit) - maximum) / temperature; }

  // A logit below which `scaled` is certainly less than `bound`.
  float logit_below(double bound) const {
    const double logit = maximum + bound * temperature;
    const double slack = 1e-6 * (std::abs(logit) + std::abs(static_cast<double>(maximum)));
    return logit - slack < -std::numeric_limits<float>::max()
               ? -std::numeric_limits<float>::infinity()
               : static_cast<float>(logit - slack);
  }

  // The lowest scaled logit that is kept.
  double threshold(const DrawScratch& scratch) const {
    double kept = kKeepAll;
    if (top_k > 0 && top_k < size) kept = scaled(kth_largest(scratch));
    if (top_p < 1.0) kept = top_p_threshold(kept, scratch);
    return std::max(kept, log_min_p);
  }

  // The token with the highest sum of scaled logit and noise, the first of equal ones.
  int64_t draw(double kept, int64_t likeliest) const {
    Best best{-std::numeric_limits<double>::infinity(), size};
    uint32_t words[4];
    noise.words(static_cast<uint32_t>(likeliest / 4), words);
    offer(likeliest, words[likeliest % 4], kept, best);
    float least = logit_below(std::max(kept, best.score - kMostNoise));
    for (int64_t start = 0; start < size; start += kBlock) {
      const int64_t end = std::min(size, start + kBlock);
      if (!any_from(start, end, least)) continue;
      for (int64_t first = start; first < end; first += 4) {
        draw_from_group(first, std::min(end, first + 4), kept, least, best);
      }
    }
    return best.token;
  }

 private:
  static constexpr int64_t kBlock = 64;

  struct Best {
    double score;
    int64_t token;
  };

  // Whether a token in the range may have a logit of at least `least`.
  bool any_from(int64_t start, int64_t end, float least) const {
    if (end - start < kBlock) return true;
    Floats largest = load<Floats>(logits + start);
    for (int64_t i = start + kLanes; i < end; i += kLanes) {
      largest = larger(load<Floats>(logits + i), largest);
    }
    return baton::maximum(largest) >= least;
  }

  void draw_from_group(int64_t first, int64_t end, double kept, float& least, Best& best) const {
    bool is_possible = false;
    for (int64_t i = first; i < end; ++i) is_possible |= logits[i] >= least;
    if (!is_possible) return;
    uint32_t words[4];
    noise.words(static_cast<uint32_t>(first / 4), words);
    for (int64_t i = first; i < end; ++i) {
      if (logits[i] >= least && offer(i, words[i - first], kept, best)) {
        least = logit_below(std::max(kept, best.score - kMostNoise));
      }
    }
  }

  // Replaces the best token by a better one; returns whether it did.
  bool offer(int64_t token, uint32_t word, double kept, Best& best) const {
    const double value = scaled(logits[token]);
    if (value < kept) return false;
    // -log(u) > 1 - u, so that noise of at least `needed` takes 1 - u < exp(-needed).
    const double needed = best.score - value;
    if (needed > kMostNoise) return false;
    if (needed > 1.0) {
      const int halvings = static_cast<int>((needed - 1e-6) * 1.4426950408889634);
      if (uint64_t{~word} >> (33 - halvings)) return false;
    }
    const double uniform = (word + 0.5) * 0x1p-32;
    const double score = value - std::log(-std::log(uniform));
    if (!(score > best.score || (score == best.score && token < best.token))) return false;
    best = {score, token};
    return true;
  }

  float kth_largest(const DrawScratch& scratch) const {
    std::fill_n(scratch.bins, kNumBins, 0);
    for (int64_t i = 0; i < size; ++i) ++scratch.bins[bin_of(logits[i])];
    int bin = kNumBins - 1;
    int64_t left = top_k;
    for (; scratch.bins[bin] < left; --bin) left -= scratch.bins[bin];
    Weighted* const end = gather(bin, scratch, [](float) { return int64_t{0}; });
    Weighted* const kth = scratch.entries + left - 1;
    std::nth_element(scratch.entries, kth, end, is_before);
    return kth->logit;
  }

  // The scaled logit of the last token ahead of which lies less than the share `top_p` of the
  // weight of the tokens from `kept` on.
  double top_p_threshold(double kept, const DrawScratch& scratch) const {
    const double from = std::max(kept, kLeastScaled);
    const float least = logit_below(from);
    const auto weight = [&](float logit) {
      const double value = scaled(logit);
      return value < from ? int64_t{0}
                          : static_cast<int64_t>(std::nearbyint(std::exp(value) * kWeightScale));
    };
    std::fill_n(scratch.bins, kNumBins, 0);
    int64_t total = 0;
    for (int64_t i = 0; i < size; ++i) {
      if (logits[i] < least) continue;
      const int64_t own = weight(logits[i]);
      scratch.bins[bin_of(logits[i])] += own;
      total += own;
    }
    const double limit = top_p * static_cast<double>(total);
    int64_t ahead = 0, ahead_of_last = 0;
    int last = kNumBins - 1;
    for (int bin = kNumBins - 1; bin >= 0 && static_cast<double>(ahead) < limit; --bin) {
      if (!scratch.bins[bin]) continue;
      last = bin;
      ahead_of_last = ahead;
      ahead += scratch.bins[bin];
    }
    Weighted* const end = gather(last, scratch, weight);
    std::sort(scratch.entries, end, is_before);
    float found = maximum;
    for (const Weighted* entry = scratch.entries; entry != end; ++entry) {
      if (!entry->weight || static_cast<double>(ahead_of_last) >= limit) break;
      found = entry->logit;
      ahead_of_last += entry->weight;
    }
    return scaled(found);
  }

  static bool is_before(const Weighted& one, const Weighted& other) {
    return one.logit > other.logit;
  }

  // Writes the tokens of a bin to the scratch memory; returns their end.
  template <class Weight>
  Weighted* gather(int bin, const DrawScratch& scratch, const Weight& weight) const {
    Weighted* end = scratch.entries;
    for (int64_t i = 0; i < size; ++i) {
      if (bin_of(logits[i]) == bin) *end++ = {logits[i], weight(logits[i])};
    }
    return end;
  }

 public:
  const int64_t row;
  const float* const logits;
  const int64_t size;
  const float maximum;
  const double temperature;
  const int64_t top_k;
  const double top_p, log_min_p;
  Philox noise;
};

}  // namespace

void run(const DrawTokens& job, Workers& workers) {
  const auto num_bytes = job.is_filtered
                             ? kNumBins * static_cast<int64_t>(sizeof(int64_t)) +
                                   job.vocab_size * static_cast<int64_t>(sizeof(Weighted))
                             : 0;
  for (Scratch& own : workers.own) own.reserve(num_bytes);  // outside of tasks, as it may throw
  workers.pool.run(job.count, [&](int64_t index, int thread) {
    const Draw draw(job, index);
    const int64_t likeliest = job.likeliest[draw.row];
    if (draw.temperature <= 0.0 || likeliest < 0) {
      job.out[index] = likeliest;
      return;
    }
    const double kept =
        job.is_filtered ? draw.threshold(DrawScratch(workers.own[thread].reserve(num_bytes)))
                        : kKeepAll;
    job.out[index] = draw.draw(kept, likeliest);
  });
}

}  // namespace baton
