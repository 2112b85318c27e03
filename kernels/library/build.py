"""Compiles the kernels, and the library of block keys that processes without kernels load:
`BUILD_COMMAND`, in a source tree also `python -m kernels.library.build`. Installing Baton does the
same.

Every variant is one library of all sources, so that code of one instruction set
cannot reach another's through an inlined template. The files of all variants compile in parallel,
and only those whose text, headers, flags or compiler changed: their objects are kept. The library
of a variant that cannot be built is removed: an old library must not run with newer Python code.
"""

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

# Relative, since the build hook imports this package by another name; see hatch_build.py.
from .variants import (
    BUILD_COMMAND,
    LIBRARY_FOLDER,
    SOURCE_FOLDER,
    BuildRecord,
    Variant,
    fingerprint_sources,
    library_path,
    library_sets,
    read_record,
    write_record,
)

__all__ = ["Compiler", "Outcome", "Status", "build", "find_compiler", "main"]

_COMPILER_NAMES = ("c++", "g++", "clang++")
_COMMON_FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-pthread"),
    # No kernel reads errno or traps. Not -ffast-math: NaN must stay NaN.
    *("-fno-math-errno", "-fno-trapping-math"),
)
_PROBE_PROGRAM = "#include <cstdint>\n"
_OBJECT_FOLDER = "objects"
_INCLUDED_NAME = re.compile(r'^#include "(.+)"$', re.MULTILINE)
_PROBE_TIMEOUT_S = 60
_COMPILE_TIMEOUT_S = 900
_EXIT_FAILED = 1
_EXIT_NO_COMPILER = 2


class Status(Enum):
    """The outcome of a variant's build."""

    BUILT = "built"
    FRESH = "up to date"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A variant after a build.

    Attributes:
        variant: its name.
        status: FAILED if the sources or the compiler are at fault, SKIPPED if the compiler is
            missing or does not know the variant's flags.
        problem: why there is no library, in one line; empty if there is one.
        output: all output of the compiler.
    """

    variant: str
    status: Status
    problem: str = ""
    output: str = ""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++20 compiler: its command, and the first line of its `--version`."""

    command: tuple[str, ...]
    version: str


@dataclass(frozen=True, slots=True)
class _CompileJob:
    """One variant to compile.

    Attributes:
        variant: the instruction set.
        compiler: compiles it.
        source_folder: see `build`.
        library_folder: see `build`.
        sources: fingerprint of the sources.
        threads: compile the files of all variants.
    """

    variant: Variant
    compiler: Compiler
    source_folder: Path
    library_folder: Path
    sources: str
    threads: ThreadPoolExecutor

    @property
    def flags(self) -> tuple[str, ...]:
        return (*_COMMON_FLAGS, *self.variant.compiler_flags)

    @property
    def object_folder(self) -> Path:
        """Holds an object per source file."""
        return self.library_folder / _OBJECT_FOLDER / self.variant.name

    @property
    def record(self) -> BuildRecord:
        """The record of a library built by this job."""
        command = shlex.join([*self.compiler.command, *self.flags])
        return BuildRecord(self.sources, f"{command}  # {self.compiler.version}")


def find_compiler(environment: Mapping[str, str] = os.environ) -> Compiler | None:
    """Finds the compiler that `CXX` names, else the first usual one that accepts C++20.

    Returns:
        None if there is none, also if `CXX` names a compiler that cannot be run.
    """
    named = shlex.split(environment.get("CXX", ""))
    candidates = [named] if named else [[name] for name in _COMPILER_NAMES]
    for command in candidates:
        path = shutil.which(command[0], path=environment.get("PATH"))
        if path is not None:
            compiler = Compiler((path, *command[1:]), "")
            if _accepts(compiler, _COMMON_FLAGS):
                return Compiler(compiler.command, _version(compiler))
    return None


