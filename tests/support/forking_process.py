"""A process that forks, idle and while its kernels compute; each child computes too.

Run it as a module. A child that hangs prints its stack and is ended by an alarm. The process
prints how each child ended; its exit status is 0 if all computed the parent's results.
"""

import faulthandler
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


def main() -> bool:
    faulthandler.enable()
    faulthandler.register(signal.SIGALRM, chain=True)
    kernels.set_num_threads(3)
    weight, hidden = filled_weight(normal(500, 300)), normal(40, 300, seed=1)
    expected = kernels.linear(hidden, weight)

    def check_as_child() -> None:
        signal.alarm(_CHILD_LIMIT_S)
        wrong = [kernels.num_threads() != 3]
        wrong.append(not torch.equal(kernels.linear(hidden, weight), expected))
        kernels.set_num_threads(2)
        wrong.append(not torch.equal(kernels.linear(hidden, weight), expected))
        os._exit(sum(is_wrong << place for place, is_wrong in enumerate(wrong)))

    ends = {"idle": _fork(check_as_child)}
    process = multiprocessing.get_context("fork").Process(target=check_as_child)
    process.start()
    process.join()
    ends["multiprocessing"] = process.exitcode
    with _Busy():
        ends |= {f"busy {turn}": _fork(check_as_child) for turn in range(_FORKS_WHILE_BUSY)}
    ends["parent"] = int(not torch.equal(kernels.linear(hidden, weight), expected))
    print(*(f"{child}: {end}" for child, end in ends.items()), sep="\n")
    return any(ends.values())


def _fork(run_as_child) -> int:
    """Returns the child's exit status, or minus the number of the signal that ended it."""
    pid = os.fork()
    if not pid:
        run_as_child()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class _Busy:
    """Computes in another thread, which releases the GIL only while a kernel runs."""

    def __enter__(self):
        self._is_over, self._has_computed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._compute)
        self._thread.start()
        # The first computation also sets up torch and the thread, which is not tested here.
        assert self._has_computed.wait(_CHILD_LIMIT_S)

    def __exit__(self, *error):
        self._is_over.set()
        self._thread.join()

    def _compute(self):
        weight, hidden = filled_weight(normal(1000, 1000)), normal(300, 1000)
        while not self._is_over.is_set():
            kernels.linear(hidden, weight)
            self._has_computed.set()


if __name__ == "__main__":
    sys.exit(main())
