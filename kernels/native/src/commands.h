// The arguments of `baton_run`: commands, each a code and its fields.
//
// Every field is eight bytes, so that Python packs a command as a row of int64 and doubles
// (kernels/library/commands.py mirrors this file). Strides are in elements. Nothing is checked
// here: the Python wrappers check.
#pragma once

#include <cstdint>

#include "formats.h"
#include "rank_group.h"
#include "thread_pool.h"

namespace baton {

enum class ElementType : int64_t { kFloat32 = 0, kBfloat16 = 1 };

// Elements of a KV cache: those of the step, or elements of 8 bits with a factor for the vector of
// each token, part and head; see quantize_kv in kernels/reference/cache.py.
enum class CacheType : int64_t { kSame = 0, kFloat8 = 1, kInt8 = 2 };

// See kernels.Activation.
enum class Activation : int64_t {
  kNone = 0,
  kSilu = 1,
  kGelu = 2,
  kGeluTanh = 3,
  kRelu = 4,
  kSigmoid = 5,
  kClampedSilu = 6,
};

// The use of an RMS norm's weight; see kernels.NormKind.
enum class NormKind : int64_t { kRounded = 0, kWide = 1, kOffset = 2 };

enum class ExpertScores : int64_t { kSoftmax = 0, kSoftmaxOfChosen = 1, kSigmoid = 2 };

enum class Code : int64_t {
  kLinear = 0,
  kTakeRows = 1,
  kRmsNorm = 2,
  kRotaryAngles = 3,
  kRotateAndWriteKv = 4,
  kPagedAttention = 5,
  kArgmax = 6,
  kApplyLogitRules = 7,
  kDrawTokens = 8,
  kReduceRanks = 9,
  kGatherColumns = 10,
  kRouteExperts = 11,
  kExpertLinear = 12,
  kCombineExperts = 13,
  kShortConv = 14,
  kGateRows = 15,
  kGatedDelta = 16,
  kLayerNorm = 17,
  kHeadLinear = 18,
  kRotateAndWriteLatent = 19,
};

// out[m][n] = cap(scale * activation(sum over k of input[m][k] * weight[n][k] + bias[n])) +
// residual[m][n], where cap(x) = soft_cap * tanh(x / soft_cap)
//
// `weight` is packed (see pack.h) or has a storage format (see formats.h). If it is gated, its
// columns are pairs of gate and up, 16 and 16 in each panel; activation(gate) * up takes the place
// of the activation, and `out` has half as many columns.
struct Linear {
  ElementType element;  // of input, packed weight, bias, residual
  const void* input;
  int64_t input_stride;
  int64_t num_rows;
  int64_t in_features;
  const uint32_t* weight;
  int64_t out_features;  // columns of the result
  const void* bias;      // one per row of the unpacked weight; or null
  const void* residual;  // null for none
  int64_t residual_stride;
  int64_t is_gated;
  Activation activation;
  double scale;
  double soft_cap;  // 0 for none
  void* out;
  int64_t out_stride;
  int64_t out_is_float;  // whether `out` is float32; otherwise it has the type `element`
  Format format;         // of the weight
  int64_t is_exact;      // whether weights with a storage format are rounded to the type `element`;
                         // otherwise inputs are rounded to int8
};

// out[m] = row rows[m] - first_row of a weight, or of any matrix, * scale + addend[m]; zeros in
// place of a row that it does not have
//
// Elements with a storage format are rounded to the type `element`. A scale other than 1 and an
// addend need an `out` of that type; the product is rounded before the sum.
struct TakeRows {
  ElementType element;
  const void* matrix;
  int64_t is_packed;   // whether the matrix consists of panels; otherwise it is stored by rows
  int64_t row_stride;  // of a matrix stored by rows; in bytes if it has a storage format
  int64_t num_columns;
  int64_t first_row;
  int64_t num_matrix_rows;
  const int64_t* rows;
  int64_t num_rows;
  double scale;
  const void* addend;  // [num_rows, num_columns], or null
  int64_t addend_stride;
  void* out;             // [num_rows, num_columns]
  int64_t out_is_float;  // whether `out` is float32; otherwise it has the type `element`
  Format format;         // of the matrix
};

// out[m] = input[m] / sqrt(mean(input[m]^2) + eps) * weight + residual[m]
//
// `kind` decides the roundings and the weight; the norm is rounded before the residual is added.
struct RmsNorm {
  ElementType element;
  const void* input;
  int64_t input_stride;
  int64_t num_rows;
  int64_t size;
  const void* weight;
  double eps;
  NormKind kind;
  const void* residual;  // or null
  int64_t residual_stride;
  void* out;  // [num_rows, size]
};

// out[m] = (input[m] - mean) / sqrt(variance + eps) * weight + bias + residual[m]
//
// The residual is added to the rounded rest.
struct LayerNorm {
  ElementType element;
  const void* input;
  int64_t input_stride;
  int64_t num_rows;
  int64_t size;
  const void* weight;  // or null
  const void* bias;    // or null
  double eps;
  const void* residual;  // or null
  int64_t residual_stride;
  void* out;  // [num_rows, size]
};

// cos[m][i] = cos(positions[m] * frequencies[i]) * amplitude, and likewise sin
struct RotaryAngles {
  const int64_t* positions;
  int64_t num_tokens;
  const float* frequencies;  // [half_dim]
  int64_t half_dim;
  double amplitude;
  float* cos;  // [num_tokens, half_dim]
  float* sin;
};

// One step's sequences; the arrays of kernels.AttentionMetadata. Commands point to it, so that a
// recorded step can be pointed to another step's sequences.
struct Batch {
  const int32_t* block_tables;
  int64_t table_stride;
  const int32_t* query_starts;
  const int32_t* context_lens;
  const int64_t* slot_mapping;
  int64_t num_seqs;
  int64_t num_tokens;
  const int32_t* num_unkept;  // null: 0 for each sequence
};

// Normalizes and rotates Q (in place) and K, both optional; writes K and V into the cache.
struct RotateAndWriteKv {
  ElementType element;
  void* query;  // [num_tokens, num_heads, head_dim]
  void* key;    // [num_tokens, num_kv_heads, head_dim]; overwritten
  const void* value;  // may be key
  int64_t query_stride;  // from token to token; a token's heads are adjacent
  int64_t key_stride;
  int64_t value_stride;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  const void* query_norm;  // [head_dim] of RMS norms, or null
  const void* key_norm;
  double eps;
  NormKind norm_kind;
  int64_t norms_values;  // whether values are normalized, without a weight
  const float* cos;  // [num_tokens, rotary_half], or null: no rotation
  const float* sin;
  int64_t rotary_half;  // half the number of elements that are rotated, a head's first ones
  CacheType cache_type;
  void* cache;  // [num_blocks, 2, num_kv_heads, block_size, head_dim]
  int64_t block_stride;
  int64_t value_offset;  // from K to V
  int64_t head_stride;
  int64_t slot_stride;
  int64_t block_size;
  float* factors;  // [num_blocks, 2, num_kv_heads, block_size], of a cache of 8 bits; or null
  int64_t factor_block_stride;
  int64_t factor_value_offset;
  int64_t factor_head_stride;
  const Batch* batch;
};

// Rotates the last 2 * rotary_half elements of each head of Q (in place) and of the latent vectors,
// whose first elements get an RMS norm of the kind kRounded, and writes these into the cache.
struct RotateAndWriteLatent {
  ElementType element;
  void* query;   // [num_tokens, num_heads, query_dim]
  void* latent;  // [num_tokens, latent_dim + 2 * rotary_half]; overwritten
  int64_t query_stride;  // from token to token; a token's heads are adjacent
  int64_t latent_stride;
  int64_t num_heads;
  int64_t query_dim;
  const void* norm;  // [latent_dim]
  int64_t latent_dim;
  double eps;
  const float* cos;  // [num_tokens, rotary_half]
  const float* sin;
  int64_t rotary_half;
  CacheType cache_type;
  void* cache;  // [num_blocks, 1, 1, block_size, latent_dim + 2 * rotary_half]
  int64_t block_stride;
  int64_t slot_stride;
  int64_t block_size;
  float* factors;  // [num_blocks, 1, 1, block_size], of a cache of 8 bits; or null
  int64_t factor_block_stride;
  const Batch* batch;
};

// Causal grouped-query attention over paged KV (arXiv:2309.06180) with a running softmax
// (arXiv:2205.14135).
struct PagedAttention {
  ElementType element;  // of query, sinks and out
  const void* query;
  int64_t query_stride;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t value_dim;
  CacheType cache_type;
  const void* cache;
  int64_t block_stride;
  int64_t value_offset;  // from K to V; 0 if V is the first elements of K
  int64_t head_stride;
  int64_t slot_stride;
  int64_t block_size;
  const float* factors;  // of the vectors of a cache of 8 bits; or null
  int64_t factor_block_stride;
  int64_t factor_value_offset;
  int64_t factor_head_stride;
  double scale;
  double soft_cap;         // of scores; 0 for none
  int64_t sliding_window;  // 0 for none
  const void* sinks;       // [num_heads], or null
  void* out;               // [num_tokens, num_heads, value_dim]
  const Batch* batch;
};

// maxima[m], indices[m] = the largest of logits[m], NaN if one is NaN, and its first index; -1 if
// the maximum is not finite
struct Argmax {
  const float* logits;
  int64_t logits_stride;
  int64_t num_rows;
  int64_t size;
  float* maxima;
  int64_t* indices;
};

// Changes rows of logits by the rules of a kernels.RuleTable, whose tensors are contiguous, and
// finds their maxima again; see kernels/reference/logit_rules.py. Index i is one of `num_rows`.
struct ApplyLogitRules {
  float* logits;
  int64_t logits_stride;
  int64_t vocab_size;
  float* maxima;
  int64_t* likeliest;
  const int64_t* rule_ids;    // [num_rows]
  const int64_t* tokens;      // [num_rows]
  const int64_t* positions;   // [num_rows]
  const int64_t* logit_rows;  // [num_rows]
  int64_t num_rows;
  int32_t* history;  // [m, max_len]
  int64_t max_len;
  const int64_t* lengths;   // [m, 2]
  const float* penalties;   // [m, 3]
  const int32_t* bias_ids;  // [m, num_biases]
  const float* biases;      // [m, num_biases]
  int64_t num_biases;
  const int32_t* stop_ids;  // [m, num_stops]
  int64_t num_stops;
  const int32_t* bad_words;  // [m, num_words, word_len]
  int64_t num_words;
  int64_t word_len;
  const int32_t* allowed;  // [m, ceil(vocab_size / 32)]
};

// out[i] = a token drawn from row logit_rows[i] of the logits, by entry draw_ids[i] of a
// kernels.DrawTable; the likeliest token if that is negative or the temperature is 0.
struct DrawTokens {
  const float* logits;
  int64_t logits_stride;
  int64_t vocab_size;
  const float* maxima;
  const int64_t* likeliest;
  const double* temperatures;
  const int64_t* top_ks;
  const double* top_ps;
  const double* log_min_ps;
  const int64_t* seeds;
  const int64_t* draw_ids;    // [count]
  const int64_t* positions;   // [count]
  const int64_t* logit_rows;  // [count], or null: draw i uses row i
  int64_t count;
  int64_t is_filtered;  // whether top-k, top-p and min-p apply
  int64_t* out;         // [count]
};

// out[m] = scale * (sum over all ranks of partial[m], in their order, + bias) + residual[m]
struct ReduceRanks {
  ElementType element;  // of bias, residual and out
  RankGroup* ranks;
  const float* partial;  // [num_rows, size]
  int64_t num_rows;
  int64_t size;
  const void* bias;      // [size], or null
  const void* residual;  // or null
  int64_t residual_stride;
  double scale;
  void* out;  // [num_rows, size]
};

// Rank 0: out[m] = part[m] of all ranks, side by side. The others only show their parts. Rank r
// has columns r * num_columns / size to (r + 1) * num_columns / size.
struct GatherColumns {
  RankGroup* ranks;
  const float* part;
  int64_t num_rows;
  int64_t num_columns;
  float* out;  // [num_rows, num_columns]; null except on rank 0
};

// The experts with the highest scores for each row, and their rows by expert; see
// kernels/experts.py. The rank has experts first_expert to end_expert.
struct RouteExperts {
  ElementType element;  // of logits
  const void* logits;
  int64_t logits_stride;
  int64_t num_rows;
  int64_t num_experts;
  int64_t top_k;
  ExpertScores scores;
  const float* bias;           // [num_experts], for the ranking alone; or null
  const float* expert_scales;  // [num_experts], factors on weights; or null
  int64_t num_groups;
  int64_t top_groups;
  int64_t group_terms;
  int64_t normalizes;
  double scale;
  int64_t rounds;
  int64_t first_expert;
  int64_t end_expert;
  float* weights;   // [num_rows, top_k]
  int32_t* slots;   // [num_rows, top_k]
  int32_t* rows;    // [num_rows * top_k]
  int32_t* starts;  // [end_expert - first_expert + 1]
};

// For each slot s of expert e: out[s] = activation(input[row of s] * weight[e] + bias[e]); the row
// is rows[s], or s if `rows` is null. Weights and biases of experts follow each other.
struct ExpertLinear {
  ElementType element;  // of input, packed weight, bias and out
  const void* input;
  int64_t input_stride;
  int64_t num_slots;
  int64_t in_features;
  const uint32_t* weight;
  int64_t num_experts;
  int64_t expert_words;  // of an expert's weight
  int64_t out_features;
  const void* bias;  // or null
  int64_t is_gated;
  Activation activation;  // of gates
  const int32_t* rows;
  const int32_t* starts;
  void* out;  // [num_slots, out_features]
  Format format;  // of the weight, as in Linear
  int64_t is_exact;
};

// out[m][h] = input[m][h] * weight[h], then the `num_copied` elements of input[m][h] behind those
// that are multiplied. Weights of heads follow each other.
struct HeadLinear {
  ElementType element;
  const void* input;  // [num_tokens, num_heads, in_features + num_copied]
  int64_t token_stride;
  int64_t head_stride;
  int64_t num_tokens;
  int64_t num_heads;
  int64_t in_features;
  const uint32_t* weight;
  int64_t head_words;  // of a head's weight
  int64_t out_features;
  int64_t num_copied;
  void* out;  // [num_tokens, num_heads, out_features + num_copied]
};

// out[m] = sum over j of weights[m][j] * outputs[slots[m][j]] + shared[m] * sigmoid(gate[m]) +
// residual[m]
struct CombineExperts {
  ElementType element;  // of outputs, shared_gate and residual
  const void* outputs;
  int64_t num_rows;
  int64_t width;
  int64_t top_k;
  const float* weights;
  const int32_t* slots;
  const float* shared;      // or null
  const void* shared_gate;  // one per row, or null
  int64_t gate_stride;
  const void* residual;  // or null
  int64_t residual_stride;
  void* out;
  int64_t out_is_float;  // whether `out` is float32; otherwise it has the type `element`
};

// y[t] = sum over j of weight[j] * u[t - width + 1 + j] + bias, by channel. With gates,
// out[t] = C[t] * y[t] and u = B * x, where B, C and x are the thirds of input[t]; else
// out[t] = silu(y[t]) and u = input. See kernels/reference/recurrent.py. The state holds the last
// width - 1 values of u; kernels.LayerState says when it is read and stored.
struct ShortConv {
  ElementType element;
  int64_t is_gated;
  const void* input;  // [num_tokens, channels], or three times as many
  int64_t input_stride;
  int64_t channels;
  int64_t width;
  const void* weight;  // [width, channels]
  const void* bias;    // [channels], or null
  void* states;        // [num_slots, slices, channels_per_slice, width - 1]
  int64_t slot_stride;
  int64_t slice_stride;
  int64_t channels_per_slice;
  int64_t block_size;
  const Batch* batch;
  void* out;  // [num_tokens, channels]
};

// out[m] = values[m] * activation(gates[m])
struct GateRows {
  ElementType element;
  const void* values;
  int64_t values_stride;
  const void* gates;
  int64_t gates_stride;
  int64_t num_rows;
  int64_t size;
  Activation activation;
  void* out;  // [num_rows, size]
};

// The gated delta rule; see kernels/reference/recurrent.py. Key head i belongs to the heads from
// i * num_heads / num_key_heads on.
struct GatedDelta {
  ElementType element;  // of everything but the states
  const void* query;    // [num_tokens, num_key_heads, key_dim]
  int64_t query_stride;
  const void* key;
  int64_t key_stride;
  const void* value;  // [num_tokens, num_heads, value_dim]
  int64_t value_stride;
  const void* update;  // [num_tokens, num_heads]
  int64_t update_stride;
  const void* decay;
  int64_t decay_stride;
  const void* log_rates;  // [num_heads]
  const void* decay_bias;
  int64_t num_key_heads;
  int64_t num_heads;
  int64_t key_dim;
  int64_t value_dim;
  float* states;  // [num_slots, slices, heads_per_slice, key_dim, value_dim]
  int64_t slot_stride;
  int64_t slice_stride;
  int64_t heads_per_slice;
  int64_t block_size;
  const Batch* batch;
  void* out;  // [num_tokens, num_heads, value_dim]
};

constexpr int64_t kMaxFields = 32;

struct Command {
  Code code;
  int64_t fields[kMaxFields];
};

// Scratch memory of one command, reused by the next; it grows to the largest size requested.
class Scratch {
 public:
  // Returns at least `num_bytes`, aligned to a cache line, with undefined contents.
  void* reserve(int64_t num_bytes);
  ~Scratch();

 private:
  void* memory_ = nullptr;
  int64_t num_bytes_ = 0;
};

// The threads that compute, and their scratch memory.
struct Workers {
  explicit Workers(int num_threads) : pool(num_threads), own(num_threads) {}
  ThreadPool pool;
  Scratch shared;
  std::vector<Scratch> own;  // by thread
};

void run(const Linear&, Workers&);
void run(const TakeRows&, Workers&);
void run(const RmsNorm&, Workers&);
void run(const RotaryAngles&, Workers&);
void run(const RotateAndWriteKv&, Workers&);
void run(const PagedAttention&, Workers&);
void run(const Argmax&, Workers&);
void run(const ApplyLogitRules&, Workers&);
void run(const DrawTokens&, Workers&);
void run(const ReduceRanks&, Workers&);
void run(const GatherColumns&, Workers&);
void run(const RouteExperts&, Workers&);
void run(const ExpertLinear&, Workers&);
void run(const CombineExperts&, Workers&);
void run(const ShortConv&, Workers&);
void run(const GateRows&, Workers&);
void run(const GatedDelta&, Workers&);
void run(const LayerNorm&, Workers&);
void run(const HeadLinear&, Workers&);
void run(const RotateAndWriteLatent&, Workers&);

}  // namespace baton
