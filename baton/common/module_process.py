"""`python -P -m baton.common.module_process PARENT_PID MODULE ARGUMENTS...`: runs one of Baton's
modules in a process of its own.

All processes of Baton's that run a module start through this one. `python -m worker.decode` would
run another distribution's package `worker` where one is installed; `baton` is Baton's alone, and
importing it makes Python find Baton's packages first (`baton.common.own_packages`).

With a parent's id other than 0, the process ends with its parent, even when that is killed: it asks
the kernel for this (Linux's PR_SET_PDEATHSIG). It does so itself because running Python between
fork and exec is unsafe in a parent with threads, and gRPC has threads. On other systems, children
end only when the parent stops in order. This module imports little: the other one does.
"""

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

__all__ = ["end_with_parent", "main", "module_command", "path_variable"]

_PR_SET_PDEATHSIG = 1
_NO_PARENT = 0


def module_command(module: str, *arguments: str, ends_with_parent: bool = False) -> list[str]:
    """Returns the command line of a process that runs a module of Baton's.

    Args:
        module: its name; of a package, `__main__` runs.
        arguments: those of the module.
        ends_with_parent: whether the kernel ends it with the thread of this process that starts it.
    """
    parent_pid = os.getpid() if ends_with_parent else _NO_PARENT
    # -P: files of the working folder must not shadow packages.
    return [sys.executable, "-P", "-m", __name__, str(parent_pid), module, *arguments]


def path_variable() -> dict[str, str]:
    """Returns the variable by which a process that this one starts imports what this one would."""
    return {"PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)}


def main(arguments: list[str]) -> None:
    """Runs the module in `arguments`; returns at once if the parent is dead."""
    parent_pid, module, *_ = arguments
    if int(parent_pid) != _NO_PARENT:
        end_with_parent()
        if sys.platform == "linux" and os.getppid() != int(parent_pid):  # the parent died before
            return
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in `baton.cli.main`
    sys.argv[:] = arguments[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def end_with_parent() -> None:
    """Makes the kernel kill this process when its parent dies, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
