// Copies and digests of many runs of memory, one after the other, in the calling thread: the code
// that moves KV has its own threads, and must not wait for the compute threads.
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define XXH_INLINE_ALL
#include "xxhash.h"

namespace baton {
namespace {

#if defined(__SSE2__)

// Shorter runs are likely to be read while they are still in a cache.
constexpr int64_t kLeastStreamedBytes = 32 << 10;
constexpr int64_t kLineBytes = 64;

// Stores that bypass the caches: ordinary stores would first read the lines that are about to be
// overwritten, and evict other data. Other threads see the bytes after a fence.
void copy_past_caches(uint8_t* to, const uint8_t* source, int64_t num_bytes) {
  const auto misaligned = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % kLineBytes);
  const int64_t head = misaligned ? kLineBytes - misaligned : 0;
  std::memcpy(to, source, head);
  int64_t i = head;
  for (; i + kLineBytes <= num_bytes; i += kLineBytes) {
    __m128i line[4];
    std::memcpy(line, source + i, kLineBytes);
    for (int part = 0; part < 4; ++part) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i) + part, line[part]);
    }
  }
  std::memcpy(to + i, source + i, num_bytes - i);
}

void copy(uint8_t* to, const uint8_t* source, int64_t num_bytes) {
  if (num_bytes < kLeastStreamedBytes) {
    std::memcpy(to, source, num_bytes);
  } else {
    copy_past_caches(to, source, num_bytes);
  }
}

void end_copies() { _mm_sfence(); }

#else

void copy(uint8_t* to, const uint8_t* source, int64_t num_bytes) {
  std::memcpy(to, source, num_bytes);
}

void end_copies() {}

#endif

}  // namespace
}  // namespace baton

extern "C" {

// Copies each run of `num_bytes[i]` bytes; no two overlap.
void baton_copy_runs(int64_t count, uint8_t* const* to, const uint8_t* const* sources,
                     const int64_t* num_bytes) {
  for (int64_t i = 0; i < count; ++i) baton::copy(to[i], sources[i], num_bytes[i]);
  baton::end_copies();
}

// Writes XXH3-128 digests, canonical, of 16 bytes each: of a prefix and the run after it. The
// prefixes are concatenated; each ends at its `prefix_ends`.
void baton_digest_runs(int64_t count, const uint8_t* prefixes, const int64_t* prefix_ends,
                       const uint8_t* const* runs, const int64_t* num_bytes, uint8_t* digests) {
  XXH3_state_t state;
  int64_t begin = 0;
  for (int64_t i = 0; i < count; ++i) {
    XXH3_128bits_reset(&state);
    XXH3_128bits_update(&state, prefixes + begin, prefix_ends[i] - begin);
    XXH3_128bits_update(&state, runs[i], num_bytes[i]);
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&state));
    std::memcpy(digests + sizeof canonical * i, &canonical, sizeof canonical);
    begin = prefix_ends[i];
  }
}

}  // extern "C"
