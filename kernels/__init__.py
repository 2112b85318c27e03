"""Tensor primitives behind one dispatch. `kernels.reference` is the oracle."""
