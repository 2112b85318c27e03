"""Judges the records of a run against those of a quiet one, and makes the report. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.chaos.requests import Event, Record
from benchmarks.report import Panel, Report, Series, Table

__all__ = ["ChaosOutcome", "judge", "make_report"]

_VERDICTS = ("right", "refused", "lost", "wrong", "missing", "twice")
_PERCENTILES = (0.5, 0.99, 1.0)
_UNDISTURBED = "those whose router was left alone"
_AFTERMATH_S = 10.0
"""How long the requests of a router are its disturbed ones afterwards."""


@dataclass(frozen=True, slots=True)
class ChaosOutcome:
    """How a run went.

    Attributes:
        records: those of the run.
        verdicts: one per record, of "right", "refused", "lost" (it ended with another error),
            "wrong" (other tokens), "missing" (too few) and "twice" (too many).
        computed: tokens that workers computed, relative to the quiet run; what a killed worker
            computed in its last second is missing. None if it is not known.
        held: what workers still held at the end.
        left_files: files in shared memory that the cluster left.
    """

    records: Sequence[Record]
    verdicts: Sequence[str]
    computed: float | None
    held: Sequence[str]
    left_files: Sequence[str]

    @property
    def is_good(self) -> bool:
        """Whether every request has the right tokens, and nothing was left behind."""
        return set(self.verdicts) <= {"right"} and not self.held and not self.left_files


def judge(record: Record, expected: Record) -> str:
    """Returns one of `ChaosOutcome.verdicts`. What came before a router died must be right, too."""
    for index, tokens in record.first_tokens.items():
        if tokens != expected.tokens.get(index, [])[: len(tokens)]:
            return "wrong"
    if record.error:
        return "refused" if record.is_refused else "lost"
    if record.tokens == expected.tokens:
        return "right"
    length, wanted = (sum(map(len, each.tokens.values())) for each in (record, expected))
    return "wrong" if length == wanted else "missing" if length < wanted else "twice"


def make_report(
    outcome: ChaosOutcome,
    events: Sequence[Event],
    facts: Mapping[str, str],
    results: Mapping[str, Any],
) -> Report:
    """Returns the report of a run.

    Args:
        outcome: the run's.
        events: what happened in it.
        facts: the conditions, for readers.
        results: the conditions, for programs.
    """
    counts = Counter(outcome.verdicts)
    tables = [
        Table(
            "requests",
            ("", "requests", "sent again, as their router died"),
            [
                (verdict, counts[verdict], _num_again(outcome, verdict))
                for verdict in _VERDICTS
                if counts[verdict] or verdict == "right"
            ],
        ),
        Table(
            "longest time without a token, s",
            ("", "p50", "p99", "most"),
            [
                ("all", *_percentiles([r.longest_gap_s for r in outcome.records])),
                (_UNDISTURBED, *_percentiles(_undisturbed_gaps(outcome.records, events))),
                *(
                    (kind, *_percentiles([r.longest_gap_s for r in records]))
                    for kind, records in _by_kind(outcome.records).items()
                ),
            ],
        ),
    ]
    errors = Counter((r.error, r.message) for r in outcome.records if r.error)
    errors.update(("sent again", r.first_error) for r in outcome.records if r.first_error)
    if errors:
        rows = [(f"{code}: {message}", count) for (code, message), count in errors.most_common(8)]
        tables.append(Table("errors", ("", "requests"), rows))
    left = [*outcome.held, *outcome.left_files]
    tables.append(Table("left behind at the end", ("",), [(each,) for each in left or ["nothing"]]))
    if outcome.computed is not None:
        ratio = [("to the quiet run", outcome.computed)]
        tables.append(Table("computed tokens", ("", "ratio"), ratio))
    return Report(
        title="requests while processes are disturbed",
        facts=facts,
        tables=tables,
        panels=[_panel(outcome, events), _gaps(outcome, events)],
        results={
            **results,
            "verdicts": dict(counts),
            "gaps_s": _percentiles([record.longest_gap_s for record in outcome.records]),
            "gaps_of_other_routers_s": _percentiles(_undisturbed_gaps(outcome.records, events)),
            "computed": outcome.computed,
            "left": left,
            "events": [(event.at_s, event.kind, event.target) for event in events],
            "errors": [[*key, count] for key, count in errors.items()],
        },
    )


def _by_kind(records: Sequence[Record]) -> Mapping[str, Sequence[Record]]:
    kinds = dict.fromkeys(record.request.kind for record in records)
    return {kind: [r for r in records if r.request.kind == kind] for kind in kinds}


def _undisturbed_gaps(records: Sequence[Record], events: Sequence[Event]) -> Sequence[float]:
    """The gaps of requests whose router was not disturbed while they ran."""
    return [
        record.longest_gap_s
        for record in records
        if not any(
            event.disturbs(f"router-{record.router}")
            and record.sent_s - _AFTERMATH_S <= event.at_s <= record.ended_s
            for event in events
        )
    ]


def _num_again(outcome: ChaosOutcome, verdict: str) -> int:
    pairs = zip(outcome.records, outcome.verdicts, strict=True)
    return sum(record.num_tries > 1 for record, each in pairs if each == verdict)


def _percentiles(values: Sequence[float]) -> tuple[float | None, ...]:
    ordered = sorted(values)
    if not ordered:
        return (None,) * len(_PERCENTILES)
    return tuple(ordered[min(int(p * len(ordered)), len(ordered) - 1)] for p in _PERCENTILES)


def _panel(outcome: ChaosOutcome, events: Sequence[Event]) -> Panel:
    seconds = range(int(max((r.ended_s for r in outcome.records), default=0.0)) + 2)
    sent = Counter(int(record.sent_s) for record in outcome.records)
    done, bad = Counter[int](), Counter[int]()
    for record, verdict in zip(outcome.records, outcome.verdicts, strict=True):
        (done if verdict == "right" else bad)[int(record.ended_s)] += 1
    curves = (("sent", sent), ("finished right", done), ("refused, lost or wrong", bad))
    return Panel(
        "requests per second",
        "time, s",
        "requests",
        [
            *(Series(label, seconds, [c[s] for s in seconds], "steps") for label, c in curves),
            *_marks(events),
        ],
    )


def _gaps(outcome: ChaosOutcome, events: Sequence[Event]) -> Panel:
    ends = [record.ended_s for record in outcome.records]
    gaps = [record.longest_gap_s for record in outcome.records]
    return Panel(
        "longest time without a token",
        "end of the request, s",
        "s",
        [Series("", ends, gaps, "points"), *_marks(events)],
    )


def _marks(events: Sequence[Event]) -> list[Series]:
    """Marks on the time axis, by the kind of the events."""
    kinds = dict.fromkeys(event.kind for event in events)
    return [
        Series(kind, xs := [e.at_s for e in events if e.kind == kind], [0.0] * len(xs), "points")
        for kind in kinds
    ]
