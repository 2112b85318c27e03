"""`baton doctor`: its findings, output and exit status."""

import json
import re
import subprocess
import sys
import tomllib
from collections import namedtuple
from contextlib import closing, nullcontext
from importlib import metadata
from pathlib import Path

import pytest
import torch

import kernels
from baton.cli import doctor, main
from baton.common import container_limits, machine_limits
from baton.common.errors import ConfigurationError
from baton.common.machine_limits import Memory, Tasks
from baton.doctor import (
    Finding,
    Level,
    connectors,
    gpus,
    machine,
    native_kernels,
    nixl_reads,
    ranks,
    software,
)
from kernels.library.library import Library, Selection
from kernels.library.variants import Variant
from kvstore.jobs import TransferResults
from kvstore.peer.worker import PeerConnectorWorker
from kvstore.registry import open_store
from kvstore.store_connector import StoreConnectorWorker
from tests.support.nixl_remote import needs_process_vm_readv

GIB = 1 << 30


@pytest.fixture
def fake_findings(monkeypatch):
    """Returns a function that replaces the doctor's findings."""

    def find(*findings):
        monkeypatch.setattr("baton.cli.doctor.examine", lambda kv_connector: list(findings))

    return find


FINE = Finding("cores", Level.OK, "2 of 2", {"affine": 2})
SLOW = Finding("cpu kernels", Level.NOTE, "torch")
BROKEN = Finding("torch", Level.PROBLEM, "is gone")


def test_each_finding_is_a_line(fake_findings, capsys):
    fake_findings(FINE, SLOW)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1)[0] for line in lines] == ["ok", "note"]
    assert lines[0].endswith("cores                2 of 2")


def test_a_problem_fails_the_command(fake_findings, capsys):
    fake_findings(FINE, BROKEN)
    assert main(["doctor"]) == 1
    assert "problem torch                is gone" in capsys.readouterr().out


