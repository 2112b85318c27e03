"""A release: the same bytes each time, and what it does where it is installed.

The libraries of this source tree are used; nothing that was compiled before is compiled again.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest

import baton
from baton.common.own_packages import PACKAGES
from kernels.library.build import find_compiler
from kernels.library.variants import BUILD_COMMAND, variants_for
from scripts.build_release import build_release, share_objects
from tests.support.serve_process import read_until, running

ROOT = Path(__file__).parents[2]
TIME_S = 1_750_000_000
# Where no compiler is found.
BARE_PATH = "/nowhere"
# Names of Baton's packages that others have, too, where it is installed.
OTHERS = sorted({*PACKAGES} - {"decode_service"})

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(len(variants_for()) < 2, reason="libraries of x86-64"),
]


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """The files of a release, by their suffix."""
    return built_in(tmp_path_factory.mktemp("release"))


def built_in(folder):
    return {path.suffix: path for path in build_release(ROOT, folder, time_s=TIME_S)}


@pytest.fixture(scope="module")
def installed(release, tmp_path_factory):
    """An environment with the wheel, beside other packages with names of Baton's."""
    folder = tmp_path_factory.mktemp("installed")
    site = make_environment(folder)
    for name in OTHERS:
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("OWNER = 'another'\n")
    install(folder, release[".whl"])
    return folder


def make_environment(folder):
    """Makes an environment, and returns its folder of packages. What Baton needs comes from the
    environment of the tests, by a line that does not include Baton itself.
    """
    venv.create(folder, symlinks=True)
    variables = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", variables))
    (site / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return site


def install(folder, distribution, *options, **variables):
    command = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install"]
    subprocess.run(
        [*command, "--quiet", "--no-deps", "--no-index", "--no-compile", *options, distribution],
        check=True,
        timeout=500,
        env={**os.environ, **variables},
    )


def run(installed, *command, check=True, **variables):
    """Runs a command of the environment, in another folder, without a compiler; returns what it
    prints, or its errors if it fails.
    """
    result = subprocess.run(
        [installed / "bin" / command[0], *command[1:]],
        cwd="/",
        env={"PATH": BARE_PATH, "HOME": str(installed), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0 or not check, result.stdout + result.stderr
    return result.stderr if result.returncode else result.stdout


def findings_of_doctor(installed, **options):
    report = json.loads(run(installed, "baton", "doctor", "--json", **options))
    return {finding["topic"]: finding for finding in report["findings"]}


def test_two_builds_have_the_same_bytes(release, tmp_path):
    again = built_in(tmp_path)
    assert len(release) == 4
    assert again.keys() == release.keys()
    for kind, path in release.items():
        assert path.name == again[kind].name
        assert path.read_bytes() == again[kind].read_bytes(), path.name


def test_the_sdist_has_the_sources_and_nothing_that_was_built(release):
    with tarfile.open(release[".gz"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "baton_llm.pth", "kernels/native/src/matmul.cpp"} <= names
    assert not [name for name in names if "/lib/" in name or name.endswith((".so", ".o"))]


def test_the_wheel_adds_baton_alone_to_the_installed_packages(release):
    with zipfile.ZipFile(release[".whl"]) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"baton", "baton_llm.pth", f"baton_llm-{baton.__version__}.dist-info"}
    assert not [name for name in names if name.endswith((".o", ".pyc"))]


def test_the_list_of_components_is_closed(release):
    bill = json.loads(release[".json"].read_text())
    components = {each["bom-ref"] for each in bill["components"]}
    assert len(components) == len(bill["components"])
    own = bill["metadata"]["component"]
    assert own["licenses"] == [{"expression": "Apache-2.0 AND BSD-2-Clause"}]
    names = {each["name"] for each in bill["components"]}
    assert {"torch", "xxhash.h", "grpcio"} <= names
    assert "pytest" not in names
    assert {each["ref"] for each in bill["dependencies"]} <= components | {own["bom-ref"]}
    for each in bill["dependencies"]:
        assert {*each["dependsOn"]} <= components


def test_the_doctor_finds_all_that_is_needed(installed):
    findings = findings_of_doctor(installed)
    assert findings["requirements"]["level"] == "ok"
    assert {*findings["libraries"]["facts"].values()} == {"built"}
    assert "_packages/kernels/native/lib" in findings["cpu kernels"]["facts"]["path"]
    assert findings["self-test"]["level"] == "ok"
    assert "no C++20 compiler" in findings["compiler"]["text"]
    assert findings["package names"]["level"] == "note"
    others = findings["package names"]["facts"]["others"]
    assert [Path(other).name for other in others] == OTHERS


def test_packages_of_the_same_names_stay_themselves(installed):
    alone = f"print(*(__import__(name).OWNER for name in {OTHERS}))"
    assert {*run(installed, "python", "-c", alone).split()} == {"another"}
    ours = f"import baton; print(*(__import__(name).__file__ for name in {PACKAGES}))"
    assert run(installed, "python", "-c", ours).count("/baton/_packages/") == len(PACKAGES)
    assert "Compile the native kernels" in run(installed, *shlex.split(BUILD_COMMAND), "--help")
    late = run(installed, "python", "-c", "import kernels, baton; baton.LLM", check=False)
    assert "one process cannot have two packages of one name" in late
    # Without `baton`, its packages are found too, after those of others.
    assert "_packages" in run(installed, "python", "-c", "import decode_service as d; print(d)")


@pytest.fixture(scope="module")
def compiled(release, tmp_path_factory):
    """An environment with what pip makes of the sdist, of objects that were compiled before."""
    folder = tmp_path_factory.mktemp("compiled")
    make_environment(folder)
    with tarfile.open(release[".gz"]) as archive:
        archive.extractall(folder, filter="data")
    sources = folder / release[".gz"].name.removesuffix(".tar.gz")
    share_objects(ROOT, sources)
    install(folder, sources, "--no-build-isolation")
    return folder


def test_the_sdist_is_installed_where_there_is_a_compiler(compiled):
    findings = findings_of_doctor(compiled)
    assert {*findings["libraries"]["facts"].values()} == {"built"}
    assert findings["self-test"]["level"] == "ok"
    code = (
        "import baton; llm = baton.LLM('demo', num_gpu_blocks_override=64);"
        "print(llm.generate('Return a list of', {'temperature': 0})[0].outputs[0].text)"
    )
    assert run(compiled, "python", "-c", code).strip()


def test_the_demo_model_is_served_by_the_wheel_alone(installed):
    """By all kinds of processes: the router's, two tiers', their ranks', and that of grammars."""
    command = [installed / "bin" / "baton", "serve", "--port", 0, "--grpc-port", "none"]
    command += ["--tensor-parallel-size", 2, "--num-gpu-blocks-override", 64]
    variables = {**os.environ, "PATH": BARE_PATH, "OMP_NUM_THREADS": "1"}
    with running(command, cwd="/", env=variables) as process:
        lines = read_until(process, "Ctrl-C")
        url, page = (
            next(line.split()[1] for line in lines if line.startswith(f"{name} "))
            for name in ("http", "page")
        )
        body = {"model": "demo", "prompt": "def", "max_tokens": 8, "temperature": 0}
        body |= {"structured_outputs": {"regex": "[0-9]{3}"}}
        request = urllib.request.Request(
            f"{url}/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert re.fullmatch("[0-9]{3}", json.load(answer)["choices"][0]["text"])
        with urllib.request.urlopen(page, timeout=60) as answer:
            assert b"<script" in answer.read()
