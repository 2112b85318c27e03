"""Why a grammar's process has ended before its answer."""

import socket
from types import SimpleNamespace

import pytest

from engine.constraints import compile_process
from engine.constraints.compile_process import STARTED, JobTimeoutError


@pytest.mark.parametrize(("elapsed_s", "is_late"), [(0.4, False), (0.6, True), (3.0, True)])
def test_two_threads_use_up_a_limit_of_cpu_time_in_half_of_it(monkeypatch, elapsed_s, is_late):
    times = iter((100.0, 100.0 + elapsed_s))
    monkeypatch.setattr(compile_process, "time", SimpleNamespace(monotonic=lambda: next(times)))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(STARTED)
        theirs.shutdown(socket.SHUT_WR)  # the process has ended
        if is_late:
            with pytest.raises(JobTimeoutError):
                compile_process._talk(ours, b"{}", 1.0)
        else:
            assert compile_process._talk(ours, b"{}", 1.0) is None
