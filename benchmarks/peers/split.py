"""Prefill and decode as two tiers of servers on this machine, against one undivided.

Both clusters are started as users start them, by `baton up` with its own
choice of threads, and answer mixed requests in turn over gRPC. Each round has
prompts of its own, so that no prefix is cached.
"""

import asyncio
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from baton import AsyncClient, SamplingParams
from benchmarks.models import read_config
from benchmarks.peers.cases import mixed_requests
from benchmarks.peers.catalogue import Setting
from benchmarks.peers.peer_messages import PeerError
from benchmarks.request import BenchRequest

__all__ = ["measure_split", "router_address"]

_TIERS = {"whole": ("--prefill", "0"), "split": ("--prefill", "1")}
_BATON = (sys.executable, "-c", "import sys; from baton.cli import main; sys.exit(main())")
_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 60.0


async def measure_split(
    setting: Setting, repeats: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Output tokens per second of both, and their ratio: medians over `repeats` rounds.

    One more round before does not count.

    Raises:
        PeerError: a cluster did not start, or a request failed.
    """
    vocab_size = read_config(setting.model)["vocab_size"]
    async with _cluster(setting, "whole") as whole, _cluster(setting, "split") as split:
        rates = await _take_turns({"whole": whole, "split": split}, vocab_size, repeats, tell)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        **{name: round(median, 2) for name, median in medians.items()},
        "split_to_whole": round(medians["split"] / medians["whole"], 3),
        "values": {name: [round(v, 2) for v in values] for name, values in rates.items()},
    }


def router_address(lines: Sequence[str]) -> str | None:
    """Where the router listens, once `baton up` has printed it."""
    for line in lines:
        name, _, address = line.partition(" ")
        if name == "router":
            return address.strip()
    return None


async def _take_turns(
    clients: Mapping[str, AsyncClient],
    vocab_size: int,
    repeats: int,
    tell: Callable[[str], None],
) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {name: [] for name in clients}
    for number in range(1 + repeats):
        for name in sorted(clients, reverse=number % 2 == 0):
            rate = await _output_rate(clients[name], mixed_requests(vocab_size, seed=number))
            tell(f"round {number} of {repeats}: mixed on {name}: {rate:.1f} output tokens/s")
            if number:
                rates[name].append(rate)
    return rates


async def _output_rate(client: AsyncClient, requests: Sequence[BenchRequest]) -> float:
    """Sends all requests at once; output tokens per second until the last one's end."""
    started = time.perf_counter()
    await asyncio.gather(*(_complete(client, request) for request in requests))
    num_tokens = sum(request.num_output_tokens for request in requests)
    return num_tokens / (time.perf_counter() - started)


async def _complete(client: AsyncClient, request: BenchRequest) -> None:
    num_tokens = request.num_output_tokens
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    count = 0
    async for chunk in client.stream(list(request.prompt_token_ids), params):
        count += len(chunk.token_ids)
    if count != num_tokens:
        raise PeerError(f"{count} tokens came, {num_tokens} were asked for")


@asynccontextmanager
async def _cluster(setting: Setting, tiers: str) -> AsyncIterator[AsyncClient]:
    """`baton up` on a free port, and a client of its router."""
    flags = ("--model", str(setting.model), "--max-model-len", str(setting.max_model_len))
    process = await asyncio.create_subprocess_exec(
        *(*_BATON, "up", *_TIERS[tiers], "--port", "0", "--dtype", "bfloat16", *flags),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with AsyncClient(await _address(process)) as client:
            yield client
    finally:
        await _stop(process)


async def _address(process: asyncio.subprocess.Process) -> str:
    """Returns when the cluster serves."""
    assert process.stdout is not None
    lines: list[str] = []
    async with asyncio.timeout(_START_TIMEOUT_S):
        while (address := router_address(lines)) is None:
            line = await process.stdout.readline()
            if not line:
                raise PeerError("baton up ended before it served; the lines above say why")
            lines.append(line.decode())
    return address


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.communicate()  # reads on, so that what it prints does not hold it up
    except TimeoutError:
        process.kill()
        await process.wait()
