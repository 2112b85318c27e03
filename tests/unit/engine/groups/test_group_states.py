"""`GroupTransfer` is written by one package; the time in which transfers ran (`overlap`)."""

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.groups.states import overlap
from engine.request import FinishReason
from kvstore.jobs import LoadResult, LookupResult, SaveResult, TransferResults
from tests.support.driven_scheduler import DrivenScheduler, handed_over, request

ROOT = Path(__file__).parents[4]
# Methods that change the containers in `GroupTransfer`.
MUTATORS = {"append", "extend", "pop", "clear", "update", "setdefault", "insert", "remove"}
MOMENTS = st.integers(0, 40)
INTERVALS = st.lists(st.tuples(MOMENTS, MOMENTS).map(sorted).map(tuple), max_size=8)


def transfer_of(node: ast.expr) -> ast.Attribute | None:
    """Returns the `x.transfer` that an expression such as `x.transfer.saves[0]` starts with."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute) and node.attr == "transfer":
            return node
        node = node.value
    return None


def writes_to_transfers(tree: ast.AST) -> list[int]:
    """Returns the lines that change a `.transfer` or assign it to another name."""
    lines = []
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                changed = [*targets, value] if is_transfer(value) else targets
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                changed = [target]
            case ast.Delete(targets=targets):
                changed = targets
            case ast.NamedExpr(value=value):
                changed = [value] if is_transfer(value) else []
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in MUTATORS:
                changed = [value]
            case _:
                continue
        flat = [n for c in changed for n in (c.elts if isinstance(c, ast.Tuple) else [c])]
        lines += [node.lineno for each in flat if transfer_of(each) is not None]
    return lines


def is_transfer(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "transfer"


def test_only_kv_transfer_writes_transfer_state() -> None:
    writers = {
        (path.relative_to(ROOT).as_posix(), line)
        for path in (ROOT / "engine").rglob("*.py")
        if path.parent.name != "kv_transfer"
        for line in writes_to_transfers(ast.parse(path.read_text()))
    }
    # The only write outside is the group's creation of its state.
    assert {path for path, _ in writers} == {"engine/groups/group.py"}
    assert len(writers) == 1


@pytest.mark.parametrize(
    "code",
    [
        "group.transfer.may_load = False",
        "group.transfer.num_saved += 1",
        "a, group.transfer.load_job = None, 1",
        "group.transfer.save_times.append((0, 1))",
        "group.transfer.pending_saves[3] = 1",
        "del group.transfer.pending_saves[3]",
        "state = group.transfer",
        "(state := group.transfer)",
    ],
)
def test_writes_are_recognized(code: str) -> None:
    assert writes_to_transfers(ast.parse(code)) == [1]


def test_reads_are_not_writes() -> None:
    code = "end = max(group.transfer.num_saved, group.transfer.pending_saves.get(1, 0))"
    assert writes_to_transfers(ast.parse(code)) == []


# Metrics of jobs.


class MeasuredScheduler:
    """A scheduler with metrics; the test ends its jobs and sets the time."""

    def __init__(self, role: str) -> None:
        self.driven = DrivenScheduler(with_connector=True, role=role, kv_transfer_timeout_s=50.0)

    def report(self, **results: object) -> None:
        self.driven.scheduler.apply(TransferResults(**results))

    def value(self, *series: str) -> float:
        return self.driven.metrics.snapshot()[0][series]

    def failures(self) -> dict[tuple[str, ...], float]:
        values = self.driven.metrics.snapshot()[0].items()
        return {series[1:]: value for series, value in values if "failures" in series[0] and value}

    def total_s(self, *series: str) -> tuple[int, float]:
        histogram = self.driven.metrics.snapshot()[1][series]
        return sum(histogram.counts), histogram.total


@pytest.fixture
def decode() -> MeasuredScheduler:
    return MeasuredScheduler("decode")


def start_load(decode: MeasuredScheduler) -> int:
    decode.driven.add(handed_over("a"))
    decode.driven.step()
    (load,) = decode.driven.work().loads
    return load.job_id


def start_save(prefill: MeasuredScheduler) -> int:
    prefill.driven.add(request("a", 8))
    prefill.driven.step()
    prefill.driven.answer()
    prefill.driven.step()
    (save,) = prefill.driven.work().saves
    return save.job_id


def test_loads_are_timed_from_start_to_result(decode: MeasuredScheduler) -> None:
    job_id = start_load(decode)
    decode.driven.now = 0.125
    decode.report(loads=(LoadResult(job_id, 3),))
    assert decode.total_s("baton_kv_job_seconds", "load") == (1, 0.125)
    assert decode.failures() == {}


def test_a_failed_load_is_counted_by_its_cause(decode: MeasuredScheduler) -> None:
    decode.report(loads=(LoadResult(start_load(decode), 1, "corrupt"),))
    assert decode.failures() == {("load", "corrupt"): 1}


def test_a_load_in_doubt_is_counted_once_when_that_is_reported(
    decode: MeasuredScheduler,
) -> None:
    job_id = start_load(decode)
    decode.driven.now = 0.125
    decode.report(doubted=(job_id,))
    decode.driven.now = 40.0
    decode.report(loads=(LoadResult(job_id, 0, "failed"),))
    assert decode.total_s("baton_kv_job_seconds", "load") == (1, 0.125)
    assert decode.failures() == {("load", "unavailable"): 1}


def test_a_load_that_is_given_up_is_timed_when_its_result_comes(decode: MeasuredScheduler) -> None:
    job_id = start_load(decode)
    decode.driven.now = 0.5
    decode.driven.scheduler.expire()  # slower than computing
    decode.driven.now = 2.0
    decode.report(loads=(LoadResult(job_id, 3),))
    assert decode.total_s("baton_kv_job_seconds", "load") == (1, 2.0)


def test_lookups_count_keys_requested_and_found(decode: MeasuredScheduler) -> None:
    decode.driven.add(request("a", 13))
    decode.driven.step()
    (lookup,) = decode.driven.work().lookups
    decode.driven.now = 0.5
    decode.report(lookups=(LookupResult(lookup.job_id, 2),))
    assert decode.total_s("baton_kv_lookup_seconds") == (1, 0.5)
    assert decode.value("baton_kv_lookup_objects") == 3
    assert decode.value("baton_kv_lookup_hits") == 2


def test_a_cancelled_lookup_is_not_counted_with_or_without_a_result(
    decode: MeasuredScheduler,
) -> None:
    decode.driven.add(request("a", 13), request("b", 13, first_token=2))
    decode.driven.step()
    first, _ = decode.driven.work().lookups
    outputs = decode.driven.scheduler.abort(["a", "b"])
    assert [output.finish_reason for output in outputs] == [FinishReason.ABORTED] * 2
    decode.report(lookups=(LookupResult(first.job_id, 1),))
    assert decode.total_s("baton_kv_lookup_seconds") == (0, 0.0)


def test_the_time_of_a_save_excludes_its_wait_for_its_step() -> None:
    prefill = MeasuredScheduler("prefill")
    job_id = start_save(prefill)
    prefill.driven.now = 5.0
    prefill.report(saves=(SaveResult(job_id, committed=True, seconds=1.0, waited=3.0),))
    assert prefill.total_s("baton_kv_job_seconds", "save") == (1, 2.0)
    assert prefill.failures() == {}


@pytest.mark.parametrize(("error", "cause"), [("unavailable", "unavailable"), ("", "failed")])
def test_a_save_that_does_not_commit_is_a_failure(error: str, cause: str) -> None:
    prefill = MeasuredScheduler("prefill")
    prefill.report(saves=(SaveResult(start_save(prefill), committed=False, error=error),))
    assert prefill.failures() == {("save", cause): 1}


def test_no_intervals_take_no_time():
    assert overlap([], 5.0) == (0.0, 0.0)


def test_time_in_which_several_intervals_overlap_counts_once():
    assert overlap([(0.0, 4.0), (1.0, 2.0), (3.0, 6.0), (8.0, 9.0)], 100.0) == (7.0, 7.0)


def test_only_time_before_the_given_moment_is_hidden():
    assert overlap([(0.0, 2.0), (3.0, 7.0), (8.0, 9.0)], 5.0) == pytest.approx((7.0, 4.0))


@given(INTERVALS, MOMENTS)
def test_overlap_equals_a_count_of_seconds(intervals, until):
    seconds = {s for start, end in intervals for s in range(start, end)}
    assert overlap(intervals, until) == (len(seconds), sum(s < until for s in seconds))
