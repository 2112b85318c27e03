"""Checks of the CPU kernels: which ones run, why, what was built, and a self-test.

`python -m baton.doctor.native_kernels` is the self-test: it compares a product of the kernels
with torch's. `check_result` runs it in a process of its own, because a library that crashes
ends its process.
"""

import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import kernels
from baton.common.errors import BatonError, ConfigurationError
from baton.common.module_process import module_command
from baton.doctor import Finding, Level
from baton.doctor.software import has_torch
from kernels.library import library
from kernels.library.build import find_compiler
from kernels.library.variants import BUILD_COMMAND

if TYPE_CHECKING:
    import torch

__all__ = [
    "check_compiler",
    "check_libraries",
    "check_result",
    "check_selection",
    "find_self_test",
    "run_self_test",
]

_SELF_TEST_TIMEOUT_S = 120
_NUM_TOKENS, _NUM_ROWS, _NUM_COLUMNS = 3, 45, 70
"""Shape of the self-test's product. No number is a multiple of a kernel's tile size."""


def check_selection() -> Iterator[Finding]:
    """Reports which kernels serve the CPU, and why."""
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
    """Runs the self-test in a process of its own, and reports its result."""
    return find_self_test("self-test", "baton.doctor.native_kernels")


def find_self_test(topic: str, module: str) -> Iterator[Finding]:
    """Runs a module in a process of its own, and reports its line on stdout or its error."""
    if not has_torch():
        yield Finding(topic, Level.NOTE, "not checked: it needs torch")
        return
    try:
        result = subprocess.run(
            module_command(module),
            capture_output=True,
            text=True,
            timeout=_SELF_TEST_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        text = f"a small test took longer than {_SELF_TEST_TIMEOUT_S} s"
        yield Finding(topic, Level.PROBLEM, text)
        return
    if result.returncode == 0:
        yield Finding(topic, Level.OK, result.stdout.strip())
    elif result.returncode < 0:
        text = f"the kernels crashed: signal {-result.returncode}"
        yield Finding(topic, Level.PROBLEM, text)
    else:
        lines = result.stderr.strip().splitlines()
        text = lines[-1] if lines else f"failed with status {result.returncode} and no message"
        yield Finding(topic, Level.PROBLEM, text)


def check_libraries() -> Iterator[Finding]:
    """Reports which libraries were built for this architecture, and why others were not."""
    parts, states = [], {}
    for found in library.find_libraries():
        if found.built:
            state = "built, but from other sources" if found.stale else "built"
        else:
            state = f"not built ({found.problem})" if found.problem else "not built"
        parts.append(f"{found.variant.name} {state}")
        states[found.variant.name] = state
    is_complete = set(states.values()) == {"built"}
    text = "; ".join(parts) + ("" if is_complete else f"; `{BUILD_COMMAND}` builds them")
    yield Finding("libraries", Level.OK if is_complete else Level.NOTE, text, states)


def check_compiler() -> Iterator[Finding]:
    """Reports the compiler that would build the kernels."""
    compiler = find_compiler()
    if compiler is None:
        text = "no C++20 compiler found; only building the CPU kernels needs C++"
        yield Finding("compiler", Level.NOTE, text)
    else:
        text = f"{compiler.version} ({' '.join(compiler.command)})"
        facts = {"version": compiler.version, "command": list(compiler.command)}
        yield Finding("compiler", Level.OK, text, facts)


def run_self_test() -> int:
    """Compares products of the kernels with torch's.

    Returns:
        Exit status 0 after a line on stdout, or 1 after the reason on stderr.
    """
    import torch  # here, as the doctor runs without torch too

    dtypes = (torch.float32, torch.bfloat16)
    try:
        kernels.set_num_threads(kernels.default_num_threads())
        wrong = [dtype for dtype in dtypes if not _is_exact(dtype)]
    except BatonError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    if wrong:
        sys.stderr.write(f"a matrix product in {' and '.join(map(str, wrong))} is wrong\n")
        return 1
    print(f"matrix products in {' and '.join(map(str, dtypes))} are right")
    return 0


def _is_exact(dtype: "torch.dtype") -> bool:
    """Whether a product of small integers, which both types represent exactly, is exact."""
    import torch

    random = torch.Generator().manual_seed(0)
    hidden, matrix = (
        torch.randint(-2, 3, (num_rows, _NUM_COLUMNS), generator=random).to(dtype)
        for num_rows in (_NUM_TOKENS, _NUM_ROWS)
    )
    weight = kernels.make_weight(
        _NUM_ROWS, _NUM_COLUMNS, dtype, torch.device("cpu"), kernels.WeightUse.LINEAR
    )
    weight.rows(0, _NUM_ROWS).copy_(matrix)
    product = kernels.linear(hidden, weight, out_dtype=torch.float32)
    return torch.equal(product, hidden.float() @ matrix.float().T)


if __name__ == "__main__":
    sys.exit(run_self_test())
