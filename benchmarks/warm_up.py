"""Requests before a run: as long as the run's first ones, of tokens that no cache will find."""

import random
from collections.abc import Sequence

from baton.errors import UnavailableError
from benchmarks.load import LoadLimits, run_load
from benchmarks.request import BenchRequest
from benchmarks.targets.target import Target
from benchmarks.workloads.kind import draw_tokens

__all__ = ["warm_up", "warm_up_requests"]

_SEED = "warm-up"


def warm_up_requests(
    requests: Sequence[BenchRequest], num_warmups: int, vocab_size: int
) -> list[BenchRequest]:
    """Stand-ins of the first `num_warmups` requests, to be sent at once."""
    source = random.Random(_SEED)
    return [
        BenchRequest(
            draw_tokens(source, len(request.prompt_token_ids), vocab_size),
            request.num_output_tokens,
        )
        for request in requests[:num_warmups]
    ]


async def warm_up(
    target: Target,
    limits: LoadLimits,
    requests: Sequence[BenchRequest],
) -> None:
    """Sends the requests and forgets their figures.

    Raises:
        UnavailableError: none of them succeeded; tells why the first one failed.
    """
    records = await run_load(requests, target, limits)
    if records and all(record.error is not None for record in records):
        raise UnavailableError(f"no warm-up request succeeded: {records[0].error}")
