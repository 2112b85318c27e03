"""Kernels for CPUs in C++: their sources in `src/`, and their use by torch's tensors."""
