"""The screen of `baton top`, as lines of text. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from operator import attrgetter
from textwrap import wrap

from baton.cli.terminal import end_of
from baton.v1 import cluster_pb2, worker_pb2

__all__ = ["Line", "Sample", "Style", "render"]

_TIERS = {
    worker_pb2.WORKER_ROLE_PREFILL: "prefill",
    worker_pb2.WORKER_ROLE_DECODE: "decode",
    worker_pb2.WORKER_ROLE_BOTH: "both",
}
_STATES = {
    cluster_pb2.REPLICA_STATE_READY: "ready",
    cluster_pb2.REPLICA_STATE_DRAINING: "draining",
    cluster_pb2.REPLICA_STATE_LOST: "LOST",
    cluster_pb2.REPLICA_STATE_EJECTED: "EJECTED",
}
_TIER_CHARS, _STATE_CHARS = 8, 9
_MIN_ADDRESS_CHARS = 22
_MIN_WIDTH = 60
_MIN_ROWS = 4
_MAX_ERRORS = 5
_UNITS = ("", "k", "M", "G", "T", "P")


class Style(Enum):
    """How a line looks where colors are possible."""

    PLAIN = "plain"
    HEAD = "head"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the screen.

    Attributes:
        text: without escape sequences.
        style: how it looks.
    """

    text: str
    style: Style = Style.PLAIN


@dataclass(frozen=True, slots=True)
class Sample:
    """A cluster at one moment.

    Attributes:
        at: monotonic seconds.
        cluster: the answer of the router.
    """

    at: float
    cluster: cluster_pb2.GetClusterResponse
    by_worker: Mapping[str, cluster_pb2.ReplicaStatus] = field(init=False)

    def __post_init__(self) -> None:
        workers = {replica.worker_id: replica for replica in self.cluster.replicas}
        object.__setattr__(self, "by_worker", workers)


_Replica = cluster_pb2.ReplicaStatus
_Count = Callable[[_Replica], int]

_hits: _Count = attrgetter("load.prefix_cache_hits")
_queries: _Count = attrgetter("load.prefix_cache_queries")
_generated: _Count = attrgetter("counters.generated_tokens")
_prompt: _Count = attrgetter("counters.prompt_tokens")
_loaded: _Count = attrgetter("counters.loaded_tokens")
_saved_bytes: _Count = attrgetter("counters.saved_bytes")
_loaded_bytes: _Count = attrgetter("counters.loaded_bytes")
_failed_transfers: _Count = attrgetter("counters.failed_transfers")


@dataclass(frozen=True, slots=True)
class _Rates:
    """Differences between two samples.

    Attributes:
        before: the earlier one; None if there is none.
        now: the later one.
    """

    before: Sample | None
    now: Sample

    def of(self, count: _Count, replicas: Iterable[_Replica]) -> float | None:
        """The growth of a count per second, over replicas that both samples have counts of; None
        if there are none.
        """
        grown = [count(new) - count(old) for old, new in self._pairs(replicas)]
        return max(sum(grown), 0) / self._elapsed_s if grown else None

    def share(self, part: _Count, whole: _Count, replicas: Iterable[_Replica]) -> float | None:
        """The growth of one count as a share of that of another, which must have grown."""
        pairs = list(self._pairs(replicas))
        most = sum(whole(new) - whole(old) for old, new in pairs)
        return sum(part(new) - part(old) for old, new in pairs) / most if most > 0 else None

    def of_router(self, count: Callable[[cluster_pb2.RouterActivity], int]) -> float | None:
        """The growth of a count of the router per second; None if the router is another one. What
        one of its processes had counted is missing once it has ended.
        """
        before, now = self.before, self.now.cluster
        if before is None or now.uptime_s < before.cluster.uptime_s:
            return None
        grown = count(now.activity) - count(before.cluster.activity)
        return max(grown, 0) / self._elapsed_s

    @property
    def _elapsed_s(self) -> float:
        return max(self.now.at - self.before.at, 1e-3) if self.before else 1.0

    def _pairs(self, replicas: Iterable[_Replica]) -> Iterator[tuple[_Replica, _Replica]]:
        for new in replicas:
            old = self.before.by_worker.get(new.worker_id) if self.before else None
            if old is not None and old.HasField("counters") and new.HasField("counters"):
                yield old, new


@dataclass(frozen=True, slots=True)
class _Column:
    head: str
    chars: int
    show: Callable[[_Replica, _Rates], str]


def _rate_column(head: str, chars: int, count: _Count) -> _Column:
    return _Column(head, chars, lambda replica, rates: _short(rates.of(count, [replica])))


