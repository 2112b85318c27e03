"""The scripts for a GPU machine in an environment with the packages of a bare image alone."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.gpu_command import FULL
from benchmarks.machine import RESULTS_VARIABLE
from tests.support.gpu_image import ABSENT, environment_without_git, make_gpu_image

pytestmark = pytest.mark.slow  # importing torch takes seconds in each process

_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 110


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image")
    return folder, make_gpu_image(folder)


def run(image, *arguments, **variables):
    folder, python = image
    return subprocess.run(
        [python, *arguments],
        cwd=_ROOT,
        env=environment_without_git(folder, BATON_TEST_DEVICE="cpu", **variables),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )


def test_the_image_lacks_what_servers_need(image):
    result = run(image, "-c", "from importlib.metadata import distributions; print(*["
                 "d.metadata['Name'].lower() for d in distributions()])")  # fmt: skip
    assert not set(ABSENT) & set(result.stdout.split())
    assert "pytest" in result.stdout.split()


def test_all_files_of_tests_are_collected(image):
    collect = ["-m", "pytest", "-c", "tests/gpu.ini", "--rootdir", ".", "--collect-only", "-qq"]
    result = run(image, *collect, "tests/triton", "tests/gpu")
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    files = {line.partition(":")[0] for line in result.stdout.splitlines() if ":" in line}
    expected = {
        str(path.relative_to(_ROOT))
        for folder in ("triton", "gpu")
        for path in (_ROOT / "tests" / folder).glob("test_*.py")
    }
    assert files == expected


def test_the_suite_writes_its_results_to_the_named_folder(image, tmp_path):
    script = (
        "from pathlib import Path\n"
        "from benchmarks.machine import results_folder\n"
        "from scripts import test_gpu\n"
        "path = results_folder() / test_gpu.REPORT_NAME\n"
        "folder = Path('tests/triton').resolve()\n"
        "test_gpu._files = lambda folder, marks: sorted(folder.glob('test_row_state.py'))\n"
        "test_gpu.run_suite(folder, Path('tests/gpu').resolve(), 'cpu', 100, path)\n"
    )
    result = run(image, "-c", script, **{RESULTS_VARIABLE: str(tmp_path / "results")})
    assert result.returncode == 0, result.stderr[-2000:]
    report = json.loads((tmp_path / "results" / "gpu_tests.json").read_text())
    assert report["finished"]
    assert report["machine"]["commit"] == "unknown"
    assert report["counts"]["passed"] > 0
    assert not report["problems"]
    assert not report["failures"]


@pytest.mark.parametrize("name", sorted({part.arguments[0] for part in FULL if not part.needs}))
def test_benches_without_servers_can_be_started(image, name):
    result = run(image, "-m", "benchmarks", name, "--help")
    assert result.returncode == 0, result.stderr[-1000:]


def test_a_bench_skips_the_part_that_needs_more_packages(image, tmp_path):
    arguments = ["-m", "benchmarks", "gpu", "--smoke", "--part", "steps", "--part", "split"]
    path = tmp_path / "figures.json"
    result = run(image, *arguments, "--json", str(path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "split: not installed: cryptography, grpc_health" in result.stdout
    content = json.loads(path.read_text())
    assert content["finished"]
    assert content["machine"]["commit"] == "unknown"
    steps = json.loads((tmp_path / content["parts"][0]["file"]).read_text())
    assert steps["profiles"]
