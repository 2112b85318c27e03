"""`python -m baton.up.child PARENT_PID MODULE ARGUMENTS...`: runs a module that
ends with its parent, even one that is killed.

Asks the kernel to be killed when the parent dies (Linux's PR_SET_PDEATHSIG,
which an exec keeps), then becomes `python -m MODULE ARGUMENTS...`. The child
does this itself because Python code between fork and exec is unsafe in a
parent with threads, which gRPC has. Elsewhere than on Linux only an orderly
stop of the parent ends the children.
"""

import ctypes
import os
import signal
import sys

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Becomes the module named in `arguments`; returns only on a dead parent."""
    parent_pid, module, *module_arguments = arguments
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent_pid):  # it died before the kernel was asked
            return
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `baton.cli.main`, which it goes past
    command = [sys.executable, "-m", module, *module_arguments]
    os.execv(sys.executable, command)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main(sys.argv[1:])
