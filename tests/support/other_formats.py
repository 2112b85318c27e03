"""`python -m tests.support.other_formats FLAGS...`: a prefill worker of a Baton to come, which has
another version of one format. The variable OTHER_FORMAT has the name of the version's constant.
"""

import importlib
import os
import runpy
import sys

__all__ = ["OTHER_VERSION", "VARIABLE", "main"]

VARIABLE = "OTHER_FORMAT"
OTHER_VERSION = 7


def main() -> None:
    """Changes the constant in all modules that have it, and runs the worker."""
    name = os.environ[VARIABLE]
    importlib.import_module("worker.server")
    holders = [module for module in [*sys.modules.values()] if name in vars(module)]
    assert holders, name
    for module in holders:
        setattr(module, name, OTHER_VERSION)
    runpy.run_module("worker.prefill", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