# The first ones fit into 80 columns; a wider terminal shows more of them.
_COLUMNS = (
    _Column("run", 5, lambda replica, _: str(replica.load.num_running)),
    _Column("wait", 5, lambda replica, _: str(replica.load.num_waiting)),
    _Column("queue", 7, lambda replica, _: _seconds(replica.backlog_s)),
    _Column("KV", 5, lambda replica, _: _percent(_used_kv(replica))),
    _rate_column("tok/s", 7, _generated),
    _rate_column("prom/s", 7, _prompt),
    _Column("hits", 5, lambda replica, rates: _percent(_hit_rate(replica, rates))),
    _Column("queued", 7, lambda replica, _: _short(replica.load.num_queued_tokens)),
    _Column("preempt", 9, lambda replica, _: _short(replica.load.num_preemptions)),
    _Column("swapped", 9, lambda replica, _: _short(replica.load.num_swapped_blocks)),
    _rate_column("saved/s", 9, _saved_bytes),
    _rate_column("loaded/s", 9, _loaded_bytes),
    _Column("blocks", 8, lambda replica, _: _short(replica.load.num_blocks)),
    _Column("version", 10, lambda replica, _: _head(replica.version, 9)),
)


def render(
    address: str,
    before: Sample | None,
    now: Sample | None,
    *,
    width: int = 80,
    height: int | None = None,
    problem: str = "",
) -> list[Line]:
    """Returns the lines of the screen.

    Args:
        address: the router's.
        before: an earlier sample, for rates; None if there is none.
        now: the last sample; None if the router has not answered yet.
        width: columns of the terminal; narrower ones than 60 cut the lines.
        height: lines of the terminal; None for no limit.
        problem: why the router does not answer; empty if it does.
    """
    lines = list(_header(address, now, problem))
    if now is not None:
        rates = _Rates(before, now)
        lines += _totals(rates)
        errors = list(_errors(now.cluster.activity.errors, max(width, _MIN_WIDTH)))
        warnings = list(_warnings(now.cluster, max(width, _MIN_WIDTH)))
        left = None if height is None else height - len(lines) - len(errors) - len(warnings)
        lines += _table(rates, max(width, _MIN_WIDTH), left)
        lines += warnings
        lines += errors
    return [Line(line.text[:width].rstrip(), line.style) for line in lines[:height]]


# The head of the screen.


def _header(address: str, now: Sample | None, problem: str) -> Iterator[Line]:
    where = f"router {end_of(address, 40)}"
    if now is not None:
        version, uptime = _head(now.cluster.version, 16), _duration(now.cluster.uptime_s)
        where += f"  baton {version}  up {uptime}"
        if now.cluster.num_processes > 1:
            where += f"  {now.cluster.num_processes} processes"
    yield Line(where, Style.HEAD)
    if problem:
        yield Line(f"NO ANSWER, trying again: {_head(problem, 200)}", Style.BAD)


def _totals(rates: _Rates) -> Iterator[Line]:
    activity, replicas = rates.now.cluster.activity, rates.now.cluster.replicas
    yield Line(
        f"requests  {activity.num_running} running  {_short(rates.of_router(_num_finished))}/s  "
        f"{_short(_num_finished(activity))} finished  "
        f"{_short(activity.finished['CANCELLED'])} cancelled  {activity.num_resumes} resumed"
    )
    yield Line(
        f"errors    {_short(rates.of_router(_num_failed))}/s  {_short(_num_failed(activity))} in "
        f"all{''.join(f'  {count} {code}' for code, count in _most_common(activity.failed))}"
        f"  {_short(sum(activity.refused.values()))} calls refused",
        Style.BAD if rates.of_router(_num_failed) else Style.PLAIN,
    )
    yield Line(
        f"tokens    {_short(rates.of(_generated, replicas))}/s generated  "
        f"{_short(rates.of(_prompt, replicas))}/s of prompts  "
        f"{_percent(rates.share(_hits, _queries, replicas))} prefix hits  "
        f"{_percent(rates.share(_loaded, _prompt, replicas))} loaded"
    )
    yield Line(
        f"times     first token {_times(activity.first_token)}  per token {_times(activity.token)}"
    )
    yield Line(
        f"transfer  {_short(rates.of(_saved_bytes, replicas))}B/s saved  "
        f"{_short(rates.of(_loaded_bytes, replicas))}B/s loaded  "
        f"{_short(sum(map(_failed_transfers, replicas)))} failed"
    )
    yield Line("")


def _times(times: cluster_pb2.RecentTimes) -> str:
    if not times.count:
        return "-"
    return f"{_ms(times.p50_ms)} (p99 {_ms(times.p99_ms)})"


# The table.


