"""Clusters of real server processes for benchmarks, started as `baton serve` starts them."""

import asyncio
import time
import urllib.request
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from prometheus_client.parser import text_string_to_metric_families

from baton import AsyncClient, SamplingParams
from baton.common.errors import UnavailableError
from baton.common.request.results import Timings
from baton.up.cluster import start_server, start_workers, stop_in_order
from baton.up.plan import ClusterConfig, ClusterPlan, plan_cluster
from benchmarks.output import write_line
from engine.config import EngineConfig
from rpc.server_config import MetricsConfig
from worker.processes.run_folder import embedded_store, sharing_machine
from worker.processes.supervisor import SupervisedProcess

__all__ = ["ClusterAnswer", "ServedCluster", "running_cluster", "served_cluster"]

_METRICS_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ClusterAnswer:
    """The answer that a client got for one prompt.

    Attributes:
        tokens: the generated tokens.
        token_times_s: when each token arrived, in seconds since the prompt was sent. Tokens of
            one message share a time.
        timings: the stages that the cluster measured.
        cached_tokens: prompt tokens that the cluster found cached and did not compute.
    """

    tokens: tuple[int, ...]
    token_times_s: tuple[float, ...]
    timings: Timings
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ServedCluster:
    """A running cluster.

    Attributes:
        client: is connected to its router.
        metrics_urls: where its workers serve their metrics.
    """

    client: AsyncClient
    metrics_urls: Sequence[str]

    async def ask(self, prompt: Sequence[int], num_tokens: int) -> ClusterAnswer:
        """Generates `num_tokens` tokens greedily, past the end of sequence.

        Raises:
            BatonError: the request failed, or another number of tokens arrived.
        """
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        started = time.perf_counter()
        tokens: list[int] = []
        times_s: list[float] = []
        timings, cached_tokens = Timings(), 0
        async for chunk in self.client.stream(prompt, params):
            tokens += chunk.token_ids
            times_s += [time.perf_counter() - started] * len(chunk.token_ids)
            timings = chunk.timings or timings
            cached_tokens = chunk.usage.cached_tokens if chunk.usage else cached_tokens
        if len(tokens) != num_tokens:
            raise UnavailableError(f"{len(tokens)} tokens came, {num_tokens} were asked for")
        return ClusterAnswer(tuple(tokens), tuple(times_s), timings, cached_tokens)

    async def read_metrics(self) -> dict[str, float]:
        """Returns the sums of all metrics over workers and backends.

        A metric with a direction has it in its name: "baton_kv_bytes_total load".
        """
        texts = await asyncio.gather(
            *(asyncio.to_thread(_read_text, url) for url in self.metrics_urls)
        )
        sums: dict[str, float] = {}
        for text in texts:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    name = f"{sample.name} {sample.labels.get('direction', '')}".strip()
                    sums[name] = sums.get(name, 0.0) + sample.value
        return sums


@asynccontextmanager
async def served_cluster(
    engine: EngineConfig, *, num_prefill: int
) -> AsyncGenerator[ServedCluster, None]:
    """Runs a router, `num_prefill` prefill workers and one decode worker.

    Args:
        engine: configures every worker. Without a `kv_connector`, the cluster gets a store of
            its own.
        num_prefill: 0 makes the decode worker compute prompts too. Otherwise they compute all
            prompts, even those that decode would compute sooner: the split is what is measured.

    Raises:
        ConfigurationError: a process ended before it served.
    """
    with ExitStack() as stack:
        if engine.kv_connector is None:
            engine = replace(engine, kv_connector=stack.enter_context(embedded_store()))
        config = ClusterConfig.grpc_only(engine, num_prefill=num_prefill)
        metrics = MetricsConfig(port=0)
        router = replace(config.router, metrics=metrics, max_local_prefill_tokens=0)
        async with (
            running_cluster(replace(config, router=router)) as plan,
            AsyncClient(plan.router.address) as client,
        ):
            yield ServedCluster(client, [worker.metrics_url for worker in plan.workers])


@asynccontextmanager
async def running_cluster(config: ClusterConfig) -> AsyncGenerator[ClusterPlan, None]:
    """Starts the workers, then the router; stops them in order. Their output goes to stderr.

    Args:
        config: what to run.

    Raises:
        ConfigurationError: a process ended before it served.
    """
    with sharing_machine(config.engine, turns=len(config.targets) > 1) as engine:
        plan = plan_cluster(replace(config, engine=engine))
        servers = (*plan.workers, plan.router)
        processes = [SupervisedProcess(server.spec, write_line) for server in servers]
        try:
            *workers, router = zip(servers, processes, strict=True)
            await start_workers(workers)
            await start_server(*router)
            yield plan
        finally:
            await stop_in_order(processes)


def _read_text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_METRICS_TIMEOUT_S) as response:  # noqa: S310 - http
        text: str = response.read().decode()
    return text