def build(
    source_folder: Path = SOURCE_FOLDER,
    library_folder: Path = LIBRARY_FOLDER,
    *,
    compiler: Compiler | None,
    variants: Sequence[Variant],
    report: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Brings a folder of libraries up to date.

    Args:
        source_folder: holds the `.cpp` and `.h` files.
        library_folder: receives a library and a `BuildRecord` per variant, and their objects.
        compiler: None skips all variants.
        variants: the variants to build.
        report: called with each outcome as soon as it is known, from any thread.

    Returns:
        An outcome per variant, in the order of `variants`.

    Raises:
        OSError: the folder cannot be written.
    """
    library_folder.mkdir(parents=True, exist_ok=True)
    sources = fingerprint_sources(source_folder)

    def bring_up_to_date(variant: Variant) -> Outcome:
        if compiler is None:
            outcome = _skip(variant, sources, library_folder, _no_compiler_text())
        else:
            job = _CompileJob(variant, compiler, source_folder, library_folder, sources, threads)
            outcome = _bring_up_to_date(job)
        report(outcome)
        return outcome

    with (
        ThreadPoolExecutor(max_workers=os.cpu_count()) as threads,
        ThreadPoolExecutor(max_workers=max(1, len(variants))) as waiting,
    ):
        return list(waiting.map(bring_up_to_date, variants))


def _bring_up_to_date(job: _CompileJob) -> Outcome:
    library = library_path(job.variant.name, job.library_folder)
    if library.exists() and read_record(job.variant.name, job.library_folder) == job.record:
        return Outcome(job.variant.name, Status.FRESH)
    if not _accepts(job.compiler, job.flags):
        flags = shlex.join(job.variant.compiler_flags)
        problem = f"{job.compiler.version} does not take {flags}"
        return _skip(job.variant, job.sources, job.library_folder, problem)
    return _compile(job, library)


def _compile(job: _CompileJob, library: Path) -> Outcome:
    job.object_folder.mkdir(parents=True, exist_ok=True)
    sources = sorted(job.source_folder.glob("*.cpp"))
    objects = [_object_of(job, source) for source in sources]
    for former in {*job.object_folder.glob("*.o")} - {*objects}:
        former.unlink(missing_ok=True)
    results = [*job.threads.map(partial(_compile_file, job), sources, objects)]
    if all(result.returncode == 0 for result in results):
        results.append(_make(job, library, [*job.flags, "-shared", *map(str, objects)]))
    output = "".join(result.stderr for result in results)
    if all(result.returncode == 0 for result in results):
        # After the library: a build that is interrupted before this line starts over.
        write_record(job.variant.name, job.record, job.library_folder)
        return Outcome(job.variant.name, Status.BUILT, output=output)
    problem = f"{job.compiler.version}: {_first_error(output)}"
    _remove(job.variant.name, job.sources, job.library_folder, problem)
    return Outcome(job.variant.name, Status.FAILED, problem, output)


def _object_of(job: _CompileJob, source: Path) -> Path:
    """Returns the path of a source file's object, named by everything that decides its content."""
    digest = hashlib.sha256(job.record.command.encode())
    texts, unread = dict[Path, str](), [source]
    while unread:
        path = unread.pop()
        if path not in texts and path.exists():
            texts[path] = path.read_text()
            unread += [job.source_folder / name for name in _INCLUDED_NAME.findall(texts[path])]
    for path in sorted(texts):
        digest.update(f"{path.name} {len(texts[path])}\n{texts[path]}".encode())
    return job.object_folder / f"{source.stem}-{digest.hexdigest()[:16]}.o"


def _compile_file(job: _CompileJob, source: Path, wanted: Path) -> subprocess.CompletedProcess[str]:
    """Makes the object of a source file, unless there is one."""
    if wanted.exists():
        return subprocess.CompletedProcess((), 0, "", "")
    result = _make(job, wanted, [*job.flags, "-c", str(source)])
    if result.returncode == 0 and wanted != _object_of(job, source):
        wanted.unlink(missing_ok=True)
        message = f"error: {source} has changed while it was compiled\n"
        return subprocess.CompletedProcess(result.args, 1, "", message)
    return result


def _make(
    job: _CompileJob, wanted: Path, arguments: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    """Runs the compiler for a file, which appears at once and whole, or not at all."""
    draft = wanted.with_name(f".{wanted.name}.{os.getpid()}")
    try:
        command = [*job.compiler.command, *arguments, "-o", str(draft)]
        result = _run(command, timeout_s=_COMPILE_TIMEOUT_S)
        if result.returncode == 0 and not draft.exists():
            return subprocess.CompletedProcess(command, 1, "", result.stderr)
        if result.returncode == 0:
            draft.replace(wanted)
        return result
    finally:
        draft.unlink(missing_ok=True)


def _skip(variant: Variant, sources: str, library_folder: Path, problem: str) -> Outcome:
    _remove(variant.name, sources, library_folder, problem)
    return Outcome(variant.name, Status.SKIPPED, problem)


def _remove(variant: str, sources: str, library_folder: Path, problem: str) -> None:
    """Removes an old library, and records the reason for `baton doctor`."""
    library_path(variant, library_folder).unlink(missing_ok=True)
    write_record(variant, BuildRecord(sources, "", problem), library_folder)


def _accepts(compiler: Compiler, flags: Sequence[str]) -> bool:
    """Returns whether the compiler accepts the flags and has the standard library."""
    command = [*compiler.command, *flags, "-fsyntax-only", "-x", "c++", "-"]
    return _run(command, timeout_s=_PROBE_TIMEOUT_S, stdin=_PROBE_PROGRAM).returncode == 0


def _version(compiler: Compiler) -> str:
    lines = _run([*compiler.command, "--version"], timeout_s=_PROBE_TIMEOUT_S).stdout.splitlines()
    return lines[0].strip() if lines else compiler.command[0]


def _run(
    command: Sequence[str], *, timeout_s: float, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs a compiler; one that cannot be run, or hangs, counts as failed."""
    try:
        return subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line]
    return (errors or lines[-1:] or ["the compiler printed nothing"])[0]


def _no_compiler_text() -> str:
    named = os.environ.get("CXX")
    if named:
        return f"CXX={named} is no C++20 compiler"
    return f"no C++20 compiler was found (looked for {', '.join(_COMPILER_NAMES)})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds the variants of this machine's architecture.

    Args:
        arguments: of the command line; None for the process's. There are no flags but `--help`.

    Returns:
        The exit status: 1 if something failed to compile, 2 if there is no compiler.
    """
    argparse.ArgumentParser(
        prog=BUILD_COMMAND,
        description="Compile the native kernels and block keys for this machine's architecture, as "
        "far as their sources, flags or compiler changed. CXX names another compiler.",
    ).parse_args(arguments)
    compiler = find_compiler()
    outcomes = [
        outcome
        for libraries in library_sets()
        for outcome in build(
            libraries.source_folder,
            libraries.library_folder,
            compiler=compiler,
            variants=libraries.variants,
            report=_print_outcome,
        )
    ]
    if compiler is None:
        sys.stderr.write("install one, such as g++ or clang++, and run this again\n")
        return _EXIT_NO_COMPILER
    failed = any(outcome.status is Status.FAILED for outcome in outcomes)
    return _EXIT_FAILED if failed else 0


def _print_outcome(outcome: Outcome) -> None:
    detail = f": {outcome.problem}" if outcome.problem else ""
    sys.stderr.write(f"{outcome.variant}: {outcome.status.value}{detail}\n{outcome.output}")


if __name__ == "__main__":
    sys.exit(main())
