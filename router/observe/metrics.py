"""`RouterMetrics`: what the router counts of requests, replicas and calls. Pure.

A request is counted once, when it ends, from its record. Times of its tokens are those of the
engine that makes them (docs/metrics.md).
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from baton.common.errors import BatonError
from baton.common.observe.metrics import MetricInfo, Metrics, Series, Snapshot, buckets_between
from router.observe.request_record import Attempt, RequestRecord

__all__ = ["METRICS", "CacheCounts", "FleetCounts", "ReplicaGauges", "RouterMetrics"]

_MODEL = {"model": None}
_MODEL_AND_TENANT = {"model": None, "tenant": None}
_LONG_S = buckets_between(1e-3, 500.0)
_STAGES = ("queue", "prefill", "transfer", "load", "decode")
_TIERS = ("prefill", "decode")
_STATES = ("connected", "ready", "ejected")
_ERRORS = tuple(sorted({kind.code for kind in BatonError.__subclasses__()}))
_OUTCOMES = ("stop", "length", "aborted", *_ERRORS)
_HTTP_STATUSES = (
    *("200", "400", "401", "403", "404", "405", "408", "409", "413", "415", "429", "431"),
    *("499", "500", "501", "503", "504"),
)
REFUSALS = (
    *("credentials", "permission", "concurrency", "request_rate", "token_rate"),
    *("overload", "slo_ttft", "slo_tpot"),
)
"""Reasons of `baton_router_refused_calls`."""
_REPLICA = {"model": None, "tier": _TIERS, "replica": None}

# Names of counters lack the suffix `_total`, which Prometheus adds.
METRICS: dict[str, MetricInfo] = {
    "baton_router_requests": MetricInfo(
        "counter",
        "Requests that ended, by finish reason or error.",
        {"model": None, "outcome": None},
    ),
    "baton_router_running_requests": MetricInfo("gauge", "Requests that run."),
    "baton_router_prompt_tokens": MetricInfo(
        "counter", "Prompt tokens of requests that ended.", _MODEL_AND_TENANT
    ),
    "baton_router_cached_prompt_tokens": MetricInfo(
        "counter", "Of these, tokens whose KV was found or loaded.", _MODEL_AND_TENANT
    ),
    "baton_router_generated_tokens": MetricInfo(
        "counter", "Generated tokens of requests that ended.", _MODEL_AND_TENANT
    ),
    "baton_router_request_seconds": MetricInfo(
        "histogram", "From a request's arrival to its end.", _MODEL, _LONG_S
    ),
    "baton_router_first_token_seconds": MetricInfo(
        "histogram", "From a request's arrival to its first token.", _MODEL, _LONG_S
    ),
    "baton_router_time_per_output_token_seconds": MetricInfo(
        "histogram",
        "Time from the first token to the end, per later token, of one candidate.",
        _MODEL,
    ),
    "baton_router_route_seconds": MetricInfo(
        "histogram", "From a request's arrival to the choice of its replica.", _MODEL
    ),
    "baton_router_wait_seconds": MetricInfo(
        "histogram", "How long a request waited for replicas, if it did.", _MODEL, _LONG_S
    ),
    "baton_router_waiting_requests": MetricInfo(
        "gauge", "Requests that wait for a replica.", _MODEL
    ),
    "baton_router_send_wait_seconds": MetricInfo(
        "histogram", "How long a request waited for its client to take messages.", _MODEL, _LONG_S
    ),
    "baton_router_stage_seconds": MetricInfo(
        "histogram", "Stages of a request on its workers.", {"stage": _STAGES}, _LONG_S
    ),
    "baton_router_prompts": MetricInfo(
        "counter", "Prompts by the tier that computed them.", {"model": None, "tier": _TIERS}
    ),
    "baton_router_attempts": MetricInfo(
        "counter", "Calls of workers for requests, by result.", {"tier": _TIERS, "result": None}
    ),
    "baton_router_prefix_pulls": MetricInfo(
        "counter",
        "Workers asked to lend the beginning of a prompt to another one.",
        {"tier": _TIERS, "result": ("lent", "not lent")},
    ),
    "baton_router_resumes": MetricInfo(
        "counter", "Requests that continued on another decode replica.", _MODEL
    ),
    "baton_router_replicas": MetricInfo(
        "gauge",
        "Replicas by state.",
        {"model": None, "tier": _TIERS, "state": _STATES},
        across="max",
    ),
    "baton_router_replica_backlog_seconds": MetricInfo(
        "gauge", "Prompt work that a replica has still to do.", _REPLICA, across="max"
    ),
    "baton_router_replica_requests": MetricInfo(
        "gauge", "Requests that run, wait or are on their way at a replica.", _REPLICA, across="max"
    ),
    "baton_router_replica_hit_ratio": MetricInfo(
        "gauge",
        "Share of prompt tokens that a replica has found in its prefix cache lately.",
        _REPLICA,
        across="max",
    ),
    "baton_router_cached_blocks": MetricInfo(
        "gauge",
        "KV blocks in a replica's prefix cache, as the router believes and as the replica says.",
        _REPLICA | {"source": ("believed", "held")},
        across="max",
    ),
    "baton_router_kv_events_absent": MetricInfo(
        "gauge",
        "Whether the router does not learn what is in a replica's prefix cache: 1 or 0.",
        _REPLICA,
        across="max",
    ),
    "baton_router_kv_events_staleness_seconds": MetricInfo(
        "gauge",
        "For how long an event of a replica is known that has not arrived.",
        _REPLICA,
        across="max",
    ),
    "baton_router_stream_pause_seconds": MetricInfo(
        "gauge",
        "How long streams pause after a message, because the event loop is late.",
        across="max",
    ),
    "baton_router_refused_calls": MetricInfo(
        "counter",
        "Calls refused because of who calls, how often, or the load.",
        {"reason": REFUSALS},
    ),
    "baton_router_calls": MetricInfo(
        "counter",
        "Calls of clients that ended, by gRPC status or HTTP status.",
        {"protocol": ("grpc", "http"), "status": None},
    ),
}


@dataclass(frozen=True, slots=True)
class FleetCounts:
    """How many replicas of one tier of a model there are.

    Attributes:
        model: the model's name.
        tier: prefill or decode.
        connected: all of them.
        ready: those that take requests.
        ejected: those whose calls failed, so that others get the requests.
    """

    model: str
    tier: str
    connected: int
    ready: int
    ejected: int


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """What a router knows of the prefix cache of one replica.

    Attributes:
        model: the model's name.
        tier: prefill or decode.
        replica: the replica's address.
        believed: KV blocks in it by the replica's events.
        held: the number that the replica reports.
        lacks_events: whether its events are absent; then only prompts that were sent there count.
        staleness_s: for how long an event is known that has not arrived.
    """

    model: str
    tier: str
    replica: str
    believed: int
    held: int
    lacks_events: bool
    staleness_s: float

    def series(self) -> dict[Series, float]:
        """Returns the values of its metrics."""
        replica = self.model, self.tier, self.replica
        return {
            ("baton_router_cached_blocks", *replica, "believed"): self.believed,
            ("baton_router_cached_blocks", *replica, "held"): self.held,
            ("baton_router_kv_events_absent", *replica): self.lacks_events,
            ("baton_router_kv_events_staleness_seconds", *replica): self.staleness_s,
        }


@dataclass(frozen=True, slots=True)
class ReplicaGauges:
    """What is known of a connected replica.

    Attributes:
        model: the model's name.
        tier: prefill or decode.
        replica: its `host:port`.
        backlog_s: seconds of prompt work that it has still to do.
        num_requests: requests that run, wait or are on their way there, of all routers.
        hit_rate: the share of prompt tokens that it has found in its prefix cache lately.
    """

    model: str
    tier: str
    replica: str
    backlog_s: float
    num_requests: int
    hit_rate: float


class RouterMetrics:
    """Counts for one router. Implements `baton.common.observe.metrics.MetricsSource`.

    Attributes:
        infos: the table.
        read_running: returns the number of running requests.
        read_pause_s: returns how long streams pause.
        read_fleets: returns the number of replicas.
        read_replicas: returns the gauges of the connected replicas.
        read_caches: returns what is known of the replicas' prefix caches.
        read_waiting: returns the number of waiting requests by model.
    """

    def __init__(self) -> None:
        self.infos = METRICS
        self.read_running: Callable[[], int] = int
        self.read_pause_s: Callable[[], float] = float
        self.read_fleets: Callable[[], Iterable[FleetCounts]] = tuple
        self.read_replicas: Callable[[], Iterable[ReplicaGauges]] = tuple
        self.read_caches: Callable[[], Iterable[CacheCounts]] = tuple
        self.read_waiting: Callable[[], Mapping[str, int]] = dict
        self._metrics = Metrics(METRICS)

    def expect(self, models: Sequence[str], tenants: Sequence[str]) -> None:
        """Makes the series that these models and tenants will have, with 0: Prometheus takes the
        first value of a series for its beginning, so that a rate would miss the first event.

        Args:
            models: names of models.
            tenants: names of tenants; few, since 100 are distinguished.
        """
        known = {
            "model": models,
            "tenant": tenants,
            "outcome": _OUTCOMES,
            "result": ("ok", *_ERRORS),
        }
        for name, info in METRICS.items():
            values = (stated or known.get(label, ()) for label, stated in info.labels.items())
            for labels in itertools.product(*values):
                if info.kind == "counter":
                    self._metrics.add(name, 0, *labels)
                elif info.kind == "histogram":
                    self._metrics.observe(name, 0, *labels, count=0)
        for protocol, statuses in (("grpc", ("OK", *_ERRORS)), ("http", _HTTP_STATUSES)):
            for status in statuses:
                self.count_call(protocol, status, 0)

    def count_call(self, protocol: str, status: str, amount: int = 1) -> None:
        """Counts a call of a client that has ended.

        Args:
            protocol: grpc or http.
            status: the name of a gRPC status, or the number of an HTTP status.
            amount: how many.
        """
        self._metrics.add("baton_router_calls", amount, protocol, status)

    def count_refusal(self, reason: str) -> None:
        """Counts a call that was refused for one of `REFUSALS`."""
        self._metrics.add("baton_router_refused_calls", 1, reason)

    def count_request(self, record: RequestRecord) -> None:
        """Counts a request that has ended."""
        self._count_tokens(record)
        if record.is_awaited:
            self._count_times(record)
        for attempt in record.attempts:
            self._count_attempt(attempt)
        decodes = [attempt for attempt in record.attempts if attempt.tier == "decode"]
        self._metrics.add("baton_router_resumes", max(len(decodes) - 1, 0), record.model)
        done = [attempt for attempt in record.attempts if attempt.first_output_at is not None]
        if done:
            self._metrics.add("baton_router_prompts", 1, record.model, done[0].tier)

    def snapshot(self) -> Snapshot:
        """Returns all metrics. Any thread may call it."""
        values, histograms = self._metrics.snapshot()
        read: dict[Series, float] = {
            ("baton_router_running_requests",): self.read_running(),
            ("baton_router_stream_pause_seconds",): self.read_pause_s(),
        }
        for model, number in self.read_waiting().items():
            read["baton_router_waiting_requests", model] = number
        for counts in self.read_fleets():
            for state in _STATES:
                series = ("baton_router_replicas", counts.model, counts.tier, state)
                read[series] = getattr(counts, state)
        for gauges in self.read_replicas():
            labels = gauges.model, gauges.tier, gauges.replica
            read["baton_router_replica_backlog_seconds", *labels] = gauges.backlog_s
            read["baton_router_replica_requests", *labels] = gauges.num_requests
            read["baton_router_replica_hit_ratio", *labels] = gauges.hit_rate
        for cache in self.read_caches():
            read |= cache.series()
        return Snapshot(values | read, histograms)

    def _count_tokens(self, record: RequestRecord) -> None:
        outcome = record.error or next(reversed(record.finish_reasons), "none")
        self._metrics.add("baton_router_requests", 1, record.model, outcome)
        owner, usage = (record.model, record.tenant), record.usage
        self._metrics.add("baton_router_prompt_tokens", usage.prompt_tokens, *owner)
        self._metrics.add("baton_router_cached_prompt_tokens", usage.cached_tokens, *owner)
        self._metrics.add("baton_router_generated_tokens", usage.completion_tokens, *owner)

    def _count_times(self, record: RequestRecord) -> None:
        observe, model, start = self._metrics.observe, record.model, record.arrived_at
        end = record.ended_at or start
        observe("baton_router_request_seconds", end - start, model)
        observe("baton_router_send_wait_seconds", record.send_wait_s, model)
        if record.routed_at is not None:
            observe("baton_router_route_seconds", record.routed_at - start, model)
        if record.waits:
            observe("baton_router_wait_seconds", record.wait_s, model)
        if record.first_token_s is not None:
            observe("baton_router_first_token_seconds", record.first_token_s, model)
        if record.token_s is not None:
            observe("baton_router_time_per_output_token_seconds", record.token_s, model)

    def _count_attempt(self, attempt: Attempt) -> None:
        self._metrics.add("baton_router_attempts", 1, attempt.tier, attempt.error or "ok")
        if attempt.pulled_from:
            result = "lent" if attempt.pulled_tokens else "not lent"
            self._metrics.add("baton_router_prefix_pulls", 1, attempt.tier, result)
        for stage in _STAGES[:-1]:
            duration_ms = getattr(attempt.timings, f"{stage}_ms")
            if duration_ms:
                self._metrics.observe("baton_router_stage_seconds", duration_ms / 1000, stage)
        if attempt.tier == "decode" and attempt.first_output_at and attempt.ended_at:
            decode_s = attempt.ended_at - attempt.first_output_at
            self._metrics.observe("baton_router_stage_seconds", decode_s, "decode")
