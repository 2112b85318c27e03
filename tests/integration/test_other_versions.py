"""Workers of other versions of Baton beside today's router: they serve, or are refused by name."""

import asyncio
import subprocess
import tarfile
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.client import Client
from baton.common.errors import BatonError
from baton.common.request.sampling_params import SamplingParams
from tests.support import cluster
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.cluster import Place, running_cluster
from tests.support.other_formats import VARIABLE

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 8
PROMPT = prompt_of(40)


@asynccontextmanager
async def beside_prefill_of(place, folder):
    """Runs a cluster of today's decode and router with a prefill worker of another version."""
    async with running_cluster(
        folder,
        model=tiny_checkpoint("llama"),
        kv_connector=f"file://{folder}/kv",
        places={"prefill": place},
    ) as running:
        yield running


async def generate(running):
    """Returns the tokens of a request to the router, or its error."""

    def call():
        with Client(running.router.address) as client:
            params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
            return list(client.generate(PROMPT, params, timeout_s=60).token_ids)

    try:
        return await asyncio.to_thread(call)
    except BatonError as error:
        return error


async def read_refusal(running):
    """Returns the line of the router's log by which it refuses a worker."""
    deadline = time.monotonic() + 60
    while "REFUSED" not in (log := running.router.log()):
        assert time.monotonic() < deadline, log
        await asyncio.sleep(0.02)
    return next(line for line in log.splitlines() if "REFUSED" in line)


@pytest.fixture
def of_other_format(monkeypatch):
    """Returns the place of a prefill worker with another version of a format."""
    monkeypatch.setitem(cluster.WORKER_MODULES, "prefill", "tests.support.other_formats")
    return lambda constant: Place(environment={VARIABLE: constant})


@pytest.mark.parametrize(
    ("constant", "theirs", "ours"),
    [
        ("LAYOUT_VERSION", "layout_version is 7", "the cluster's is 1"),
        ("HANDOFF_FORMAT_VERSION", "handoffs 7'", "handoffs 1'"),
        pytest.param("OBJECT_FORMAT_VERSION", "objects 7,", "objects 1,", marks=pytest.mark.slow),
        pytest.param("KEY_FORMAT_VERSION", "keys 7,", "keys 1,", marks=pytest.mark.slow),
    ],
)
async def test_a_worker_of_another_format_is_refused_with_both_versions(
    constant, theirs, ours, of_other_format, tmp_path
):
    async with beside_prefill_of(of_other_format(constant), tmp_path) as running:
        refusal = await read_refusal(running)
        assert theirs in refusal
        assert ours in refusal
        expected = reference_greedy(tiny_checkpoint("llama"), PROMPT, NUM_TOKENS)
        assert await generate(running) == expected  # decode computes the prompt


@pytest.fixture
def previous_release(tmp_path):
    """The sources of the newest tag before today's commit; skips the test if there is none."""
    command = ["git", "describe", "--tags", "--abbrev=0", "HEAD^"]
    tag = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if tag.returncode:
        pytest.skip("there is no earlier tag whose worker could run beside today's router")
    archive, folder = tmp_path / "tag.tar", tmp_path / "tag"
    command = ["git", "archive", f"--output={archive}", tag.stdout.strip()]
    subprocess.run(command, cwd=ROOT, check=True)
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder


@pytest.mark.slow
async def test_the_previous_releases_worker_serves_or_is_refused_by_name(
    previous_release, tmp_path
):
    # `python -m` finds the modules of the working folder first. Its libraries are not compiled.
    there = Place(
        prefix=("env", f"--chdir={previous_release}"), environment={"BATON_CPU_KERNELS": "torch"}
    )
    async with beside_prefill_of(there, tmp_path) as running:
        result = await generate(running)
        if "REFUSED" in running.router.log():
            assert "the cluster's is" in await read_refusal(running)
        else:
            expected = reference_greedy(tiny_checkpoint("llama"), PROMPT, NUM_TOKENS)
            assert result == expected or "this replica has" in str(result)
