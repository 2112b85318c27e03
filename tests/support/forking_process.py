"""A process that forks, idle and while its kernels compute; each child computes too.

Run as a module. A child that hangs is ended by the system; the exit status says whether all
got what the parent had.
"""

import multiprocessing
import os
import signal
import sys
import threading

import torch

import kernels
from tests.support.kernel_checks import filled_weight, normal

_CHILD_LIMIT_S = 20
_FORKS_WHILE_BUSY = 12


def main() -> int:
    kernels.set_num_threads(3)
    weight, hidden = filled_weight(normal(500, 300)), normal(40, 300, seed=1)
    expected = kernels.linear(hidden, weight)

    def check_as_child() -> None:
        signal.alarm(_CHILD_LIMIT_S)
        same = kernels.num_threads() == 3
        same &= torch.equal(kernels.linear(hidden, weight), expected)
        kernels.set_num_threads(2)
        same &= torch.equal(kernels.linear(hidden, weight), expected)
        os._exit(not same)

    failures = _fork(check_as_child)
    process = multiprocessing.get_context("fork").Process(target=check_as_child)
    process.start()
    process.join()
    failures += process.exitcode != 0
    with _Busy():
        failures += sum(_fork(check_as_child) for _ in range(_FORKS_WHILE_BUSY))
    failures += not torch.equal(kernels.linear(hidden, weight), expected)
    print(f"{failures} failures")
    return failures


def _fork(run_as_child) -> bool:
    """Whether the child failed, or was ended."""
    pid = os.fork()
    if not pid:
        run_as_child()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


class _Busy:
    """Computes in another thread, which gives Python's lock away only while it does."""

    def __enter__(self):
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._compute)
        self._thread.start()

    def __exit__(self, *error):
        self._is_over.set()
        self._thread.join()

    def _compute(self):
        weight, hidden = filled_weight(normal(1000, 1000)), normal(300, 1000)
        while not self._is_over.is_set():
            kernels.linear(hidden, weight)


if __name__ == "__main__":
    sys.exit(main())
