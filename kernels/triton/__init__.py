"""Kernels in Triton: NVIDIA GPUs, and its interpreter on the CPU."""
