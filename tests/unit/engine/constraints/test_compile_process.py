"""Why a grammar's process has ended before its answer."""

import socket
from types import SimpleNamespace

import pytest

from engine.constraints import compile_process
from engine.constraints.compile_process import STARTED, CompileProcess, JobTimeoutError


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


@pytest.mark.parametrize("is_alive", [False, True])
def test_a_late_job_is_sent_again_if_its_compile_process_has_ended(monkeypatch, is_alive):
    """Another job has ended that, and with it those that had run for long."""
    compiling = CompileProcess(pytest.fail, ())
    statuses = iter((None if is_alive else -9, None))
    results = iter((JobTimeoutError(), b"answer"))

    def send(channel):
        status = next(statuses)
        compiling._process = SimpleNamespace(poll=lambda: status)
        return compiling._process

    def talk(*arguments):
        if isinstance(result := next(results), Exception):
            raise result
        return result

    monkeypatch.setattr(compiling, "_send", send)
    monkeypatch.setattr(compile_process, "_talk", talk)
    if is_alive:
        with pytest.raises(JobTimeoutError):
            compiling.run_job(b"{}", 1.0)
    else:
        assert compiling.run_job(b"{}", 1.0) == b"answer"
