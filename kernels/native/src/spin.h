// Waiting for another thread or process that is about to answer.
#pragma once

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace baton {

constexpr auto kSpinTime = std::chrono::microseconds(40);
constexpr int kPausesPerLook = 32;

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until `is_over()` and returns true; returns false when the time is up.
template <class Condition>
bool spin(Condition is_over) {
  const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (is_over()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

}  // namespace baton
