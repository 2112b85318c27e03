"""Groups of sequences and their states."""
