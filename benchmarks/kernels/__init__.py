"""The primitives of `kernels`, one by one, on the shapes of a model."""
