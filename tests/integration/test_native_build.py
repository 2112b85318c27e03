"""The build of the native kernels, with the machine's compiler and without one."""

import ctypes
import json
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kernels.library.build import Status, build, find_compiler, main
from kernels.library.cpu import cpu_features
from kernels.library.platform_tag import read_needs
from kernels.library.variants import (
    library_path,
    library_sets,
    read_record,
    record_path,
    variants_for,
)

ROOT = Path(__file__).parents[2]
PACKAGES = "baton/_packages"
SOURCE = '#include <cstdint>\nextern "C" std::int64_t answer() { return %d; }\n'
# The header defines the answer; `level` shows which instructions the variant may use.
PROGRAM = """\
#include "answer.h"
extern "C" std::int64_t answer() { return ANSWER; }
#if defined(__AVX512BF16__)
extern "C" int level() { return 6; }
#elif defined(__AVX512VNNI__)
extern "C" int level() { return 5; }
#elif defined(__AVX512F__)
extern "C" int level() { return 4; }
#elif defined(__AVXVNNI__)
extern "C" int level() { return 3; }
#elif defined(__AVX2__)
extern "C" int level() { return 2; }
#else
extern "C" int level() { return 1; }
#endif
"""
LEVELS = {
    "avx512_bf16": 6,
    "avx512_vnni": 5,
    "avx512": 4,
    "avx2_vnni": 3,
    "avx2": 2,
    "generic": 1,
    "neon": 1,
}
VARIANTS = variants_for()
NAMES = [variant.name for variant in VARIANTS]
SLOWEST = VARIANTS[-1:]
COMPILER = find_compiler()
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


class Project:
    """A folder of sources and the libraries that were built from them."""

    def __init__(self, folder):
        self.sources, self.libraries = folder / "src", folder / "lib"
        self.sources.mkdir()
        (self.sources / "answer.cpp").write_text(PROGRAM)
        self.set_answer(42)

    def set_answer(self, answer):
        (self.sources / "answer.h").write_text(f"#include <cstdint>\n#define ANSWER {answer}\n")

    def build(self, compiler=COMPILER, variants=VARIANTS):
        outcomes = build(self.sources, self.libraries, compiler=compiler, variants=variants)
        return {outcome.variant: outcome for outcome in outcomes}

    def statuses(self, **options):
        return {name: outcome.status for name, outcome in self.build(**options).items()}


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


def test_each_variant_is_a_library_of_its_own_instruction_set(project):
    assert project.statuses() == dict.fromkeys(NAMES, Status.BUILT)
    for variant in VARIANTS:
        if variant.cpu_features <= cpu_features():
            library = ctypes.CDLL(str(library_path(variant.name, project.libraries)))
            assert (library.answer(), library.level()) == (42, LEVELS[variant.name])
    leftovers = {path.name for path in project.libraries.iterdir() if path.is_file()}
    expected = {library_path(name, project.libraries).name for name in NAMES}
    assert leftovers == expected | {record_path(name).name for name in NAMES}


def test_a_library_has_the_same_bytes_in_any_folder(tmp_path):
    libraries = []
    for name in ("one", "another"):
        (tmp_path / name).mkdir()
        project = Project(tmp_path / name)
        project.build(variants=SLOWEST)
        libraries.append(library_path(SLOWEST[0].name, project.libraries).read_bytes())
    assert libraries[0] == libraries[1]


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
@pytest.mark.skipif(sys.platform != "linux", reason="ELF libraries")
def test_what_a_library_needs_is_what_objdump_says(project):
    (project.sources / "more.cpp").write_text(
        "#include <cmath>\n#include <string>\n#include <thread>\n"
        'extern "C" double more(double x) {\n'
        "  std::thread([&] { x = std::exp(x); }).join();\n"
        "  return std::to_string(x).size();\n}\n"
    )
    project.build(variants=SLOWEST)
    library = library_path(SLOWEST[0].name, project.libraries)
    listed = subprocess.check_output(["objdump", "-p", library], text=True)
    needs = read_needs(library)
    assert needs.architecture == platform.machine()
    assert needs.libraries == {*re.findall(r"^ +NEEDED +(\S+)$", listed, re.MULTILINE)}
    references = listed.partition("Version References:")[2]
    assert needs.symbols == {*re.findall(r"0x\w+ 0x\w+ \d+ (\S+)$", references, re.MULTILINE)}
    assert {symbol.split("_")[0] for symbol in needs.symbols} >= {"GLIBC", "GLIBCXX"}


