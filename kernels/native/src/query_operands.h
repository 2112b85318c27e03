// Queries as the left operands of products with K.
#pragma once

#include <cmath>
#include <type_traits>

#include "kv_elements.h"
#include "lanes.h"

namespace baton {

// The first of the two elements, two apart, of a group of K whose words hold two groups.
inline int64_t split_element(int64_t group) { return group / 2 * 4 + group % 2; }

// Rounds a query to operands, `stride` apart; returns their factor.
template <class E>
float pack_integers(const typename E::Stored* query, int64_t head_dim, int64_t stride,
                    Int16::Operand* operands) {
  Masks largest{};
  for (int64_t i = 0; i < head_dim; i += kLanes) {
    largest = larger_magnitudes(largest, read_lanes<E>(query + i, head_dim - i));
  }
  const float most = Int16::largest_for(head_dim);
  const float factor = Int16::factor_of(largest_lane(largest), most), scaling = 1.0f / factor;
  const auto element = [&](int64_t i) -> Int16::Operand {
    const bool is_number = i < head_dim && factor == factor;
    const float value = is_number ? E::widen_one(query[i]) * scaling : 0.0f;
    return static_cast<uint16_t>(static_cast<int64_t>(std::nearbyint(value)));
  };
  for (int64_t group = 0; group < key_groups<IntegerKv>(head_dim); ++group) {
    const int64_t i = split_element(group);
    operands[group * stride] = element(i) | element(i + 2) << 16;
  }
  return factor;
}

// Packs a query in the order of K, operands `stride` apart; returns their factor.
template <class E, class Kv>
float pack_query(const typename E::Stored* query, int64_t head_dim, int64_t stride,
                 typename Kv::Product::Operand* operands) {
  if constexpr (std::is_same_v<Kv, IntegerKv>) {
    return pack_integers<E>(query, head_dim, stride, operands);
  } else {
    const auto element = [&](int64_t i) {
      return i < head_dim ? query[i] : typename E::Stored{0};
    };
    for (int64_t group = 0; group < key_groups<Kv>(head_dim); ++group) {
      if constexpr (Kv::kWordElements == E::kGroup) {
        operands[group * stride] = E::operand(query + group * E::kGroup);
      } else {
        const int64_t i = split_element(group);
        const typename E::Stored pair[] = {element(i), element(i + 2)};
        operands[group * stride] = E::operand(pair);
      }
    }
    return 1.0f;
  }
}

}  // namespace baton
