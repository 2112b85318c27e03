// Linear layers whose weights have a storage format, computed on int8 activations.
#pragma once

#include "linear_job.h"

namespace baton {

// Whether integer products can be computed with a format's codes.
bool has_int8_form(Format format);

// Computes layers of equal shapes and of one format that has an integer form.
void run_quantized(ElementType element, const Layers& layers, Workers& workers);

}  // namespace baton
