"""`baton bench chaos`: what clients see while processes of a cluster are disturbed."""

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace
from pathlib import Path

from baton.common.errors import ConfigurationError
from baton.common.model_files.named_models import NAMED_MODELS
from benchmarks.chaos.clients import RouterClient
from benchmarks.chaos.cluster import (
    ChaosCluster,
    counting_computed,
    running_chaos_cluster,
    shared_files,
)
from benchmarks.chaos.outcome import ChaosOutcome, judge, make_report
from benchmarks.chaos.requests import (
    KINDS,
    ChaosRequest,
    Event,
    Record,
    has_ended,
    make_requests,
    make_schedule,
    send_all,
)
from benchmarks.machine import in_words, name_machine
from benchmarks.output import add_output_args, check_output_args, flags_of, write_report
from benchmarks.report import Report
from benchmarks.workloads.kind import refuse_below
from engine.config import EngineConfig

__all__ = ["add_args", "main"]

_KV_CACHE_BYTES = 256 << 20
_MAX_MODEL_LEN = 512
_RELEASE_TIMEOUT_S = 60.0
_SETTLE_S = 2.0


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    add = parser.add_argument
    add("--model", default="demo", metavar="MODEL", help="folder or name (default: demo)")
    add(
        "--kv-connector",
        default="redis://",
        metavar="URL",
        help="redis:// starts a Redis server of its own, shm:// makes a store of its own "
        "(default: redis://)",
    )
    add("--routers", type=int, default=2, metavar="N")
    add(
        "--router-processes",
        type=int,
        default=1,
        metavar="N",
        help="processes of each router, named router-0/0 and so on (default: %(default)s)",
    )
    add("--prefill", type=int, default=2, metavar="N", help="prefill workers")
    add("--decode", type=int, default=3, metavar="N", help="decode workers")
    add("--show-logs", action="store_true", help="write the processes' output to stderr")
    add("--num-requests", type=int, default=1000, metavar="N")
    add("--request-rate", type=float, default=4.0, metavar="R", help="requests per second")
    add(
        "--event",
        choices=KINDS,
        action="append",
        help="repeatable; kill and freeze by default. kill: SIGKILL; freeze: SIGSTOP, then "
        "SIGCONT after --freeze-s; drain: SIGTERM",
    )
    add("--event-interval-s", type=float, default=3.0, metavar="S")
    add("--freeze-s", type=float, default=4.0, metavar="S")
    add(
        "--target",
        action="append",
        metavar="NAME",
        help="repeatable; processes that may be disturbed, such as decode or decode-0 (default: "
        "all)",
    )
    add(
        "--rolling",
        type=int,
        default=0,
        metavar="N",
        help="restart every process, N times, one after the other, instead",
    )
    add("--seed", type=int, default=0, metavar="N", help="of requests and events")
    add_output_args(parser)


def main(args: argparse.Namespace) -> int:
    """Sends requests at a steady rate to a cluster of processes, first while nothing happens, then
    while processes are killed, frozen or restarted, and start again. Compares the tokens, and
    reports what was refused, lost or wrong, how long streams stood still, and what was left behind.
    The exit status is 1 if anything was.
    """
    check_output_args(args)
    refuse_below(1, routers=args.routers, decode=args.decode, num_requests=args.num_requests)
    refuse_below(1, router_processes=args.router_processes)
    refuse_below(1e-3, request_rate=args.request_rate, event_interval_s=args.event_interval_s)
    refuse_below(0, prefill=args.prefill, rolling=args.rolling, freeze_s=args.freeze_s)
    report, is_good = asyncio.run(_run(args))
    write_report(report, args)
    return int(not is_good)


async def _run(args: argparse.Namespace) -> tuple[Report, bool]:
    files_before = shared_files()
    async with _cluster_of(args) as cluster, AsyncExitStack() as opened:
        num_connections = 1 if args.router_processes == 1 else 4 * args.router_processes
        clients = [
            await opened.enter_async_context(RouterClient(router.address, num_connections))
            for router in cluster.routers
        ]
        vocab_size = (await clients[0].connections[0].get_model()).vocab_size
        requests = make_requests(args.num_requests, vocab_size, args.seed)
        run = _ChaosRun(args, cluster, clients, requests, _schedule(args, cluster))
        quiet, disturbed = await run.both()
        held = await cluster.wait_until_free(_RELEASE_TIMEOUT_S)
        resources = cluster.resources()
    outcome = ChaosOutcome(
        disturbed,
        [judge(*pair) for pair in zip(disturbed, quiet, strict=True)],
        run.computed_ratio,
        held,
        sorted(shared_files() - files_before),
    )
    facts, results = _facts(args, quiet), {"machine": name_machine(), "flags": flags_of(args)}
    report = make_report(outcome, run.happened, facts, {**results, "resources": resources})
    return report, outcome.is_good


