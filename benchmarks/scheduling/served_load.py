"""Serves requests through a scheduler and a null runner, and looks on after every `schedule`."""

import random
from collections.abc import Callable, Iterable

from benchmarks.scheduling.null_runner import NullRunner
from engine.group import GroupState, SequenceGroup
from engine.request import EngineRequest, RequestOutput
from engine.schedule.scheduler import Scheduler

__all__ = ["random_prompt", "running_groups", "serve"]

_VOCAB_SIZE = 1 << 15


def random_prompt(
    draw: random.Random, num_tokens: int, vocab_size: int = _VOCAB_SIZE
) -> tuple[int, ...]:
    """A prompt that shares no block with others."""
    return tuple(draw.choices(range(vocab_size), k=num_tokens))


def running_groups(scheduler: Scheduler) -> list[SequenceGroup]:
    """The requests that run. A benchmark may look where an engine may not."""
    groups = scheduler._groups.values()
    return [group for group in groups if group.state is GroupState.RUNNING]


def serve(
    scheduler: Scheduler,
    runner: NullRunner,
    requests: Iterable[EngineRequest],
    look: Callable[[], None],
) -> dict[str, list[RequestOutput]]:
    """Serves all requests, which wait from the start; returns what each heard.

    Args:
        scheduler: empty.
        runner: answers.
        requests: in order of arrival.
        look: called between `schedule` and `commit`, while any request still
            waits: so the batch is as full as it gets.

    Raises:
        RuntimeError: blocks are left over.
    """
    outputs: dict[str, list[RequestOutput]] = {}
    for request in requests:
        scheduler.add(request)
    while scheduler.num_unfinished:
        batch = scheduler.schedule()
        if batch is None:
            raise RuntimeError("requests are unfinished, and nothing can run")
        if scheduler.load().num_waiting:
            look()
        for output in scheduler.commit(batch, runner.execute(batch)):
            outputs.setdefault(output.request_id, []).append(output)
    scheduler.check()
    if scheduler.kv.pool.num_free != scheduler.kv.pool.num_blocks:
        raise RuntimeError("blocks are left over")
    return outputs
