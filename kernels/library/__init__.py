"""The library of the CPU kernels: its build, its variants, the choice of one, its commands.

`build.py` compiles `kernels/native/src/` once per variant (instruction set) into
`kernels/native/lib/`; `library.py` loads the best variant that the CPU supports. See docs/cpu.md.

The build hook imports this package before any dependency is installed, so this module,
`variants.py` and `build.py` import the standard library alone.
"""
