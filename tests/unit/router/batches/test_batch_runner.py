"""Batches over an API that answers as tests say."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import MappingProxyType

import pytest

from router.batches import run as run_module
from router.batches import runner as runner_module
from router.batches.folder import BatchFolder, key_of
from router.batches.requests import BATCH_PRIORITY
from router.batches.run import BatchRun
from router.batches.runner import Answer, BatchRunner
from tests.support.batches import ENDPOINT, add_batch, ids_of, results_of
from tests.support.clock import Clock
from tests.support.conditions import until

OK = Answer(200, b'{"object": "text_completion"}')
BUSY = Answer(429, b"{}", is_busy=True, retry_after_s=9.0)
EMPTY: Mapping[int, Sequence[Answer]] = MappingProxyType({})


class Api:
    """Answers calls; those after the first `num_free` wait until they are let go.

    Args:
        answers: by the number of a request's line, before it has a good one.
        num_free: how many calls do not wait.
    """

    def __init__(
        self, answers: Mapping[int, Sequence[Answer]] = EMPTY, num_free: int = 10**9
    ) -> None:
        self.answers = {number: list(those) for number, those in answers.items()}
        self.calls: list[tuple[str, str, dict]] = []
        self.request_ids: list[str] = []
        self.timeouts_s: list[float] = []
        self.num_running = self.most_running = 0
        self.num_free = num_free
        self.may_go = asyncio.Event()

    async def __call__(self, tenant, path, body, request_id, timeout_s) -> Answer:
        self.calls.append((tenant, path, json.loads(body)))
        self.request_ids.append(request_id)
        self.timeouts_s.append(timeout_s)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            if len(self.calls) > self.num_free:
                await self.may_go.wait()
            await asyncio.sleep(0)
            left = self.answers.get(int(request_id.rpartition("-")[2]))
            return left.pop(0) if left else OK
        finally:
            self.num_running -= 1


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def folder(tmp_path, clock):
    return BatchFolder(tmp_path / "batches", clock)


@asynccontextmanager
async def running(folder, api, limit=4):
    runner = BatchRunner(folder, api, lambda: limit, 4096, interval_s=0.02)
    task = asyncio.create_task(runner.run())
    try:
        async with asyncio.timeout(30):
            yield runner
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def finished(folder, batch, status):
    await until(lambda: folder.batch(batch.tenant, batch.id).status == status)
    return folder.batch(batch.tenant, batch.id)


async def test_requests_run_for_their_client_at_low_priority_and_few_at_once(folder):
    api = Api()
    batch = add_batch(folder, [str(i) for i in range(40)], "tenant")
    async with running(folder, api):
        record = await finished(folder, batch, "completed")
    assert {(tenant, path) for tenant, path, _ in api.calls} == {("tenant", ENDPOINT)}
    assert {body["priority"] for *_, body in api.calls} == {BATCH_PRIORITY}
    assert api.most_running == 4
    assert (record.total, record.completed, record.failed) == (40, 40, 0)
    answers, errors = results_of(folder, batch)
    assert sorted(map(int, ids_of(answers))) == list(range(40))
    assert answers[0]["response"]["body"] == {"object": "text_completion"}
    assert not errors
    assert {"in_progress_at", "finalizing_at", "completed_at"} <= record.times.keys()


async def test_a_busy_api_is_asked_again_and_an_error_stays(folder, monkeypatch):
    monkeypatch.setattr(runner_module, "_MIN_WAIT_S", 0.001)
    monkeypatch.setattr(runner_module, "_MAX_WAIT_S", 0.001)
    lost, refused = Answer(503, b"{}"), Answer(400, b'{"error": {"param": "n"}}')
    api = Api({1: [*[BUSY] * 5, refused], 2: [lost] * 3, 3: [lost]})
    batch = add_batch(folder, ["refused", "lost", "found"])
    async with running(folder, api, limit=1):
        record = await finished(folder, batch, "completed")
    answers, errors = results_of(folder, batch)
    assert ids_of(answers) == ["found"]
    responses = {each["custom_id"]: each["response"] for each in errors}
    assert {name: each["status_code"] for name, each in responses.items()} == {
        "refused": 400,
        "lost": 503,
    }
    assert responses["refused"]["body"] == {"error": {"param": "n"}}
    assert (record.completed, record.failed) == (1, 2)


@pytest.mark.parametrize("status", ["cancelled", "expired"])
async def test_what_has_no_answer_when_a_batch_ends_gets_an_error(folder, clock, status):
    api = Api(num_free=2)
    batch = add_batch(folder, ["a", "b", "c", "d"])
    async with running(folder, api):
        await until(lambda: folder.batch("", batch.id).completed == 2)
        assert folder.batch("", batch.id).status == "in_progress"
        if status == "expired":
            clock.now += 3600
        else:
            assert folder.cancel_batch("", batch.id).status == "cancelling"
        record = await finished(folder, batch, status)
    assert api.num_running == 0
    answers, errors = results_of(folder, batch)
    assert {each["error"]["code"] for each in errors} == {f"batch_{status}"}
    assert sorted(ids_of(answers) + ids_of(errors)) == ["a", "b", "c", "d"]
    assert (record.completed, record.failed) == (2, 2)
    if status == "cancelled":
        assert {"cancelling_at", "cancelled_at"} <= record.times.keys()


@pytest.mark.parametrize("status", ["cancelled", "expired"])
async def test_a_batch_that_ends_while_it_waits_takes_no_place(folder, clock, monkeypatch, status):
    monkeypatch.setattr(runner_module, "_MAX_BATCHES", 1)
    api = Api(num_free=0)
    first = add_batch(folder, ["first"], window_s=7200)
    async with running(folder, api):
        await until(lambda: api.num_running)
        waiting = [add_batch(folder, ["a", "b"]) for _ in range(6)]
        for batch in waiting:
            if status == "cancelled":
                folder.cancel_batch("", batch.id)
        clock.now += 3600 * (status == "expired")
        records = [await finished(folder, batch, status) for batch in waiting]
        assert folder.batch("", first.id).status == "in_progress"
        api.may_go.set()
        await finished(folder, first, "completed")
    assert len(api.calls) == 1
    assert {(record.total, record.failed) for record in records} == {(2, 2)}


async def test_a_batch_that_is_in_the_queue_twice_runs_once_at_a_time(folder, monkeypatch):
    """A sweep between its record and its marker makes a second one."""
    runs, most = 0, 0
    run_batch = BatchRunner._run_batch

    async def counted(runner, queued):
        nonlocal runs, most
        runs, most = runs + 1, max(runs + 1, most)
        try:
            await run_batch(runner, queued)
        finally:
            runs -= 1

    monkeypatch.setattr(BatchRunner, "_run_batch", counted)
    monkeypatch.setattr(runner_module, "_MAX_BATCHES", 0)  # it ends while it waits
    batch = add_batch(folder, ["a", "b"])
    folder._enqueue(key_of(""), batch)
    folder.cancel_batch("", batch.id)
    assert len(folder.queue()) == 2
    async with running(folder, Api()):
        await finished(folder, batch, "cancelled")
        await until(lambda: not folder.queue())
    assert most == 1
    assert sorted(ids_of(results_of(folder, batch)[1])) == ["a", "b"]


async def test_a_request_has_the_time_of_its_batch(folder, clock):
    api = Api(num_free=1)
    batch = add_batch(folder, ["first", "second"], window_s=7200)
    async with running(folder, api, limit=1):
        await until(lambda: len(api.calls) == 2)
        assert api.timeouts_s[0] == 7200 + runner_module._SLACK_S
        clock.now += 7200
        await finished(folder, batch, "expired")  # by the window, before any deadline


async def test_a_second_process_waits_and_goes_on_where_the_first_has_ended(
    folder, tmp_path, clock, monkeypatch
):
    first, second, tries = Api(num_free=3), Api(), []
    locks = runner_module._locks
    monkeypatch.setattr(
        runner_module, "_locks", lambda lock: tries.append(locks(lock)) or tries[-1]
    )
    batch = add_batch(folder, [str(i) for i in range(20)])
    async with AsyncExitStack() as stack:
        async with running(folder, first):
            await until(lambda: folder.batch("", batch.id).completed == 3)
            await stack.enter_async_context(
                running(BatchFolder(tmp_path / "batches", clock), second)
            )
            await until(lambda: tries.count(False) >= 3)
            assert not second.calls
        await finished(folder, batch, "completed")
    assert tries.count(True) == 2
    assert len(second.calls) == 17
    answers, _ = results_of(folder, batch)
    assert sorted(map(int, ids_of(answers))) == list(range(20))


async def test_batches_take_turns(folder):
    api = Api(num_free=1)
    long = add_batch(folder, [f"long-{i}" for i in range(200)])
    short = add_batch(folder, ["short-0", "short-1"])
    async with running(folder, api, limit=1):
        await finished(folder, short, "in_progress")
        api.may_go.set()
        await finished(folder, short, "completed")
        await finished(folder, long, "completed")
    places = [i for i, request_id in enumerate(api.request_ids) if short.id in request_id]
    assert len(places) == 2
    assert places[1] < 100


class RefusesOne(Api):
    """Has no answers for a client."""

    async def __call__(self, tenant, *args) -> Answer:
        answer = await super().__call__(tenant, *args)
        return BUSY if tenant == "refused" else answer


async def test_a_batch_that_is_refused_for_long_leaves_its_places_to_others(folder, monkeypatch):
    monkeypatch.setattr(runner_module, "_MIN_WAIT_S", 0.001)
    monkeypatch.setattr(runner_module, "_MAX_WAIT_S", 0.001)
    api = RefusesOne()
    refused = add_batch(folder, [str(i) for i in range(20)], "refused")
    async with running(folder, api, limit=2):
        await until(lambda: len(api.calls) > 20)
        served = add_batch(folder, [str(i) for i in range(20)], "served")
        await finished(folder, served, "completed")
    assert folder.batch("refused", refused.id).status == "in_progress"
    tried = {request_id for request_id in api.request_ids if refused.id in request_id}
    assert len(tried) <= 8  # those that rest are in memory


async def test_an_input_that_is_wrong_fails_the_batch(folder):
    bad = add_batch(folder, ["a", "a"])
    async with running(folder, api := Api()):
        record = await finished(folder, bad, "failed")
    assert record.errors[0]["code"] == "duplicate_custom_id"
    assert record.body()["errors"]["data"][0]["line"] == 2
    assert not api.calls
    assert not folder.queue()


def remove(path) -> None:
    path.unlink()


def make_unreadable(path) -> None:
    path.unlink()
    path.mkdir()  # a file without permissions can be read by root


def change(path) -> None:
    path.write_bytes(b"{\n" * 3)


def empty(path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("lose", "reason", "is_begun", "end"),
    [
        (remove, "No such file or directory", False, None),
        (make_unreadable, "Is a directory", False, None),
        (remove, "No such file or directory", True, None),
        (remove, "No such file or directory", True, "cancelled"),
        (make_unreadable, "Is a directory", True, "expired"),
        (change, "line 1 has changed: the line is not JSON", True, None),
        (empty, "2 of its requests are gone", True, None),
    ],
)
async def test_a_batch_whose_input_is_lost_fails_once(folder, clock, lose, reason, is_begun, end):
    """It keeps the answers that it has, and ends whatever the client wants meanwhile."""
    batch = add_batch(folder, ["a", "b", "c"])
    if is_begun:
        run = BatchRun(folder, folder.queue()[0], 4096)
        assert run.begin()
        run.add_answer("a", 200, "id", b"{}")
        run.close()
    lose(folder.content_path(key_of(""), batch.input_file_id))
    if end == "cancelled":
        folder.cancel_batch("", batch.id)
    elif end == "expired":
        clock.now += 3600
    async with running(folder, api := Api()):
        record = await finished(folder, batch, "failed")
    assert not api.calls
    assert not folder.queue()
    (error,) = record.errors
    assert error["message"].startswith(f"the input file {batch.input_file_id} cannot be read: ")
    assert reason in error["message"]
    assert ids_of(results_of(folder, batch)[0]) == ["a"] * is_begun
    assert (record.completed, record.failed, record.has_output) == (is_begun, 0, is_begun)


async def test_a_batch_with_all_answers_needs_no_input(folder):
    """It was interrupted before its end was written."""
    batch = add_batch(folder, ["a", "b"])
    run = BatchRun(folder, folder.queue()[0], 4096)
    assert run.begin()
    for custom_id in ("a", "b"):
        run.add_answer(custom_id, 200, "id", b"{}")
    run.close()
    remove(folder.content_path(key_of(""), batch.input_file_id))
    async with running(folder, api := Api()):
        record = await finished(folder, batch, "completed")
    assert not api.calls
    assert (record.completed, record.failed, record.errors) == (2, 0, ())


async def test_an_input_that_the_disk_does_not_give_is_tried_again_until_the_batch_expires(
    folder, clock, monkeypatch
):
    tries = []

    def fail(*args):
        tries.append(args)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(runner_module, "_TRY_AGAIN_S", 0.02)
    monkeypatch.setattr(run_module, "check_input", fail)
    batch = add_batch(folder, ["a"])
    async with running(folder, Api()):
        await until(lambda: len(tries) >= 3)
        assert folder.batch("", batch.id).status == "validating"
        clock.now += 3600
        record = await finished(folder, batch, "failed")
    assert [error["code"] for error in record.errors] == ["file_not_readable"]
    assert not folder.queue()


async def test_a_malformed_record_stops_no_other_batch(folder, tmp_path):
    bad, good = add_batch(folder, ["a"]), add_batch(folder, ["b"])
    (path,) = (tmp_path / "batches" / "tenants").rglob(f"{bad.id}.json")
    path.write_text("{")
    async with running(folder, Api()):
        await finished(folder, good, "completed")


async def test_a_lock_that_fails_is_tried_again(folder, monkeypatch):
    monkeypatch.setattr(runner_module, "_TRY_AGAIN_S", 0.02)
    locks = runner_module._locks
    failures = iter([OSError(37, "No locks available")])

    def fail_once(lock):
        if (error := next(failures, None)) is not None:
            raise error
        return locks(lock)

    monkeypatch.setattr(runner_module, "_locks", fail_once)
    batch = add_batch(folder, ["a"])
    async with running(folder, Api()):
        await finished(folder, batch, "completed")


async def test_a_full_disk_is_tried_again(folder, monkeypatch):
    monkeypatch.setattr(runner_module, "_TRY_AGAIN_S", 0.02)
    batch = add_batch(folder, ["a", "b"])
    write = runner_module.BatchRun.add_answer
    failures = iter([OSError(28, "No space left on device")])

    def add_answer(*args):
        if (error := next(failures, None)) is not None:
            raise error
        write(*args)

    monkeypatch.setattr(runner_module.BatchRun, "add_answer", add_answer)
    async with running(folder, Api(), limit=1):
        await finished(folder, batch, "completed")
    assert sorted(ids_of(results_of(folder, batch)[0])) == ["a", "b"]
