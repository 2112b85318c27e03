"""Checkpoints: reading, describing and loading weights."""