def test_long_lines_are_folded_under_their_text(fake_findings, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    fake_findings(Finding("cores", Level.OK, "word " * 20))
    main(["doctor"])
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert second.index("word") == first.index("word")
    assert len(first) <= 80


@pytest.mark.parametrize(("findings", "ok"), [((FINE, SLOW), True), ((BROKEN,), False)])
def test_the_json_report(fake_findings, capsys, findings, ok):
    fake_findings(*findings)
    assert main(["doctor", "--json"]) == (0 if ok else 1)
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is ok
    assert report["findings"][0] == {
        "topic": findings[0].topic,
        "level": findings[0].level.value,
        "text": findings[0].text,
        "facts": dict(findings[0].facts),
    }


def test_a_check_that_fails_is_a_finding(monkeypatch):
    def check_nothing():
        yield FINE
        raise ImportError("libgone.so: cannot open shared object file")

    monkeypatch.setattr(doctor, "_CHECKS", (check_nothing,))
    (finding,) = doctor.examine()
    assert (finding.topic, finding.level) == ("nothing", Level.PROBLEM)
    assert "libgone.so" in finding.text


def check_fake_selection(monkeypatch, result):
    def select():
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(native_kernels.library, "select", select)
    (finding,) = native_kernels.check_selection()
    return finding


def test_selected_native_kernels_are_ok(monkeypatch):
    selection = Selection("avx2", Path("/somewhere/lib.so"), "this CPU has avx2")
    finding = check_fake_selection(monkeypatch, selection)
    assert finding.level is Level.OK
    assert finding.text == "avx2: this CPU has avx2 (/somewhere/lib.so)"
    assert finding.facts["path"] == "/somewhere/lib.so"


def test_the_fallback_to_torch_is_noted_as_slower(monkeypatch):
    finding = check_fake_selection(monkeypatch, Selection("torch", None, "no library was built"))
    assert finding.level is Level.NOTE
    assert finding.text == "torch, which is slower than native ones: no library was built"


def test_an_unavailable_choice_of_kernels_is_a_problem(monkeypatch):
    finding = check_fake_selection(monkeypatch, ConfigurationError("BATON_CPU_KERNELS is 'avx9'"))
    assert (finding.level, finding.text) == (Level.PROBLEM, "BATON_CPU_KERNELS is 'avx9'")


def test_libraries_that_are_not_built_are_listed_with_their_reason(monkeypatch):
    states = (
        Library(Variant("fast"), Path("a"), built=False, problem="gcc 8 does not take it"),
        Library(Variant("plain"), Path("b"), built=True),
    )
    monkeypatch.setattr(native_kernels.library, "find_libraries", lambda: states)
    (finding,) = native_kernels.check_libraries()
    assert finding.level is Level.NOTE
    assert finding.text.startswith("fast not built (gcc 8 does not take it); plain built; `python")


@pytest.mark.parametrize(
    ("status", "stderr", "text"),
    [
        (-4, "", "the kernels crashed: signal 4"),
        (1, "Traceback\nOSError: gone\n", "OSError: gone"),
        (1, "", "failed with status 1 and no message"),
    ],
)
def test_kernels_that_fail_their_test_are_a_problem(monkeypatch, status, stderr, text):
    def run(command, **options):
        return subprocess.CompletedProcess(command, status, "", stderr)

    monkeypatch.setattr(native_kernels.subprocess, "run", run)
    (finding,) = native_kernels.check_result()
    assert (finding.level, finding.text) == (Level.PROBLEM, text)


def test_kernels_that_hang_are_a_problem(monkeypatch):
    def run(command, *, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(native_kernels.subprocess, "run", run)
    (finding,) = native_kernels.check_result()
    assert finding.level is Level.PROBLEM
    assert "longer than" in finding.text


def test_a_product_that_is_wrong_fails_the_self_test(monkeypatch, capsys):
    def linear(hidden, weight, *, out_dtype):
        product = right(hidden, weight, out_dtype=out_dtype)
        return product if hidden.dtype is torch.float32 else product + 1

    right = kernels.linear
    monkeypatch.setattr(kernels, "linear", linear)
    monkeypatch.setattr(kernels, "set_num_threads", lambda num_threads: None)
    assert native_kernels.run_self_test() == 1
    assert capsys.readouterr().err == "a matrix product in torch.bfloat16 is wrong\n"


@pytest.mark.skipif(ranks.library.select().path is None, reason="no native kernels")
def test_two_processes_that_add_up_are_ok():
    (finding,) = ranks.check_ranks()
    assert finding.level is Level.OK
    assert finding.text.startswith("two processes add up 768 numbers in ")


def test_ranks_need_the_native_kernels(monkeypatch):
    monkeypatch.setattr(ranks.library, "select", lambda: Selection("torch", None, "forced"))
    (finding,) = ranks.check_ranks()
    assert finding.level is Level.NOTE


def test_no_compiler_is_a_note(monkeypatch):
    monkeypatch.setattr(native_kernels, "find_compiler", lambda: None)
    (finding,) = native_kernels.check_compiler()
    assert finding.level is Level.NOTE


def test_the_number_of_threads_per_worker_is_reported(monkeypatch):
    monkeypatch.setattr(machine_limits, "usable_cores", lambda: 16)
    (finding,) = machine.check_threads()
    assert finding.level is Level.OK
    assert "computes on 16" in finding.text
    assert finding.facts == {"per_worker": 16}


@pytest.mark.parametrize(
    ("memory", "level", "text"),
    [
        (Memory(8 * GIB, 5 * GIB, None), Level.OK, "5.0 GiB available of 8.0 GiB"),
        (
            Memory(8 * GIB, GIB, 3 * GIB),
            Level.NOTE,
            "1.0 GiB available of 8.0 GiB, limited to 3.0 GiB by control group, which leaves 2848 "
            "MiB for a worker's model, its largest step and its KV cache, larger models will not "
            "fit",
        ),
        (
            Memory(8 * GIB, GIB, GIB >> 4),
            Level.PROBLEM,
            "1.0 GiB available of 8.0 GiB, limited to 0.1 GiB by control group, and a worker needs "
            "at least 224 MiB besides its model: not enough, larger models will not fit",
        ),
        (Memory(None, None, None), Level.OK, "unknown available of unknown"),
    ],
)
def test_memory_and_its_limit_are_reported(monkeypatch, memory, level, text):
    monkeypatch.setattr(machine_limits, "read_memory", lambda: memory)
    (finding,) = machine.check_memory()
    assert (finding.level, finding.text) == (level, text)


@pytest.mark.parametrize(
    ("limit", "level", "text"),
    [
        (None, Level.OK, "no limit by control group"),
        (200, Level.OK, r"limited to 200 .* thread that computes: \d+ of these"),
        (10, Level.PROBLEM, "limited to 10 .*: not enough for one"),
    ],
)
def test_the_limit_of_tasks_is_reported(monkeypatch, limit, level, text):
    tasks = Tasks(limit, 3)
    monkeypatch.setattr(machine_limits, "read_tasks", lambda: tasks)
    monkeypatch.setattr(container_limits, "read_tasks", lambda root: tasks)
    (finding,) = machine.check_tasks()
    assert finding.level is level
    assert re.fullmatch(text, finding.text)
    assert finding.facts["limit"] == limit


@pytest.mark.parametrize(("budget", "level"), [(17500, Level.OK), (100, Level.NOTE)])
def test_the_connections_that_open_files_allow_are_reported(monkeypatch, budget, level):
    monkeypatch.setattr(machine, "connection_budget", lambda: budget)
    (finding,) = machine.check_files()
    assert finding.level is level
    assert f"up to {min(budget, 8192)} connections" in finding.text


def test_little_shared_memory_is_a_note(monkeypatch, tmp_path):
    usage = namedtuple("usage", ["total", "used", "free"])(64 << 20, 0, 64 << 20)
    monkeypatch.setattr(machine, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage)
    (finding,) = machine.check_shared_memory()
    assert finding.level is Level.NOTE
    assert "--shm-size" in finding.text


def test_no_shared_memory_is_a_note(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_SHARED_MEMORY", tmp_path / "none")
    (finding,) = machine.check_shared_memory()
    assert finding.level is Level.NOTE
    assert "temporary folder" in finding.text


@pytest.mark.parametrize(("has_gpu", "first"), [(False, "ok"), (True, "note")])
def test_missing_optional_packages_are_notes(monkeypatch, has_gpu, first):
    def version(distribution):
        raise metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(software.metadata, "version", version)
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    findings = list(software.check_extras())
    assert [finding.level for finding in findings] == [first, *["note"] * 5]
    assert 'pip install "baton-llm[bench]"' in findings[1].text


def test_what_is_needed_is_installed_here():
    (finding,) = software.check_requirements()
    assert finding.level is Level.OK, finding.text


def test_needed_packages_that_are_missing_or_too_old_are_problems(monkeypatch):
    lines = [
        "absent>=2",
        "old<3,>=2",
        "fine",
        'plots>=1; extra == "bench"',
        "other; os_name == '?'",
    ]
    installed = {"old": "1.9", "fine": "0.1.dev1"}
    monkeypatch.setattr(software.metadata, "requires", lambda name: lines)
    monkeypatch.setattr(software, "_installed_version", installed.get)
    absent, old = software.check_requirements()
    assert {absent.level, old.level} == {Level.PROBLEM}
    assert absent.text == "absent>=2 is needed, not installed: pip install 'absent>=2'"
    assert old.text.startswith("old<3,>=2 is needed, 1.9 is installed: ")


def test_a_folder_that_is_not_installed_has_no_list_of_what_it_needs(monkeypatch):
    def requires(distribution):
        raise metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(software.metadata, "requires", requires)
    (finding,) = software.check_requirements()
    assert finding.level is Level.NOTE


def test_another_package_of_the_same_name_is_a_note(monkeypatch, tmp_path):
    (finding,) = software.check_names()
    assert finding.level is Level.OK
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    (tmp_path / "worker").mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    (finding,) = software.check_names()
    assert finding.level is Level.NOTE
    assert finding.facts["others"] == [str(tmp_path / "kernels")]


def test_every_suggested_extra_exists():
    """The doctor suggests `pip install` commands, which must work."""
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    for extra in software._EXTRAS:
        requirements = project["optional-dependencies"][extra.extra]
        assert any(line.startswith(extra.distribution) for line in requirements)


def test_a_working_store_is_ok(tmp_path):
    (finding,) = connectors.check_store(f"file://{tmp_path}/kv")
    assert finding.level is Level.OK
    assert "wrote, read and removed an object" in finding.text


def test_a_store_that_is_down_is_a_problem_shown_without_its_password():
    (finding,) = connectors.check_store("redis://user:secret@127.0.0.1:1/0?timeout_s=0.2")
    assert finding.level is Level.PROBLEM
    assert finding.text.startswith("redis://127.0.0.1:1/0: does not answer: ")
    assert "secret" not in finding.text


def test_an_unknown_connector_is_a_problem():
    (finding,) = connectors.check_connector("nothing://")
    assert finding.level is Level.PROBLEM
    assert "unknown KV connector scheme" in finding.text


def test_a_working_redis_is_ok(redis_server):
    (finding,) = connectors.check_store(redis_server.url)
    assert finding.level is Level.OK


@pytest.mark.parametrize("url", ["grpc://", "faulty+grpc://", "faulty+nixl://"])
def test_a_peer_connector_hands_blocks_over_to_this_process(url):
    (finding,) = connectors.check_connector(url)
    assert finding.level is Level.OK, finding.text
    assert "saved 2 blocks and loaded them again within this process" in finding.text
    assert finding.topic == "kv connector"


@pytest.mark.parametrize(
    ("reason", "level", "text"),
    [
        ("", Level.OK, "nixl://: reads the memory of other processes"),
        ("a wall", Level.NOTE, "come by gRPC, which is slower: a wall"),
    ],
)
def test_nixl_reports_whether_it_can_read_other_processes(monkeypatch, reason, level, text):
    monkeypatch.setattr(connectors, "why_unreadable", lambda: reason)
    handed_over, reads = connectors.check_connector("nixl://")
    assert handed_over.level is Level.OK, handed_over.text
    assert reads.level is level
    assert text in reads.text


def test_another_process_is_readable_if_the_kernel_allows_it(monkeypatch):
    needs_process_vm_readv()
    assert nixl_reads.why_unreadable() == ""
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert "UCX_TLS=tcp" in nixl_reads.why_unreadable()


def test_each_member_of_a_multi_connector_is_checked_and_then_the_whole(tmp_path):
    folder = tmp_path / "kv"
    findings = list(connectors.check_connector(f"multi://grpc://?lease_s=20,file://{folder}"))
    assert [finding.level for finding in findings] == [Level.OK] * 3, findings
    peer, store, both = (finding.text for finding in findings)
    assert peer.startswith("grpc://: opened it")
    assert "wrote, read and removed an object" in store
    assert both.startswith(f"multi://grpc://,file://{folder}: opened it")
    with closing(open_store(f"file://{folder}")) as left:
        assert left.stats().num_bytes == 0, "the check left objects behind"


def test_a_member_that_is_down_is_named_without_its_password():
    url = "multi://grpc://,redis://user:secret@127.0.0.1:1/0?timeout_s=0.2"
    peer, store, _ = connectors.check_connector(url)
    assert peer.level is Level.OK
    assert store.level is Level.PROBLEM
    assert store.text.startswith("redis://127.0.0.1:1/0: does not answer: ")
    assert "secret" not in "".join(finding.text for finding in connectors.check_connector(url))


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("faulty+grpc://?faults=fail_load:1", "cannot be loaded ("),
        ("faulty+grpc://?faults=corrupt:1", "cannot be loaded (corrupt)"),
        ("grpc://?lease_s=never", "lease_s"),
    ],
)
def test_a_connector_that_cannot_load_its_blocks_is_a_problem(url, problem):
    (finding,) = connectors.check_connector(url)
    assert finding.level is Level.PROBLEM
    assert problem in finding.text


def test_a_peer_that_others_can_reach_is_opened_with_the_clusters_token(monkeypatch):
    url = "grpc://0.0.0.0?advertise=127.0.0.1"
    (finding,) = connectors.check_connector(url)
    assert "BATON_CLUSTER_TOKEN" in finding.text
    monkeypatch.setenv("BATON_CLUSTER_TOKEN", "t" * 32)
    (finding,) = connectors.check_connector(url)
    assert finding.level is Level.OK, finding


def test_a_connector_that_does_not_finish_in_time_is_a_problem(monkeypatch):
    monkeypatch.setattr(connectors, "_LIMIT_S", 0.05)
    monkeypatch.setattr(connectors, "_CLEAN_UP_S", 0.05)
    monkeypatch.setattr("kvstore.peer.worker.PeerConnectorWorker.poll", lambda _: TransferResults())
    (finding,) = connectors.check_connector("grpc://")
    assert finding.level is Level.PROBLEM
    assert "not done within" in finding.text


def test_a_connector_that_refuses_the_pool_is_closed(monkeypatch):
    closed = []

    def refuse(worker, *pool):
        raise ConfigurationError("no such pool")

    def close(worker, really_close=PeerConnectorWorker.close):
        really_close(worker)
        closed.append(worker)

    monkeypatch.setattr(PeerConnectorWorker, "register_pool", refuse)
    monkeypatch.setattr(PeerConnectorWorker, "close", close)
    (finding,) = connectors.check_connector("grpc://")
    assert finding.level is Level.PROBLEM
    assert "no such pool" in finding.text
    assert len(closed) == 1


def test_an_unexpected_error_during_a_load_leaves_no_objects(tmp_path, monkeypatch):
    poll = StoreConnectorWorker.poll

    def poll_or_fail(worker):
        results = poll(worker)
        if results.loads:
            raise RuntimeError("lost")
        return results

    monkeypatch.setattr(StoreConnectorWorker, "poll", poll_or_fail)
    url = f"file://{tmp_path}/kv"
    with pytest.raises(RuntimeError, match="lost"):
        list(connectors.check_connector(f"faulty+{url}"))
    with closing(open_store(url)) as left:
        assert left.stats().num_bytes == 0


def test_the_command_accepts_the_url_of_a_peer_connector(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_CHECKS", ())
    assert main(["doctor", "--kv-connector", "grpc://"]) == 0
    assert "kv connector" in capsys.readouterr().out


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of it fails
from baton.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run_without_torch(*arguments):
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_doctor_runs_without_torch_and_reports_its_absence(tmp_path):
    result = run_without_torch("doctor", "--json", "--kv-connector", f"file://{tmp_path}/kv")
    assert result.returncode == 1, result.stderr
    findings = {entry["topic"]: entry for entry in json.loads(result.stdout)["findings"]}
    assert findings["torch"]["level"] == "problem"
    assert "pip install torch" in findings["torch"]["text"]
    assert findings["self-test"]["text"] == "not checked: it needs torch"
    assert findings["kv store"]["level"] == "ok"


def test_tune_parses_its_flags_without_torch():
    result = run_without_torch("tune", "--goodput", "ttft:100", "--num-workers", "0")
    assert result.returncode == 2
    assert "--num-workers" in result.stderr
    assert "torch" not in result.stderr


GPU = namedtuple("GPU", "name total_memory")


@pytest.fixture
def two_gpus(monkeypatch):
    """Two GPUs, whose self-test is a finding of its own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: GPU("H200", 141 * GIB))
    self_test = Finding("gpu kernels", Level.OK, "launched")
    monkeypatch.setattr(gpus, "find_self_test", lambda topic, module: iter([self_test]))


def test_gpus_are_named_with_their_compiler_and_a_launched_kernel(two_gpus, monkeypatch):
    monkeypatch.setattr("kernels.first_launch.missing_for_launchers", lambda: None)
    monkeypatch.setattr("kernels.first_launch.find_c_compiler", lambda: "/usr/bin/gcc")
    lines = [(finding.topic, finding.level, finding.text) for finding in gpus.check_gpus()]
    assert lines == [
        ("gpu 0", Level.OK, "H200, 141 GiB"),
        ("gpu 1", Level.OK, "H200, 141 GiB"),
        ("gpu compiler", Level.OK, "/usr/bin/gcc compiles the launchers of GPU kernels"),
        ("gpu kernels", Level.OK, "launched"),
    ]


def test_a_gpu_without_a_compiler_is_a_problem(two_gpus, monkeypatch):
    missing = "there is no C compiler: apt-get install gcc libc6-dev"
    monkeypatch.setattr("kernels.first_launch.missing_for_launchers", lambda: missing)
    (finding,) = (finding for finding in gpus.check_gpus() if finding.level is Level.PROBLEM)
    assert finding.text == f"kernels of GPUs cannot be compiled: {missing}"


def test_machines_without_gpus_have_no_findings_of_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert list(gpus.check_gpus()) == []


def test_the_self_test_launches_a_kernel_on_every_gpu(monkeypatch, capsys):
    launched = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("engine.runtime.device.current", lambda device: nullcontext())
    monkeypatch.setattr("kernels.first_launch.check_launch", launched.append)
    assert gpus.main() == 0
    assert launched == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert capsys.readouterr().out == "a kernel was compiled and launched on each of 2 GPUs\n"


def test_the_self_test_tells_why_a_kernel_cannot_be_launched(monkeypatch, capsys):
    def fail(device):
        raise ConfigurationError("no kernel can be\nlaunched")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("engine.runtime.device.current", lambda device: nullcontext())
    monkeypatch.setattr("kernels.first_launch.check_launch", fail)
    assert gpus.main() == 1
    assert capsys.readouterr().err == "no kernel can be launched\n"


def test_requirements_that_cannot_be_compared_name_the_package_for_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    (finding,) = software.check_requirements()
    assert finding.level is Level.PROBLEM
    assert "pip install packaging" in finding.text
