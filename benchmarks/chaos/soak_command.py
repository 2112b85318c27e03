"""`baton bench soak`: memory and descriptors of a cluster's processes under a long mixed load."""

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton import AsyncClient
from benchmarks.chaos.cluster import (
    ChaosCluster,
    add_cluster_args,
    check_least,
    cluster_in_words,
    cluster_of,
    shared_files,
)
from benchmarks.chaos.mixed_load import KINDS, MixedLoad
from benchmarks.output import add_output_args, check_output_args, report_of_run, write_report
from benchmarks.report import Panel, Report, Series, Table

__all__ = ["Growth", "add_args", "main"]

_KV_CACHE_BYTES = 64 << 20
_INTERVAL_S = 5.0
_RELEASE_TIMEOUT_S = 60.0
_WARM_SHARE = 0.3
"""The share of the time in which caches fill; growth is measured after it."""


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    add = parser.add_argument
    add_cluster_args(parser, routers=1, prefill=1, decode=2)
    add("--duration-s", type=float, default=1200.0, metavar="S")
    add("--clients", type=int, default=8, metavar="N", help="requests at a time")
    add("--seed", type=int, default=0, metavar="N", help="of the requests")
    add_output_args(parser)


def main(args: argparse.Namespace) -> int:
    """Sends a mixed load to a cluster for a long time: greedy and seeded streams, several
    candidates, beams, whole answers, cancels, deadlines and lost connections. Reports what each
    process's memory, descriptors and threads grow by once caches are full, and whether equal
    requests got equal tokens. The exit status is 1 if a token was wrong or missing, a request
    failed, or anything was left behind.
    """
    check_output_args(args)
    check_least(args, positive=("duration_s", "clients"))
    report, is_good = asyncio.run(_run(args))
    write_report(report, args)
    return int(not is_good)


@dataclass(slots=True)
class Growth:
    """Resources that a process used over time.

    Attributes:
        times_s: when it was looked at.
        memory_mib: resident memory then.
        descriptors: open descriptors then.
        threads: threads then.
    """

    times_s: list[float] = field(default_factory=list)
    memory_mib: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def add(self, now_s: float, resources: tuple[float, int, int]) -> None:
        """Takes a sample: resident memory in MiB, descriptors and threads."""
        memory_mib, descriptors, threads = resources
        self.times_s.append(now_s)
        self.memory_mib.append(memory_mib)
        self.descriptors.append(descriptors)
        self.threads.append(threads)

    def row(self) -> tuple[float | int, ...]:
        """Returns memory once warm, at the end and its growth per minute, then descriptors and
        threads once warm and at the end.
        """
        warm, last = int(len(self.times_s) * _WARM_SHARE), len(self.times_s) - 1
        minutes = (self.times_s[last] - self.times_s[warm]) / 60
        grown_mib = self.memory_mib[last] - self.memory_mib[warm]
        return (
            self.memory_mib[warm],
            self.memory_mib[last],
            grown_mib / minutes if minutes else 0.0,
            *(self.descriptors[warm], self.descriptors[last]),
            *(self.threads[warm], self.threads[last]),
        )


async def _run(args: argparse.Namespace) -> tuple[Report, bool]:
    files_before = shared_files()
    async with cluster_of(args, _KV_CACHE_BYTES) as cluster:
        addresses = [router.address for router in cluster.routers]
        async with AsyncClient(addresses[0]) as client:
            vocab_size = (await client.get_model()).vocab_size
        load, growth = MixedLoad(addresses, vocab_size, args.seed), dict[str, Growth]()
        sampling = asyncio.create_task(_sample(cluster, growth))
        await load.run(args.clients, args.duration_s)
        sampling.cancel()
        await asyncio.gather(sampling, return_exceptions=True)
        left = await cluster.wait_until_free(_RELEASE_TIMEOUT_S)
    left = [*left, *sorted(shared_files() - files_before)]
    is_good = not left and {outcome for _, outcome in load.counts} <= {"right", "left"}
    return _report(args, load, growth, left), is_good


async def _sample(cluster: ChaosCluster, growth: dict[str, Growth]) -> None:
    clock = asyncio.get_running_loop().time
    began = clock()
    while True:
        for name, resources in cluster.resources().items():
            growth.setdefault(name, Growth()).add(clock() - began, resources)
        await asyncio.sleep(_INTERVAL_S)


def _report(
    args: argparse.Namespace,
    load: MixedLoad,
    growth: Mapping[str, Growth],
    left: Sequence[str],
) -> Report:
    outcomes = list(dict.fromkeys(outcome for _, outcome in load.counts))
    counts: list[Sequence[str | float]] = [
        [kind, *(load.counts[kind, outcome] for outcome in outcomes)] for kind in KINDS
    ]
    used: list[Sequence[str | float]] = [[name, *each.row()] for name, each in growth.items()]
    columns = ("", "warm MiB", "end MiB", "MiB/min", "fds", "fds end", "threads", "threads end")
    tables = [
        Table("requests", ("", *outcomes), counts),
        Table("what processes use", columns, used),
        Table("left behind at the end", ("",), [(each,) for each in left or ["nothing"]]),
    ]
    if load.errors:
        tables.append(Table("errors", ("", "requests"), load.errors.most_common(8)))
    return report_of_run(
        args,
        "a mixed load for a long time",
        tables,
        facts={
            "cluster": cluster_in_words(args),
            "model": args.model,
            "load": f"{args.clients} clients for {args.duration_s:g} s, "
            f"{load.counts.total()} requests",
        },
        panels=[
            Panel(
                "resident memory",
                "time, s",
                "MiB",
                [Series(name, each.times_s, each.memory_mib) for name, each in growth.items()],
            )
        ],
        counts=[[*key, count] for key, count in load.counts.items()],
        errors=dict(load.errors),
        left=left,
        used={
            name: {
                "time_s": each.times_s,
                "mib": each.memory_mib,
                "fds": each.descriptors,
                "threads": each.threads,
            }
            for name, each in growth.items()
        },
    )
