"""A forward pass: its inputs, its recordings, and the memory that it leaves to the KV cache."""
