"""Kernels for CPUs in C++: their sources, their build, the choice of a library at run time.

`src/` is compiled once per variant, that is, per instruction set, into `lib/`
(`build.py`); `library.py` loads the best variant that the CPU has. See docs/cpu.md.

The build hook of the package imports this package where nothing is installed: it,
`variants.py` and `build.py` import the standard library alone.
"""
