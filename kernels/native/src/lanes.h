// Vectors of a row whose length is no multiple of kLanes.
#pragma once

#include <algorithm>
#include <cstring>

#include "element.h"

namespace baton {

// kLanes elements, of which the first `count` are stored, if any; the others are 0.
template <class E>
Floats read_lanes(const typename E::Stored* from, int64_t count) {
  if (count >= kLanes) return E::widen_lanes(from);
  typename E::Stored lanes[kLanes] = {};
  std::memcpy(lanes, from, static_cast<size_t>(std::max<int64_t>(0, count)) * sizeof *from);
  return E::widen_lanes(lanes);
}

// Stores the first `count` lanes, if any.
template <class E>
void write_lanes(typename E::Stored* to, Floats values, int64_t count) {
  if (count >= kLanes) return E::narrow_lanes(to, values);
  typename E::Stored lanes[kLanes];
  E::narrow_lanes(lanes, values);
  std::memcpy(to, lanes, static_cast<size_t>(std::max<int64_t>(0, count)) * sizeof *to);
}

}  // namespace baton
