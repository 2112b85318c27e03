"""`PageState`: the state of a router as JSON, for the page that operators look at."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from google.protobuf.json_format import MessageToDict

from baton.common.flags.config_flags import flags_of_config
from baton.common.short_texts import short_name
from baton.v1 import cluster_pb2
from router.cluster_servicer import ClusterServicer
from router.config.router import RouterConfig
from router.http.json_bytes import json_bytes
from router.models import Models

__all__ = ["PageState"]

_MIN_INTERVAL_S = 2.0
_INTERVAL_S = 1.0
_INTERVAL_PER_REPLICA_S = 0.05
"""A look takes about 10 ms of the router's time and 0.3 ms for each replica, which it asks. With
these pauses a viewer costs under 1% of a core, however many replicas there are.
"""
_NUM_LATEST = 20
_NUM_SLOWEST = 10
_MAX_REPLICAS = 200
_MAX_STAGES = 60
_MAX_CHOICES = 10
_BAD_STATES = (cluster_pb2.REPLICA_STATE_LOST, cluster_pb2.REPLICA_STATE_EJECTED)
_WORKER_FIELDS = (
    *("kv_form", "kv_connector", "num_blocks", "pool_block_size"),
    *("max_model_len", "max_num_seqs"),
)


class PageState:
    """Looks at the router when somebody reads, and at no other time. All readers share a look.

    What it shows is what `ClusterService` answers, so that a router of several processes is shown
    as a whole. Only the prefix index is that of the process that answers; each has its own.

    Args:
        operators: describes the router.
        models: the models, with the replicas that this process is connected to.
        config: the router's.
        check: raises an error unless an authorization header, and the host that was asked for, are
            those of an operator.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        operators: ClusterServicer,
        models: Models,
        config: RouterConfig,
        check: Callable[[str | None, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._operators = operators
        self._models = models
        self._flags = list(_flags(config))
        self._check = check
        self._clock = clock
        self._looking = asyncio.Lock()
        self._looked_at = float("-inf")
        self._interval_s = _MIN_INTERVAL_S
        self._body = b""

    async def read(self, header: str | None, asked_host: str) -> bytes:
        """Returns the state as JSON, at most half an interval old.

        Args:
            header: the authorization header.
            asked_host: the header Host.

        Raises:
            UnauthenticatedError: the header lacks the cluster's token.
            PermissionDeniedError: the router shows its state to nobody.
        """
        self._check(header, asked_host)
        async with self._looking:
            if self._clock() - self._looked_at >= self._interval_s / 2:
                self._body = json_bytes(await self._look())
                self._looked_at = self._clock()
            return self._body

    async def _look(self) -> dict[str, Any]:
        latest = cluster_pb2.GetTraceRequest(limit=_NUM_LATEST)
        slowest = cluster_pb2.GetTraceRequest(limit=_NUM_SLOWEST, slowest=True)
        cluster, latest_traces, slowest_traces = await asyncio.gather(
            self._operators.GetCluster(cluster_pb2.GetClusterRequest(), None),
            self._operators.GetTrace(latest, None),
            self._operators.GetTrace(slowest, None),
        )
        num_replicas = len(cluster.replicas)
        interval_s = _INTERVAL_S + num_replicas * _INTERVAL_PER_REPLICA_S
        self._interval_s = max(_MIN_INTERVAL_S, interval_s)
        num_hidden = _hide_replicas(cluster)
        replicas = await _fields_of_each(cluster.replicas)
        cluster.ClearField("replicas")
        return {
            "time_s": time.time(),
            "interval_s": self._interval_s,
            "cluster": {**_fields(cluster), "replicas": replicas},
            "num_hidden_replicas": num_hidden,
            "recent": await _trace_fields(latest_traces),
            "slowest": await _trace_fields(slowest_traces),
            "prefix_index": self._prefix_index(),
            "configuration": {"router": self._flags, "workers": self._workers()},
        }

    def _prefix_index(self) -> list[dict[str, Any]]:
        counts = chain.from_iterable(model.fleet.cache_counts() for model in self._models)
        return [asdict(count) for count, _ in zip(counts, range(_MAX_REPLICAS), strict=False)]

    def _workers(self) -> list[dict[str, Any]]:
        """What the connected workers serve."""
        workers = {
            replica.address: {
                "model": model.name,
                "address": replica.address,
                **{name: getattr(replica.info, name) for name in _WORKER_FIELDS},
            }
            for model in self._models
            for tier in (model.fleet.prefill, model.fleet.decode)
            for replica in tier.connected
        }
        return list(workers.values())[:_MAX_REPLICAS]


def _fields(message: Any) -> dict[str, Any]:
    """The fields of a message that are not zero; 64-bit integers are texts, as in all its JSON."""
    return MessageToDict(message, preserving_proto_field_name=True)


async def _fields_of_each(messages: Iterable[Any]) -> list[dict[str, Any]]:
    """The fields of messages. Streams get their tokens between two of them, as a few hundred take
    as long as several steps of decode.
    """
    fields = []
    for message in messages:
        fields.append(_fields(message))
        await asyncio.sleep(0)
    return fields


def _hide_replicas(cluster: cluster_pb2.GetClusterResponse) -> int:
    """Leaves the first replicas, and those that cannot be used before others; returns how many are
    taken out.
    """
    num_hidden = len(cluster.replicas) - _MAX_REPLICAS
    if num_hidden <= 0:
        return 0
    numbers = range(len(cluster.replicas))
    by_need = sorted(numbers, key=lambda i: cluster.replicas[i].state not in _BAD_STATES)
    shown = [cluster.replicas[i] for i in sorted(by_need[:_MAX_REPLICAS])]
    kept = cluster_pb2.GetClusterResponse(replicas=shown)  # copies, as what follows frees them
    cluster.ClearField("replicas")
    cluster.MergeFrom(kept)
    return num_hidden


async def _trace_fields(response: cluster_pb2.GetTraceResponse) -> list[dict[str, Any]]:
    for trace in response.traces:
        del trace.stages[_MAX_STAGES:]
        del trace.choices[_MAX_CHOICES:]
    return await _fields_of_each(response.traces)


def _flags(config: RouterConfig) -> Iterator[str]:
    """Yields the flags of a router that are not at their defaults, without what could be a secret:
    of those of clients, certificates and traces only the names.
    """
    parts = (config, config.http, config.grpc, config.metrics, *config.models)
    for part in parts:
        yield from map(short_name, map(" ".join, _split(flags_of_config(part))))
    masked = [*config.security.flags(), *flags_of_config(config.tracing)]
    for name, *values in _split(masked):
        yield f"{name.partition('=')[0]} ..." if values else name.partition("=")[0]


def _split(flags: Sequence[str]) -> list[list[str]]:
    """Returns each flag with its value, if it has one beside it."""
    groups: list[list[str]] = []
    for text in flags:
        if text.startswith("--"):
            groups.append([text])
        else:
            groups[-1].append(text)
    return groups