def test_only_stale_libraries_are_built_again(project):
    project.build(variants=SLOWEST)
    name = SLOWEST[0].name
    assert project.statuses(variants=SLOWEST) == {name: Status.FRESH}
    project.set_answer(43)
    assert project.statuses(variants=SLOWEST) == {name: Status.BUILT}
    assert ctypes.CDLL(str(library_path(name, project.libraries))).answer() == 43
    library_path(name, project.libraries).unlink()
    assert project.statuses(variants=SLOWEST) == {name: Status.BUILT}
    record_path(name, project.libraries).write_text("{")
    assert project.statuses(variants=SLOWEST) == {name: Status.BUILT}


def test_only_files_that_changed_or_include_a_change_are_compiled_again(project, tmp_path):
    (project.sources / "other.cpp").write_text('extern "C" int other() { return 1; }\n')
    log = tmp_path / "compiled"
    counting = compiler_that(tmp_path, f'echo "$@" >> {log}; exec {COMPILER.command[0]} "$@"')

    def compiled():
        log.unlink(missing_ok=True)
        assert project.statuses(compiler=counting, variants=SLOWEST) == {name: Status.BUILT}
        return [one for one in ("answer", "other") if f"-c {project.sources}/{one}.cpp" in text()]

    def text():
        return log.read_text()

    name = SLOWEST[0].name
    assert compiled() == ["answer", "other"]
    project.set_answer(43)
    assert compiled() == ["answer"]
    (project.sources / "other.cpp").write_text('extern "C" int other() { return 2; }\n')
    assert compiled() == ["other"]
    library = ctypes.CDLL(str(library_path(name, project.libraries)))
    assert (library.answer(), library.other()) == (43, 2)
    assert len([*(project.libraries / "objects" / name).iterdir()]) == 2


def test_an_object_of_a_file_that_changes_meanwhile_is_not_kept(project, tmp_path):
    edit = f"case \"$*\" in *answer.cpp*) echo '//' >> {project.sources}/answer.h;; esac"
    editing = compiler_that(tmp_path, f'{edit}; exec {COMPILER.command[0]} "$@"')
    (outcome,) = project.build(compiler=editing, variants=SLOWEST).values()
    assert outcome.status is Status.FAILED
    assert "answer.cpp has changed while it was compiled" in outcome.problem
    assert not [*(project.libraries / "objects" / SLOWEST[0].name).iterdir()]


def test_another_compiler_makes_libraries_stale(project, tmp_path):
    project.build(variants=SLOWEST)
    other = compiler_that(tmp_path, 'echo "other 1.0" ; exit 0')
    assert other.version == "other 1.0"
    assert project.statuses(compiler=other, variants=SLOWEST) == {SLOWEST[0].name: Status.FAILED}


def test_a_failed_build_removes_the_old_library(project):
    project.build(variants=SLOWEST)
    (project.sources / "mistake.cpp").write_text("int main() { return nothing; }\n")
    (outcome,) = project.build(variants=SLOWEST).values()
    assert outcome.status is Status.FAILED
    assert "error" in outcome.problem
    assert "nothing" in outcome.problem
    assert outcome.problem in read_problem(project, outcome.variant)
    assert not library_path(outcome.variant, project.libraries).exists()


def test_without_a_compiler_nothing_is_built_and_old_libraries_are_removed(project):
    project.build(variants=SLOWEST)
    (outcome,) = project.build(compiler=None, variants=SLOWEST).values()
    assert outcome.status is Status.SKIPPED
    assert "no C++20 compiler was found" in read_problem(project, outcome.variant)
    assert not library_path(outcome.variant, project.libraries).exists()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
def test_a_compiler_too_old_for_one_variant_builds_the_others(project, tmp_path):
    real = COMPILER.command[0]
    old = compiler_that(
        tmp_path,
        f'case "$*" in *-mavx512bf16*) echo "unknown option" >&2; exit 1;; esac; exec {real} "$@"',
    )
    outcomes = project.build(compiler=old)
    assert outcomes.pop("avx512_bf16").status is Status.SKIPPED
    assert {outcome.status for outcome in outcomes.values()} == {Status.BUILT}
    assert "does not take -march=x86-64-v4 -mavx512bf16 -mavx512vnni" in read_problem(
        project, "avx512_bf16"
    )


