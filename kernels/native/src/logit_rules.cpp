// Rules that change logits before a token is drawn.
#include "commands.h"
#include "row_maximum.h"

namespace baton {
namespace {

constexpr float kBanned = -std::numeric_limits<float>::infinity();
constexpr int64_t kNoToken = -2;
constexpr int64_t kWordBits = 32;

// One sequence's rules, its tokens, and the row of logits to change.
struct RuledRow {
  RuledRow(const ApplyLogitRules& job, int64_t index)
      : job(job),
        row(job.logit_rows[index]),
        id(job.rule_ids[index]),
        length(job.positions[index]),
        logits(job.logits + row * job.logits_stride),
        history(job.history + id * job.max_len) {
    history[length - 1] = static_cast<int32_t>(job.tokens[index]);
  }

  void add_biases() const {
    const int32_t* tokens = job.bias_ids + id * job.num_biases;
    const float* biases = job.biases + id * job.num_biases;
    for (int64_t i = 0; i < job.num_biases; ++i) {
      if (tokens[i] >= 0) logits[tokens[i]] += biases[i];
    }
  }

  // `counts` has an entry for each token of the vocabulary, with undefined contents. The history
  // is read several times, so that only entries of its tokens are written. Nothing changes if it
  // holds a number that is no token, which would be outside of `counts`.
  void penalize(int32_t* counts) const {
    const float* penalties = job.penalties + id * 3;
    const float repetition = penalties[0], presence = penalties[1], frequency = penalties[2];
    if (repetition == 1.0f && presence == 0.0f && frequency == 0.0f) return;
    if (!has_only_tokens()) return;
    const int64_t num_prompt = std::clamp<int64_t>(job.lengths[id * 2], 0, length);
    for (int64_t i = 0; i < length; ++i) counts[history[i]] = 0;
    for (int64_t i = num_prompt; i < length; ++i) ++counts[history[i]];
    for (int64_t i = 0; i < length; ++i) {
      const int32_t token = history[i], count = counts[token];
      if (count < 0) continue;  // an earlier occurrence was processed
      counts[token] = -1;
      float value = logits[token];
      value = value > 0.0f ? value / repetition : value * repetition;
      if (count > 0) {
        const double penalty = presence + static_cast<double>(frequency) * count;
        value = static_cast<float>(value - penalty);
      }
      logits[token] = value;
    }
  }

  void ban() const {
    ban_others();
    if (length < job.lengths[id * 2 + 1]) {
      const int32_t* tokens = job.stop_ids + id * job.num_stops;
      for (int64_t i = 0; i < job.num_stops; ++i) {
        if (tokens[i] >= 0) logits[tokens[i]] = kBanned;
      }
    }
    const int32_t* words = job.bad_words + id * job.num_words * job.word_len;
    for (int64_t i = 0; i < job.num_words; ++i) {
      const int32_t* word = words + i * job.word_len;
      const int32_t last = word[job.word_len - 1];
      if (last >= 0 && is_latest(word, job.word_len - 1)) logits[last] = kBanned;
    }
  }

  void find_likeliest() const {
    find_maximum(logits, job.vocab_size, job.maxima + row, job.likeliest + row);
    if (job.likeliest[row] < 0) job.likeliest[row] = kNoToken;
  }

 private:
  bool has_only_tokens() const {
    uint32_t largest = 0;  // negative numbers are larger than all tokens
    for (int64_t i = 0; i < length; ++i) {
      largest = std::max(largest, static_cast<uint32_t>(history[i]));
    }
    return largest < job.vocab_size;
  }

  // Bans tokens that are not allowed.
  void ban_others() const {
    const int64_t num_words = (job.vocab_size + kWordBits - 1) / kWordBits;
    const auto* allowed = reinterpret_cast<const uint32_t*>(job.allowed) + id * num_words;
    for (int64_t i = 0; i < num_words; ++i) {
      if (allowed[i] == ~uint32_t{0}) continue;
      const int64_t end = std::min(job.vocab_size - i * kWordBits, kWordBits);
      float* values = logits + i * kWordBits;
      for (int64_t bit = 0; bit < end; ++bit) {
        values[bit] = allowed[i] >> bit & 1 ? values[bit] : kBanned;
      }
    }
  }

  // Whether the sequence ends with `count` tokens, of which the first ones may be padding.
  bool is_latest(const int32_t* tokens, int64_t count) const {
    for (int64_t i = 1; i <= count; ++i) {
      const int32_t token = tokens[count - i];
      if (token < 0) return true;
      if (i > length || history[length - i] != token) return false;
    }
    return true;
  }

  const ApplyLogitRules& job;
  const int64_t row, id, length;
  float* const logits;
  int32_t* const history;
};

}  // namespace

void run(const ApplyLogitRules& job, Workers& workers) {
  const int64_t num_bytes = job.vocab_size * static_cast<int64_t>(sizeof(int32_t));
  for (Scratch& own : workers.own) own.reserve(num_bytes);  // outside of tasks, as it may throw
  workers.pool.run(job.num_rows, [&](int64_t index, int thread) {
    const RuledRow row(job, index);
    if (job.likeliest[job.logit_rows[index]] < 0) return;
    row.add_biases();
    row.penalize(static_cast<int32_t*>(workers.own[thread].reserve(num_bytes)));
    row.ban();
    row.find_likeliest();
  });
}

}  // namespace baton
