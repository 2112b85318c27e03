"""The kernels and the models, on every set of CPU kernels that this machine can run.

The test suite runs on the best set. Here a fifth of the cases of a few of its files run again on
each of the others, each time in a new process, since the choice is made once per process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.common.errors import ConfigurationError
from kernels.library.build import find_compiler
from kernels.library.cpu import cpu_features
from kernels.library.library import TORCH, WISH_VARIABLE, find_libraries, select
from kernels.library.variants import VARIANTS, variants_for

ROOT = Path(__file__).parents[2]
FAMILIES = "tests/integration/test_model_families.py"
ARITHMETIC = tuple(
    f"tests/kernels/test_{name}.py"
    for name in (
        "batch_invariance",
        "draw_tokens",
        "experts",
        "formats",
        "linear",
        "logit_rows",
        "logit_rules",
        "paged_attention",
        "pointwise",
        "quantized_cache",
        "quantized_linear",
        "rotate_and_write_kv",
        "shared_prefix_attention",
        "weights",
    )
)
"""Tests of what the compiler makes other instructions of. Threads, processes, memory and recorded
steps are the same source in every set.
"""
SERVER_PROCESSES = "tests/e2e/test_openai_client.py::test_several_prompts_token_ids_and_echo"
TESTS_WITHOUT_COMPILER = (
    "tests/integration/test_role_change.py::test_streams_go_on_while_workers_change_their_tier[file]",
    "tests/integration/test_draft_heads.py::test_draft_tokens_are_those_of_plain_torch[medusa-llama-options0-host]",
    "tests/kernels/test_trusted_arguments.py",
)
RUNNABLE = [variant.name for variant in variants_for() if variant.cpu_features <= cpu_features()]
REFUSED = ["fastest", *(one.name for one in VARIANTS if one.name not in RUNNABLE)]
needs_libraries = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


def test_a_model_is_served_without_native_kernels():
    """The most common machine without a compiler: a container with Python alone."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += TESTS_WITHOUT_COMPILER
    # More threads than cores would wait for each other.
    environment = {WISH_VARIABLE: TORCH, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr


@needs_libraries
def test_every_variant_is_built_and_the_best_is_chosen(monkeypatch):
    monkeypatch.delenv(WISH_VARIABLE, raising=False)
    states = {found.variant.name: (found.built, found.stale) for found in find_libraries()}
    assert states == dict.fromkeys(states, (True, False))
    assert select().variant == RUNNABLE[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("choice", [TORCH, *RUNNABLE[1:]])
@needs_libraries
def test_tests_of_kernels_and_models_pass_with_each_set(choice):
    options = "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow"
    options += "-p", "tests.support.fifth_of_cases"
    # With torch, those of the kernels would compare it with itself.
    files = [FAMILIES, SERVER_PROCESSES] if choice == TORCH else [*ARITHMETIC, FAMILIES]
    command = [sys.executable, "-m", "pytest", *options, *files]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {WISH_VARIABLE: choice},
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr


@pytest.mark.parametrize("choice", REFUSED)
def test_kernels_that_this_machine_cannot_run_are_refused(monkeypatch, choice):
    monkeypatch.setenv(WISH_VARIABLE, choice)
    with pytest.raises(ConfigurationError, match=f"{WISH_VARIABLE} is '{choice}'"):
        select()


@pytest.mark.parametrize(
    "choice",
    [RUNNABLE[0], *(pytest.param(one, marks=pytest.mark.slow) for one in (TORCH, *RUNNABLE[1:]))],
)
@needs_libraries
def test_the_doctors_self_test_passes(choice):
    result = self_test(choice)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "matrix products in torch.float32 and torch.bfloat16 are right\n"


def test_the_doctors_self_test_reports_an_error():
    result = self_test("fastest")
    assert result.returncode == 1
    assert result.stderr.startswith("BATON_CPU_KERNELS is 'fastest': it must be one of auto")


def self_test(choice):
    return subprocess.run(
        [sys.executable, "-m", "baton.doctor.native_kernels"],
        cwd=ROOT,
        env=os.environ | {WISH_VARIABLE: choice},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