def test_no_other_compiler_is_used_if_cxx_names_an_absent_one():
    assert find_compiler({"PATH": os.environ["PATH"], "CXX": "/nowhere/c++"}) is None
    assert find_compiler({"PATH": "/nowhere"}) is None


def test_cxx_may_have_arguments():
    named = find_compiler({"PATH": os.environ["PATH"], "CXX": f"{COMPILER.command[0]} -DX=1"})
    assert named.command == (*COMPILER.command, "-DX=1")


@pytest.fixture
def checkout(tmp_path):
    """A folder with the sources of the wheel, whose native source compiles quickly."""
    folder = tmp_path / "checkout"
    native = folder / "kernels" / "native"
    shutil.copytree(
        ROOT / "kernels", folder / "kernels", ignore=shutil.ignore_patterns("lib", "__pycache__")
    )
    shutil.copytree(ROOT / "kvstore" / "native" / "src", folder / "kvstore" / "native" / "src")
    shutil.rmtree(native / "src")
    (native / "src").mkdir()
    (native / "src" / "answer.cpp").write_text(SOURCE % 42)
    for name in ("pyproject.toml", "hatch_build.py", "baton_llm.pth", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "licenses", folder / "licenses")
    shutil.copytree(ROOT / "protos", folder / "protos")
    shutil.copytree(ROOT / "router" / "http" / "page", folder / "router" / "http" / "page")
    (folder / "baton" / "common").mkdir(parents=True)
    shutil.copy(ROOT / "baton" / "common" / "version.py", folder / "baton" / "common")
    return folder


def build_wheel(checkout, environment=None):
    """Builds a wheel as pip does, but in this environment; returns the wheel and the log."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    result = subprocess.run(
        command,
        cwd=checkout,
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = (checkout / "dist").glob("*.whl")
    return wheel, result.stdout + result.stderr


def native_files(wheel, package="kernels"):
    with zipfile.ZipFile(wheel) as archive:
        names = [Path(name) for name in archive.namelist()]
    folder = f"{PACKAGES}/{package}/native/lib"
    return {name.name for name in names if name.parent.as_posix() == folder}


def test_a_wheel_has_the_libraries_and_is_for_this_platform(checkout):
    wheel, _ = build_wheel(checkout)
    expected = {library_path(name).name for name in NAMES}
    assert native_files(wheel) == expected | {record_path(name).name for name in NAMES}
    (keys,) = library_sets()[-1].variants
    expected = {library_path(keys.name).name, record_path(keys.name).name}
    assert native_files(wheel, "kvstore") == expected
    # For any Python 3, since ctypes loads the libraries.
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".o")]
        assert f"{PACKAGES}/kernels/native/src/answer.cpp" in archive.namelist()
        # Data files of the package are included.
        assert f"{PACKAGES}/kernels/triton/launch_tables/default.json" in archive.namelist()
        assert f"{PACKAGES}/router/http/page/files/index.html" in archive.namelist()
        assert archive.read("baton_llm.pth").decode().split() == [PACKAGES]
        (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = archive.read(f"{info}/METADATA").decode()
        assert "License-Expression: Apache-2.0 AND BSD-2-Clause\n" in metadata
        assert f"{info}/licenses/licenses/xxhash.txt" in archive.namelist()
        # Where protoc finds them, beside the stubs.
        assert "baton/v1/generation.proto" in archive.namelist()


def test_without_a_compiler_the_wheel_is_pure_and_the_log_says_why(checkout, tmp_path):
    wheel, log = build_wheel(checkout, {"PATH": str(tmp_path)})
    assert native_files(wheel) == {record_path(name).name for name in NAMES}
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "no C++20 compiler was found" in log
    assert "Install a C++20 compiler" in log
    with zipfile.ZipFile(wheel) as archive:
        record = json.loads(archive.read(f"{PACKAGES}/kernels/native/lib/{NAMES[0]}.json"))
    assert "no C++20 compiler was found" in record["problem"]


def compiler_that(folder, script):
    """Returns a compiler that runs this shell script."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return find_compiler({"PATH": os.environ["PATH"], "CXX": str(path)})


def read_problem(project, variant):
    return read_record(variant, project.libraries).problem


@pytest.mark.parametrize(("flag", "status"), [("--help", 0), ("--no-such-flag", 2)])
def test_flags_build_nothing(flag, status, monkeypatch):
    monkeypatch.setattr("kernels.library.build.find_compiler", lambda: pytest.fail("it builds"))
    with pytest.raises(SystemExit) as exit_info:
        main([flag])
    assert exit_info.value.code == status
