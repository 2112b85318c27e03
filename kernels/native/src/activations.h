// Activations of MLPs and gates, on vectors of floats.
#pragma once

#include "commands.h"
#include "element.h"

namespace baton {

// x / (1 + exp(-z)), with exp from the side that cannot overflow
inline Floats times_sigmoid(Floats x, Floats z) {
  const Floats magnitude = select(z < Floats{}, z, -z);  // -|z|
  const Floats power = exp2_of_negative(magnitude * broadcast(1.44269504f));
  const Floats one = broadcast(1.0f);
  return x * select(z < Floats{}, power, one) / (one + power);
}

// x * (1 + tanh(u)) / 2 = x * sigmoid(2u) with u = sqrt(2 / pi) * (x + 0.044715 x^3)
inline Floats gelu_tanh(Floats x) {
  const Floats cubic = x * x * x * broadcast(0.044715f);
  return times_sigmoid(x, (x + cubic) * broadcast(1.59576912f));
}

// x * erfc(-x / sqrt(2)) / 2, where erfc(z) is to about 1.2e-7 of its value: Press et al.,
// Numerical Recipes, "erfcc".
inline Floats gelu(Floats x) {
  constexpr float kCoefficients[] = {0.17087277f, -0.82215223f, 1.48851587f,  -1.13520398f,
                                     0.27886807f, -0.18628806f, 0.09678418f, 0.37409196f,
                                     1.00002368f, -1.26551223f};
  const Floats one = broadcast(1.0f), half = broadcast(0.5f);
  const Floats z = select(x < Floats{}, -x, x) * broadcast(0.707106781f);
  const Floats t = one / (one + half * z);
  Floats p = Floats{};
  for (const float coefficient : kCoefficients) p = p * t + broadcast(coefficient);
  const Floats power = exp2_of_negative((p - z * z) * broadcast(1.44269504f));
  const Floats tail = half * t * power;  // of the normal distribution, beyond |x|
  return x * select(x < Floats{}, tail, one - tail);
}

// Of gates and the values they gate; see kernels/layer_kinds.py.
constexpr float kClampLimit = 7.0f, kClampSlope = 1.702f;

// NaN stays.
inline Floats clamped_silu(Floats x) {
  const Floats limit = broadcast(kClampLimit);
  const Floats clamped = select(limit < x, limit, x);
  return times_sigmoid(clamped, clamped * broadcast(kClampSlope));
}

// The factor of an activated gate: the value, but for one activation.
template <class E>
inline Floats gated_value(Activation activation, Floats value) {
  if (activation != Activation::kClampedSilu) return value;
  const Floats limit = broadcast(kClampLimit);
  const Floats below = select(limit < value, limit, value);
  return rounded<E>(select(below < -limit, -limit, below) + broadcast(1.0f));
}

// Calls body(f), where f computes the activation of Floats.
template <class Body>
inline void with_activation(Activation activation, const Body& body) {
  switch (activation) {
    case Activation::kNone: return body([](Floats x) { return x; });
    case Activation::kSilu: return body([](Floats x) { return times_sigmoid(x, x); });
    case Activation::kGelu: return body([](Floats x) { return gelu(x); });
    case Activation::kGeluTanh: return body([](Floats x) { return gelu_tanh(x); });
    case Activation::kRelu:
      return body([](Floats x) { return select(x < Floats{}, Floats{}, x); });
    case Activation::kSigmoid:
      return body([](Floats x) { return times_sigmoid(broadcast(1.0f), x); });
    case Activation::kClampedSilu: return body([](Floats x) { return clamped_silu(x); });
  }
}

}  // namespace baton
