"""Prefill and decode as two tiers of servers on this machine, against one undivided.

Both clusters run as `baton up` runs them, with its choice of threads, and
answer the mixed requests in turn over gRPC.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from baton import AsyncClient, SamplingParams
from baton.up.cluster import ClusterConfig
from baton.up.run_folder import embedded_store
from benchmarks.models import read_config
from benchmarks.peers.cases import build_cases, requests_of_round
from benchmarks.peers.catalogue import Setting
from benchmarks.peers.peer_messages import PeerError
from benchmarks.request import BenchRequest
from benchmarks.running_cluster import running_cluster
from engine.config import EngineConfig
from rpc.server_config import ServerConfig

__all__ = ["measure_split"]


async def measure_split(
    setting: Setting, repeats: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Output tokens per second of both, and their ratio: medians over `repeats` rounds.

    One more round before does not count.

    Raises:
        BatonError: a cluster did not start, or a request failed.
    """
    vocab_size = read_config(setting.model)["vocab_size"]
    async with (
        _cluster(setting, num_prefill=0) as whole,
        _cluster(setting, num_prefill=1) as split,
    ):
        rates = await _take_turns({"whole": whole, "split": split}, vocab_size, repeats, tell)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        **{name: round(median, 2) for name, median in medians.items()},
        "split_to_whole": round(medians["split"] / medians["whole"], 3),
        "values": {name: [round(v, 2) for v in values] for name, values in rates.items()},
    }


async def _take_turns(
    clients: Mapping[str, AsyncClient],
    vocab_size: int,
    repeats: int,
    tell: Callable[[str], None],
) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {name: [] for name in clients}
    case = build_cases(vocab_size)["mixed"]
    for number in range(1 + repeats):
        requests = requests_of_round(case, number, vocab_size)
        for name in sorted(clients, reverse=number % 2 == 0):
            rate = await _output_rate(clients[name], requests)
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
    async for chunk in client.stream(request.prompt_token_ids, params):
        count += len(chunk.token_ids)
    if count != num_tokens:
        raise PeerError(f"{count} tokens came, {num_tokens} were asked for")


@asynccontextmanager
async def _cluster(setting: Setting, num_prefill: int) -> AsyncIterator[AsyncClient]:
    """A cluster with one decode worker, and a client of its router."""
    with embedded_store() as store:
        engine = EngineConfig(
            model=str(setting.model),
            dtype="bfloat16",
            max_model_len=setting.max_model_len,
            kv_connector=store,
        )
        config = ClusterConfig(
            engine=engine,
            num_prefill=num_prefill,
            num_decode=1,
            router=ServerConfig(),
            log_level="warning",
        )
        async with running_cluster(config) as plan, AsyncClient(plan.router.address) as client:
            yield client
