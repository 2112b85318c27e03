"""Model families as plain tensor code. `registry` maps architectures to families."""
