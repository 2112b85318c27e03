"""Reads the weights of checkpoints whose layers are quantized, each as one tensor."""
