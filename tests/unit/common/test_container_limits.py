"""Shares of a container's limits, refusals at the start, and planned threads."""

import re
import signal

import pytest

from baton.cli import main
from baton.common import container_limits
from baton.common.container_limits import (
    ROUTER_NEEDS,
    SUPERVISOR_NEEDS,
    WORKER_NEEDS,
    EndWatch,
    LimitsShare,
    check_command,
    check_needs,
    describe_limits,
    plan_threads,
)
from baton.common.errors import ConfigurationError
from baton.common.machine_limits import Memory

MIB = 1 << 20
FULL = LimitsShare()


@pytest.fixture
def limit(tmp_path):
    """Returns a function that makes a machine with limits, and returns its root folder."""

    def make(memory="max", tasks="max"):
        group = tmp_path / "sys/fs/cgroup/pod"
        files = {
            tmp_path / "proc/self/cgroup": "0::/pod\n",
            tmp_path / "proc/meminfo": f"MemTotal: {1 << 24} kB\nMemAvailable: {1 << 23} kB\n",
            group / "memory.max": f"{memory}\n",
            group / "memory.current": "0\n",
            group / "pids.max": f"{tasks}\n",
        }
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


@pytest.fixture(autouse=True)
def _few_cores(monkeypatch):
    monkeypatch.setattr(container_limits, "affine_cores", lambda: 2)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")  # which a command may set for good


@pytest.mark.parametrize(
    ("command", "needs"),
    [("prefill", WORKER_NEEDS), ("decode", WORKER_NEEDS), ("router", ROUTER_NEEDS)],
)
def test_a_server_is_refused_below_what_it_needs_and_not_at_it(limit, command, needs):
    check_command(command, limit())
    check_command(command, limit(memory=needs.num_bytes, tasks=needs.all_tasks + 2))
    with pytest.raises(ConfigurationError) as error:
        check_command(command, limit(memory=needs.num_bytes - 1))
    for text in (f"{needs.num_bytes // MIB} MiB", f"baton {command}", "mem_limit", "--memory"):
        assert text in error.value.message
    with pytest.raises(ConfigurationError, match=r"tasks \(pids\) .* is 9; .*pids_limit"):
        check_command(command, limit(tasks=9))


def test_the_number_of_tasks_that_an_error_names_is_enough(limit):
    with pytest.raises(ConfigurationError) as error:
        check_command("decode", limit(tasks=9))
    needed = int(re.search(r"needs (\d+)", error.value.message)[1])
    check_command("decode", limit(tasks=needed))
    assert plan_threads(None, 8, FULL, limit(tasks=needed)) == 1


def test_commands_that_serve_nothing_run_in_any_container(limit):
    for command in ("health", "doctor", "--version", ""):
        check_command(command, limit(memory=MIB, tasks=2))


def test_the_command_line_refuses_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(
        container_limits, "read_memory", lambda root: Memory(1 << 34, MIB, 64 * MIB)
    )
    assert main(["decode", "--model", "demo"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("baton decode: error: the memory limit of this container is 64 MiB")


def test_all_processes_of_a_container_are_counted(limit):
    needs = SUPERVISOR_NEEDS + ROUTER_NEEDS + 2 * WORKER_NEEDS
    root = limit(memory=needs.num_bytes, tasks=needs.all_tasks + 4)
    check_needs("baton serve with 2 workers", needs, 2, root)
    with pytest.raises(ConfigurationError, match="baton serve with 3 workers needs at least"):
        check_needs("baton serve with 3 workers", needs + WORKER_NEEDS, 3, root)


def test_a_share_is_passed_on_by_the_environment():
    share = LimitsShare.beside(SUPERVISOR_NEEDS, 3)
    assert LimitsShare.from_environment(share.environment) == share
    assert LimitsShare.from_environment({}) == FULL
    assert share.num_bytes(SUPERVISOR_NEEDS.num_bytes + 300) == 100
    assert share.of_ranks(2).num_bytes(SUPERVISOR_NEEDS.num_bytes + 300) == 50
    assert share.num_bytes(5) == 0


def test_threads_are_as_many_as_cores_without_a_limit_of_tasks(limit):
    assert plan_threads(None, 8, FULL, limit()) == 8
    assert plan_threads(3, 8, FULL, limit()) == 3


def test_threads_are_fewer_under_a_limit_of_tasks(limit):
    root = limit(tasks=WORKER_NEEDS.all_tasks + 2 * 3 + 1)
    assert plan_threads(None, 8, FULL, root) == 3
    assert plan_threads(None, 2, FULL, root) == 2
    assert plan_threads(3, 8, FULL, root) == 3
    with pytest.raises(ConfigurationError, match="with --num-threads 4 needs"):
        plan_threads(4, 8, FULL, root)


def test_workers_of_a_container_divide_its_tasks(limit):
    share = LimitsShare.beside(ROUTER_NEEDS, 2)
    tasks = ROUTER_NEEDS.all_tasks + 2 * (WORKER_NEEDS.all_tasks + 2)
    assert plan_threads(None, 8, share, limit(tasks=tasks)) == 1
    with pytest.raises(ConfigurationError, match=f"a container of 2 workers needs {tasks},"):
        plan_threads(None, 8, share, limit(tasks=tasks - 1))


def test_help_is_printed_in_any_container(monkeypatch, capsys):
    monkeypatch.setattr(
        container_limits, "read_memory", lambda root: Memory(1 << 34, MIB, 64 * MIB)
    )
    with pytest.raises(SystemExit, match="0"):
        main(["decode", "--help"])
    assert "--model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "kills", "text"),
    [
        (3, (0, 1), "ended with status 3"),
        (-signal.SIGKILL, (4, 4), "status -9: killed, but not by the kernel for lack of memory"),
        (-signal.SIGKILL, (4, 5), r"status -9: the kernel .* limit of 512 MiB .*mem_limit"),
        (137, (0, 1), "status 137: the kernel killed it for lack of memory"),
        (-signal.SIGKILL, (None, None), "ended with status -9"),
        (-signal.SIGTERM, (0, 1), "ended with status -15"),
    ],
)
def test_an_end_for_lack_of_memory_differs_from_others(monkeypatch, status, kills, text):
    counts = iter(kills)
    monkeypatch.setattr(container_limits, "count_memory_kills", lambda: next(counts))
    monkeypatch.setattr(container_limits, "read_memory", lambda: Memory(None, None, 512 * MIB))
    assert re.search(f"{text}$" if "kernel" not in text else text, EndWatch().describe(status))


def test_an_end_for_lack_of_the_machines_memory_names_no_container(monkeypatch):
    counts = iter((0, 1))
    monkeypatch.setattr(container_limits, "count_memory_kills", lambda: next(counts))
    monkeypatch.setattr(container_limits, "read_memory", lambda: Memory(1 << 34, MIB, None))
    text = EndWatch().describe(-signal.SIGKILL)
    assert "for lack of memory of this machine; set a lower --kv-cache-memory-bytes" in text
    assert "container" not in text


def test_the_limits_are_a_line_of_the_log(limit):
    assert re.fullmatch(r"memory=none cores=\d+ tasks=none", describe_limits(limit()))
    limited = describe_limits(limit(memory=300 * MIB, tasks=50))
    assert re.fullmatch(r"memory=300 MiB cores=\d+ tasks=50", limited)
