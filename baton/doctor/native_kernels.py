"""Which CPU kernels run, why, what was built, and whether they compute what they should."""

import subprocess
import sys
from collections.abc import Iterator

from baton.doctor.finding import Finding, Level
from baton.errors import ConfigurationError
from kernels.native import library
from kernels.native.build import find_compiler

__all__ = ["check_compiler", "check_libraries", "check_result", "check_selection"]

_SELF_TEST_TIMEOUT_S = 120


def check_selection() -> Iterator[Finding]:
    """Which kernels serve the CPU, and why."""
    try:
        selection = library.select()
    except ConfigurationError as error:
        yield Finding("cpu kernels", Level.PROBLEM, error.message)
        return
    facts = {
        "variant": selection.variant,
        "path": None if selection.path is None else str(selection.path),
        "reason": selection.reason,
    }
    if selection.path is None:
        text = f"{selection.variant}, which is slower than native ones: {selection.reason}"
        yield Finding("cpu kernels", Level.NOTE, text, facts)
    else:
        text = f"{selection.variant}: {selection.reason} ({selection.path})"
        yield Finding("cpu kernels", Level.OK, text, facts)


def check_result() -> Iterator[Finding]:
    """Whether they compute what torch computes: in a process of its own, which may crash."""
    command = [sys.executable, "-m", "baton.doctor.self_test"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_SELF_TEST_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        text = f"a small product took longer than {_SELF_TEST_TIMEOUT_S} s"
        yield Finding("self-test", Level.PROBLEM, text)
        return
    if result.returncode == 0:
        yield Finding("self-test", Level.OK, result.stdout.strip())
    elif result.returncode < 0:
        text = f"the kernels crashed: signal {-result.returncode}"
        yield Finding("self-test", Level.PROBLEM, text)
    else:
        lines = result.stderr.strip().splitlines()
        yield Finding("self-test", Level.PROBLEM, lines[-1] if lines else "failed without a word")


def check_libraries() -> Iterator[Finding]:
    """What was built for this architecture; what was not, and why."""
    parts, states = [], {}
    for found in library.find_libraries():
        if found.built:
            state = "built, but of other sources" if found.stale else "built"
        else:
            state = f"not built ({found.problem})" if found.problem else "not built"
        parts.append(f"{found.variant.name} {state}")
        states[found.variant.name] = state
    is_whole = set(states.values()) == {"built"}
    text = "; ".join(parts) + ("" if is_whole else f"; `{library.BUILD_COMMAND}` builds them")
    yield Finding("libraries", Level.OK if is_whole else Level.NOTE, text, states)


def check_compiler() -> Iterator[Finding]:
    """The compiler that would build the kernels."""
    compiler = find_compiler()
    if compiler is None:
        text = "none for C++20; needed only to build the CPU kernels"
        yield Finding("compiler", Level.NOTE, text)
    else:
        text = f"{compiler.version} ({' '.join(compiler.command)})"
        facts = {"version": compiler.version, "command": list(compiler.command)}
        yield Finding("compiler", Level.OK, text, facts)