def _table(rates: _Rates, width: int, height: int | None) -> Iterator[Line]:
    fixed_chars = _TIER_CHARS + _MIN_ADDRESS_CHARS + _STATE_CHARS
    columns, used = [], fixed_chars
    for column in _COLUMNS:
        used += column.chars
        if used > width:
            break
        columns.append(column)
    address_chars = width - sum(column.chars for column in columns) - _TIER_CHARS - _STATE_CHARS
    address_chars = min(address_chars, 48)
    heads = "".join(f"{column.head:>{column.chars}}" for column in columns)
    yield Line(f"{'tier':<{_TIER_CHARS}}{'replica':<{address_chars}}state    {heads}", Style.HEAD)
    rows = list(_rows(rates, columns, address_chars))
    if not rows:
        yield Line("No replica has been found yet.")
    room = len(rows) if height is None else max(height - 1, _MIN_ROWS)
    if len(rows) > room:
        rows.sort(key=lambda row: row.style is not Style.BAD)
        num_hidden = len(rows) - room + 1
        rows[room - 1 :] = [Line(f"... and {num_hidden} more, which a taller terminal shows")]
    yield from rows


def _rows(rates: _Rates, columns: Sequence[_Column], address_chars: int) -> Iterator[Line]:
    replicas = rates.now.cluster.replicas
    models = list(dict.fromkeys(replica.model for replica in replicas))
    for model in models:
        if len(models) > 1:
            yield Line(f"model {_head(model, 70)}")
        for replica in replicas:
            if replica.model == model:
                yield _row(replica, rates, columns, address_chars)


def _row(replica: _Replica, rates: _Rates, columns: Sequence[_Column], address_chars: int) -> Line:
    start = (
        f"{_TIERS.get(replica.role, '?'):<{_TIER_CHARS}}"
        f"{end_of(replica.address, address_chars - 1):<{address_chars}}"
        f"{_STATES.get(replica.state, '?'):<{_STATE_CHARS}}"
    )
    if replica.state == cluster_pb2.REPLICA_STATE_LOST:
        # The cause is at the end of gRPC's messages.
        reason = end_of(replica.problem, sum(column.chars for column in columns))
        return Line(start + reason, Style.BAD)
    cells = (f"{column.show(replica, rates):>{column.chars}}" for column in columns)
    return Line(start + "".join(cells))


# Warnings.


def _warnings(cluster: cluster_pb2.GetClusterResponse, width: int) -> Iterator[Line]:
    """Says what keeps KV from being handed over, and which processes of the router are silent."""
    problems = [
        f"{end_of(replica.address, 40)}: {backend.name} {backend.problem}"
        for replica in cluster.replicas
        for backend in replica.kv_backends
        if backend.problem
    ]
    problems = [*cluster.warnings, *problems]
    if problems:
        yield Line("")
        yield Line("warnings", Style.HEAD)
    for problem in problems[:_MAX_ERRORS]:
        for text in wrap(_head(problem, 400), width):
            yield Line(text, Style.BAD)


# Errors.


def _errors(errors: Sequence[cluster_pb2.RecentError], width: int) -> Iterator[Line]:
    if not errors:
        return
    yield Line("")
    yield Line("recent errors", Style.HEAD)
    for error in errors[:_MAX_ERRORS]:
        moment = datetime.fromtimestamp(error.time_s).astimezone()  # the terminal's time zone
        start = f"{moment:%H:%M:%S} {error.code} {end_of(error.request_id, 16)}: "
        yield Line(start + _head(error.message, max(width - len(start), 10)))


# Counts.


def _num_finished(activity: cluster_pb2.RouterActivity) -> int:
    return sum(activity.finished.values())


def _num_failed(activity: cluster_pb2.RouterActivity) -> int:
    return sum(activity.failed.values())


def _used_kv(replica: _Replica) -> float | None:
    load = replica.load
    return 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else None


def _hit_rate(replica: _Replica, rates: _Rates) -> float | None:
    """The share of look-ups that hit between both samples; the router's if there were none."""
    share = rates.share(_hits, _queries, [replica])
    return (replica.hit_rate or None) if share is None else share


def _most_common(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])[:2]


# Texts.


def _short(number: float | None) -> str:
    """A number in at most five characters."""
    if number is None:
        return "-"
    unit = 0
    while number >= 999.5 and unit < len(_UNITS) - 1:
        number /= 1000
        unit += 1
    is_whole = number >= 99.5 or number == int(number)
    return f"{number:.0f}{_UNITS[unit]}" if is_whole else f"{number:.1f}{_UNITS[unit]}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share * 100:.0f}%"


def _seconds(seconds: float) -> str:
    """A time in at most six characters."""
    return f"{seconds:.2f}s" if seconds < 9.995 else f"{_short(seconds)}s"


def _ms(time_ms: float) -> str:
    return f"{time_ms:.0f} ms" if time_ms < 9999.5 else f"{time_ms / 1000:.0f} s"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m {seconds}s" if minutes else f"{seconds}s"


def _head(text: str, chars: int) -> str:
    """The text, or its beginning if it is longer than this."""
    text = ascii(text)[1:-1]
    return text if len(text) <= chars else f"{text[: chars - 2]}.."
