"""`make gpu-first` as on a bare GPU image: few packages, no git, sources without history."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.gpu_first import CALLS
from tests.support.gpu_image import ABSENT, environment_without_git, make_gpu_image

_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 500

# Importing torch takes seconds in each process, and the plan has eight of them.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(_TIMEOUT_S + 60)]


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image")
    return folder, make_gpu_image(folder)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of the files that travel to a GPU machine: those that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=_ROOT, capture_output=True, check=True).stdout
    target = tmp_path_factory.mktemp("sources")
    for name in filter(None, listed.decode().split("\0")):
        if (_ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(_ROOT / name, target / name)
    return target


def run(image, sources, *arguments, **variables):
    folder, python = image
    return subprocess.run(
        [python, *arguments],
        cwd=sources,
        env=environment_without_git(folder, HOME=str(folder), **variables),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )


def test_the_image_lacks_what_servers_need(image, sources):
    result = run(image, sources, "-c", "from importlib.metadata import distributions; print(*["
                 "d.metadata['Name'].lower() for d in distributions()])")  # fmt: skip
    assert not set(ABSENT) & set(result.stdout.split())
    assert "pytest" in result.stdout.split()


@pytest.fixture(scope="module")
def smoke(image, sources, tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    result = run(image, sources, "-m", "scripts.gpu_first", "--smoke", "--out", str(folder))
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    return folder


def read(folder, part):
    return json.loads((folder / f"{part}.json").read_text())


def test_every_part_writes_its_file(smoke):
    report = read(smoke, "smoke")
    assert report["finished"]
    assert report["machine"]["commit"] == "unknown"
    assert [part["part"] for part in report["parts"]] == [part.name for part in CALLS["smoke"]]
    assert not [part for part in report["parts"] if part["problem"] or part["skipped"]]
    assert {part["file"] for part in report["parts"]} == {
        path.name for path in smoke.glob("*.json") if path.stem != "smoke"
    }


def test_all_files_of_tests_are_collected(smoke):
    collected = read(smoke, "collect")
    expected = {
        str(path.relative_to(_ROOT))
        for folder in ("triton", "gpu")
        for path in (_ROOT / "tests" / folder).glob("test_*.py")
    }
    assert set(collected["files"]) == expected
    assert all(collected["files"].values())


def test_the_tests_of_kernels_and_of_the_runner_pass(smoke):
    for part in ("kernel_tests", "runner_tests"):
        report = read(smoke, part)
        assert report["all_passed"]
        assert report["machine"]["commit"] == "unknown"


def test_both_ways_to_serve_agree_with_transformers(smoke):
    sides = read(smoke, "agreement")["sides"]
    assert [side["name"] for side in sides] == ["transformers", "one worker", "two tiers"]
    assert all(side["agrees"] for side in sides)
    assert {len(tokens) for side in sides for tokens in side["tokens"]} == {4}


def test_steps_and_kernels_are_measured(smoke):
    steps = read(smoke, "steps")
    assert {step["kind"] for step in steps["steps"]} == {
        *("decode", "mixed", "device busy", "engine step", "prompt"),
    }
    assert all(step["median_us"] > 0 for step in steps["steps"])
    assert all(kernels["kernels"] for kernels in steps["kernels"])
    assert all(one["kernel_s"] > 0 for one in read(smoke, "attention_sweep")["swept"])
    assert all(outcome["kernel_s"] > 0 for outcome in read(smoke, "kernels")["outcomes"])
