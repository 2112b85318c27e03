"""Constrained output: grammars, their compilation, and the masks that they put on draws."""
