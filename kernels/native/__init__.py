"""Kernels for CPUs in C++: sources, build, and the choice of a library at run time.

`src/` is compiled once per variant (instruction set) into `lib/` by `build.py`; `library.py`
loads the best variant that the CPU supports. See docs/cpu.md.

The build hook imports this package before any dependency is installed, so this module,
`variants.py` and `build.py` import the standard library alone.
"""