def _cluster_of(args: argparse.Namespace) -> AbstractAsyncContextManager[ChaosCluster]:
    """Returns a context that runs the cluster of parsed flags."""
    model = NAMED_MODELS[args.model]() if args.model in NAMED_MODELS else Path(args.model)
    engine = EngineConfig(
        model=str(model),
        kv_connector=args.kv_connector,
        dtype="float32",
        max_model_len=_MAX_MODEL_LEN,
        kv_cache_memory_bytes=_KV_CACHE_BYTES,
    )
    return running_chaos_cluster(
        engine,
        num_routers=args.routers,
        num_prefill=args.prefill,
        num_decode=args.decode,
        router_processes=args.router_processes,
        log=args.show_logs,
    )


def _schedule(args: argparse.Namespace, cluster: ChaosCluster) -> list[Event]:
    names = list(cluster.names)
    if args.target:
        wanted = tuple(args.target)
        names = [name for name in names if name in wanted or name.rpartition("-")[0] in wanted]
        if not names:
            raise ConfigurationError(f"--target {wanted[0]} names none of {list(cluster.names)}")
    return make_schedule(
        names,
        args.event or ("kill", "freeze"),
        interval_s=args.event_interval_s,
        duration_s=args.num_requests / args.request_rate,
        seed=args.seed,
        rolling=args.rolling,
    )


class _ChaosRun:
    """The quiet run and the disturbed one, of the same requests.

    Args:
        args: parsed flags.
        cluster: the cluster.
        clients: one per router.
        requests: the requests.
        schedule: the events of the disturbed run.

    Attributes:
        happened: the events, at the times when they happened.
        computed_ratio: see `ChaosOutcome.computed`.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        cluster: ChaosCluster,
        clients: Sequence[RouterClient],
        requests: Sequence[ChaosRequest],
        schedule: Sequence[Event],
    ) -> None:
        self._args = args
        self._cluster = cluster
        self._clients = clients
        self._requests = requests
        self._schedule = schedule
        self.happened: list[Event] = []
        self.computed_ratio: float | None = None

    async def both(self) -> tuple[list[Record], list[Record]]:
        """Sends the requests twice; returns the records of the quiet run and the disturbed one.

        Raises:
            ConfigurationError: a request of the quiet run failed.
        """
        quiet, computed_quiet = await self._send("quiet")
        if failed := [record for record in quiet if record.error]:
            message = failed[0].message
            raise ConfigurationError(f"{len(failed)} requests failed while all was well: {message}")
        disturbing = asyncio.create_task(self._disturb())
        disturbed, computed = await self._send("disturbed")
        await disturbing
        await self._cluster.wait_serving()
        self.computed_ratio = computed / computed_quiet
        return quiet, disturbed

    async def _send(self, salt: str) -> tuple[list[Record], float]:
        with counting_computed(self._cluster.workers) as computed:
            records = await send_all(
                self._requests,
                self._clients,
                rate=self._args.request_rate,
                salt=salt,
                has_ended=self._has_ended,
                first_serving=self._cluster.first_serving_router,
            )
            await asyncio.sleep(_SETTLE_S)
        return records, computed.total

    def _has_ended(self, router: int, since_s: float) -> bool:
        return has_ended(self.happened, self._cluster.routers[router].spec.name, since_s)

    async def _disturb(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.TaskGroup() as group:
            for event in self._schedule:
                await asyncio.sleep(max(0.0, began + event.at_s - loop.time()))
                self.happened.append(replace(event, at_s=loop.time() - began))
                if self._args.rolling:
                    await self._cluster.restart(event.target)
                else:
                    group.create_task(self._cluster.disturb(event, self._args.freeze_s))


def _facts(args: argparse.Namespace, quiet: Sequence[Record]) -> Mapping[str, str]:
    events = f"restart every process, {args.rolling} times"
    if not args.rolling:
        events = " or ".join(args.event or ("kill", "freeze"))
    most = max(record.longest_gap_s for record in quiet)
    return {
        "cluster": f"{args.routers} routers of {args.router_processes} processes, "
        f"{args.prefill} prefill, {args.decode} decode, {args.kv_connector}",
        "model": args.model,
        "requests": f"{args.num_requests} at {args.request_rate:g} per second",
        "events": f"{events}, one every {args.event_interval_s:g} s",
        "longest time without a token while nothing happened": f"{most:.2f} s",
        "machine": in_words(name_machine()),
    }
