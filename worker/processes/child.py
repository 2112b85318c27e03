"""`python -m worker.processes.child PARENT_PID MODULE ARGUMENTS...`: runs a module as a child
process that ends with its parent, even when the parent is killed.

The child asks the kernel to kill it when the parent dies (Linux's PR_SET_PDEATHSIG, which
survives an exec), then replaces itself with `python -P -m MODULE ARGUMENTS...`. The child does
this itself because running Python between fork and exec is unsafe in a parent with threads,
and gRPC has threads. On other systems, children end only when the parent stops in order.
This module imports little, since every process of the cluster starts through it.
"""

import ctypes
import os
import signal
import sys

__all__ = ["end_with_parent", "main"]

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Replaces this process with the module in `arguments`; returns only if the parent is dead."""
    parent_pid, module, *module_arguments = arguments
    end_with_parent()
    if sys.platform == "linux" and os.getppid() != int(parent_pid):  # the parent died before
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in `baton.cli.main`
    command = [sys.executable, "-P", "-m", module, *module_arguments]
    os.execv(sys.executable, command)  # noqa: S606 - no shell is needed


def end_with_parent() -> None:
    """Makes the kernel kill this process when its parent dies, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
