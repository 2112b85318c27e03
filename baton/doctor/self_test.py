"""Loads the native library: `python -m baton.doctor.self_test`.

A process of its own for `baton doctor`: a library that crashes ends this one.
"""

import sys

from baton.errors import ConfigurationError
from kernels.native.library import load

__all__ = ["main"]


def main() -> int:
    """Exit status 0 and a line on stdout, or another and the reason on stderr."""
    try:
        library = load()
    except ConfigurationError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    print("torch computes" if library is None else "the library loads")
    return 0


if __name__ == "__main__":
    sys.exit(main())
