// Linear layers whose weights have a storage format, computed as if the weights were packed.
#pragma once

#include "linear_job.h"

namespace baton {

// Computes layers of one storage format. Weights are rounded to the type `element`; results have
// the bits of a product with the rounded weights.
void run_exact(ElementType element, const Layers& layers, Workers& workers);

}  // namespace baton
