"""Benchmarks: each figure with its baseline, its floor, the hardware and the commit."""
