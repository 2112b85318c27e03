"""Measures a GPU: `python3 -m benchmarks.gpu`, which is `baton bench gpu` and `make bench-gpu`."""
