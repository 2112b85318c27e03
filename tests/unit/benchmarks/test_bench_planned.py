"""Plans of several benchmarks: shares of the time, and parts that fail, hang or lack modules."""

import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from baton.cli import main
from baton.common.errors import ConfigurationError
from benchmarks import planned, record_command
from benchmarks.cli import _COMMANDS
from benchmarks.machine import instruction_set
from benchmarks.planned import PlannedPart, choose_parts, run_parts, summarize_reports, time_for
from benchmarks.record_command import PARTS
from kernels.library.variants import VARIANTS
from scripts.gpu_first import CALLS
from tests.support.bench_flags import parse_bench

FULL = CALLS["first"]


def test_parts_share_the_time_left_by_weight():
    total = sum(part.weight for part in FULL)
    spent = 0.0
    for index, part in enumerate(FULL):
        mine = time_for(FULL, index, 450.0 - spent)
        assert mine == pytest.approx(450.0 * part.weight / total)
        spent += mine
    assert spent == pytest.approx(450.0)
    assert time_for(FULL, len(FULL) - 1, 12.5) == 12.5


def test_parts_are_chosen_in_the_order_of_the_plan():
    parts = [PlannedPart(name, (), 1) for name in "abc"]
    assert choose_parts(parts, None) == parts
    assert [part.name for part in choose_parts(parts, ["c", "a"])] == ["a", "c"]
    with pytest.raises(ConfigurationError, match="--part is 'd'; it must be one of a, b, c"):
        choose_parts(parts, ["d"])


@pytest.fixture
def scripted(monkeypatch):
    """Makes the parts run scripts in place of benchmarks."""
    real = planned.subprocess.Popen

    def popen(command, **options):
        assert command[1:3] == ["-m", "benchmarks"]
        script, *arguments = command[3:]
        process = real([command[0], "-c", script, *arguments], **options)
        if script == HANGS:
            wait, path = process.wait, Path(arguments[1])

            def wait_until_written(seconds=None):
                if seconds is None:
                    return wait()
                while not path.exists() or not path.read_text():
                    with suppress(subprocess.TimeoutExpired):
                        return wait(0.05)
                raise subprocess.TimeoutExpired(command, seconds)

            process.wait = wait_until_written
        return process

    monkeypatch.setattr(planned.subprocess, "Popen", popen)


WRITES = "import pathlib, sys; pathlib.Path(sys.argv[2]).write_text('{}'); print('figures')"
HANGS = f"{WRITES}; import time; time.sleep(600)"


def test_a_part_that_fails_or_hangs_does_not_stop_the_others(scripted, tmp_path, capsys):
    parts = [
        PlannedPart("fails", ("raise SystemExit('no memory')",), 100),
        PlannedPart("lacks", (WRITES,), 100, needs=("no_such_module",)),
        PlannedPart("hangs", (HANGS,), 100),
        PlannedPart("works", (WRITES,), 100),
    ]
    fails, lacks, hangs, works = run_parts(parts, tmp_path, "_avx2", 600.0)
    assert fails.problem == "ended with status 1: no memory"
    assert lacks.skipped == "not installed: no_such_module"
    assert hangs.problem.startswith("ended: its ")
    assert hangs.file == "hangs_avx2.json"  # what it had written is kept
    assert (works.problem, works.file) == (None, "works_avx2.json")
    assert "figures" in capsys.readouterr().out
    assert summarize_reports([fails, lacks, works]).splitlines() == [
        "lacks: not installed: no_such_module",
        "fails: ended with status 1: no memory",
    ]
    assert summarize_reports([works]) == "nothing failed"


def test_behind_an_essential_part_that_fails_nothing_runs(scripted, tmp_path):
    parts = [
        PlannedPart("fails", ("raise SystemExit('no kernel')",), 1, is_essential=True),
        PlannedPart("works", (WRITES,), 1),
    ]
    fails, works = run_parts(parts, tmp_path, "", 600.0)
    assert fails.problem == "ended with status 1: no kernel"
    assert works.skipped == "fails failed"
    assert not list(tmp_path.iterdir())


def test_a_part_that_knows_its_time_gets_less_than_after_which_it_is_killed():
    part = PlannedPart("tests", ("folder",), 1, module="scripts.gpu_tests", is_timed=True)
    command = part.command(Path("out.json"), 60.0)
    assert command[1:] == [
        *("-m", "scripts.gpu_tests", "folder", "--deadline", "57", "--json", "out.json")
    ]


def test_a_part_writes_to_a_folder_relative_to_the_caller(scripted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # parts run in the folder of the sources
    Path("figures").mkdir()
    (report,) = run_parts([PlannedPart("one", (WRITES,), 1)], Path("figures"), "_avx2", 600.0)
    assert (report.problem, report.file) == (None, "one_avx2.json")
    assert (tmp_path / "figures" / "one_avx2.json").exists()


def test_every_part_of_the_record_is_a_benchmark_with_flags_that_it_knows():
    for part in PARTS:
        assert parse_bench((*part.arguments, "--json", "x.json")).benchmark in _COMMANDS


def test_the_record_names_its_files_by_the_instruction_set(scripted, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BATON_COMMIT", "abc1234")
    monkeypatch.setattr(record_command, "PARTS", (PlannedPart("one", (WRITES,), 1),))
    monkeypatch.setenv("BATON_RESULTS_FOLDER", str(tmp_path))
    assert main(["bench", "record", "--deadline", "60"]) == 0
    shown = capsys.readouterr().out
    assert instruction_set() in [variant.name for variant in VARIANTS]
    assert [path.name for path in tmp_path.iterdir()] == [f"one_{instruction_set()}.json"]
    assert "all parts together: at most 1 min" in shown
    assert f"instruction set {instruction_set()}" in shown
    assert "commit abc1234" in shown
    assert "nothing failed" in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--deadline", "0"], "--deadline is 0.0; it must be > 0"),
        (["--part", "lunch"], "--part is 'lunch'"),
    ],
)
def test_bad_flags_of_the_record_are_refused(flags, message, capsys):
    assert main(["bench", "record", *flags]) == 2
    assert message in capsys.readouterr().err
