// Linear layers whose weights have a storage format, computed on int8 activations.
#pragma once

#include "linear_job.h"

namespace baton {

// Computes layers of equal shapes and of one format, whose codes are integers.
void run_quantized(ElementType element, const Layers& layers, Workers& workers);

}  // namespace baton
