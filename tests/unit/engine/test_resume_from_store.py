"""A request whose decode engine is lost continues on another one with the KV in the store."""

import pytest

from engine.config import EngineConfig
from engine.request import EngineRequest
from kvstore.jobs import LookupJob
from tests.support.checked_engine import CheckedEngine, CheckedRequest
from tests.support.engine_work import has_work
from tests.support.fake_connector import Store
from tests.support.fake_model import fake_info
from tests.support.reference_decoding import candidates, progress_of
from tests.support.requests import changed, engine_request

BLOCK = 4
INFO = fake_info(BLOCK, 256)
PROMPT = (0, 0, 1) * 10
NUM_BLOCKS = 128
INTERVAL = int(EngineConfig(model="any").kv_publish)


def engine(store: Store, role: str) -> CheckedEngine:
    return CheckedEngine(INFO, NUM_BLOCKS, store=store, role=role, kv_publish=str(INTERVAL))


def run(target: CheckedEngine, num_tokens: int | None = None) -> None:
    """Runs an engine until its request has as many tokens, or until it has nothing to do."""
    while has_work(target.core):
        target.worker.end_all()
        target.step()
        live = next(iter(target.live.values()), None)
        if live and num_tokens and len(live.received.get(0, ())) >= num_tokens:
            break
    target.worker.end_all()


def resumed(request: EngineRequest, *num_tokens: int) -> EngineRequest:
    """Returns the request with the first tokens of each of its candidates."""
    expected = candidates(request, INFO.max_model_len)
    progress = tuple(
        progress_of(request, index, tuple(expected[index].token_ids[:count]))
        for index, count in enumerate(num_tokens)
    )
    return changed(request, progress=progress)


def num_computed(target: CheckedEngine) -> int:
    """Returns how many tokens an engine has computed so far."""
    return int(target.core.metrics.snapshot().histograms["baton_engine_step_tokens",].total)


@pytest.mark.parametrize("num_generated", [3, 40, 63, 100])
def test_a_lost_request_computes_at_most_what_was_not_published(num_generated: int) -> None:
    store: Store = {}
    prefill = engine(store, "prefill")
    first, second = (engine(store, "decode") for _ in range(2))
    request = engine_request("a", prompt_token_ids=PROMPT, max_tokens=120)
    prefill.add(CheckedRequest.of(request, INFO))
    run(prefill)
    ((_, _, handoff),) = prefill.handed_over
    started = changed(resumed(request, 1), handoff=handoff)
    first.add(CheckedRequest.of(started, INFO))
    run(first, num_generated)  # here it is lost
    prefill.core.scheduler.release_handoff(handoff.handoff_id)
    prefill.step()  # deletes the tail

    num_published = BLOCK * len(store)
    lost = resumed(request, num_generated)
    second.add(CheckedRequest.of(lost, INFO))
    run(second, num_generated + 1)

    num_known = len(PROMPT) + num_generated
    assert num_known - num_published <= (INTERVAL + 1) * BLOCK
    assert num_computed(second) == num_known - num_published
    run(second)
    assert not second.live, "all its tokens are right"


def test_the_candidates_of_a_lost_request_load_what_they_share() -> None:
    store: Store = {}
    first, second = (engine(store, "decode") for _ in range(2))
    request = engine_request(
        "a", prompt_token_ids=PROMPT, max_tokens=60, n=2, temperature=1.0, seed=3
    )
    first.add(CheckedRequest.of(request, INFO))
    run(first, 40)
    assert len(store) > len(PROMPT) // BLOCK

    second.add(CheckedRequest.of(resumed(request, 40, 40), INFO))
    run(second, 41)
    assert num_computed(second) <= 2 * 40 + len(PROMPT) % BLOCK + 2
    run(second)
    assert not second.live


def test_a_prompt_that_is_cached_is_not_looked_up() -> None:
    store: Store = {}
    decode = engine(store, "decode")
    request = engine_request("a", prompt_token_ids=PROMPT, max_tokens=2)
    for name, num_lookups in (("a", 1), ("b", 0)):
        decode.add(CheckedRequest.of(changed(request, request_id=name), INFO))
        decode.step()
        assert sum(isinstance(job, LookupJob) for job in decode.worker.pending) == num_lookups
        run(decode)
    assert not decode.live
