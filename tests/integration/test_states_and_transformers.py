"""States of recurrent layers never change a token: greedy, float32, compared with `transformers`,
with prompts that begin at states which others have left.
"""

from dataclasses import replace
from functools import cache

import pytest

from baton.common.errors import ConfigurationError
from engine.request import CandidateProgress
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.real_engines import engine, run_all, tokens_of
from tests.support.requests import engine_request
from tests.support.runner_kinds import use_kind

BLOCK = 8
INTERVAL = 16
NUM_TOKENS = 9
PROMPT = tuple(prompt_of(70, seed=1))
OTHER = tuple(prompt_of(70, seed=2))
# Where the second prompt leaves the first: around ends of blocks, intervals and the first prompt.
PLACES = (1, 9, 33, 63, 64, 65)


@cache
def _reference(prompt: tuple[int, ...]) -> list[int]:
    return reference_greedy(tiny_checkpoint("lfm2"), list(prompt), NUM_TOKENS)


def _check(core, prompts) -> None:
    requests = [
        engine_request(request_id=str(i), prompt_token_ids=prompt, max_tokens=NUM_TOKENS)
        for i, prompt in enumerate(prompts)
    ]
    outputs = run_all(core, requests)
    for i, prompt in enumerate(prompts):
        assert tokens_of(outputs[str(i)]) == _reference(prompt), len(prompt)
    pool = core.scheduler.kv.pool
    assert pool.num_free_slots == pool.num_slots


@pytest.mark.parametrize("overlapped", [False, True])
def test_prompts_that_share_a_beginning_use_its_states(overlapped: bool) -> None:
    flags = {"block_size": BLOCK, "state_interval": INTERVAL, "max_num_batched_tokens": 24}
    with engine("lfm2", **flags, async_scheduling=overlapped) as core:
        kv = core.scheduler.kv
        for place in PLACES:
            core.scheduler.reset_prefix_cache()
            _check(core, [PROMPT])
            num_hits = kv.num_hits
            _check(core, [PROMPT[:place] + OTHER[place:]])
            assert (kv.num_hits - num_hits) % BLOCK == 0
            # Only the end of a prompt is kept, as it is shorter than what is between two states.
            assert kv.num_hits - num_hits == (64 if place >= 64 else 0)
        # The next turn of a chat begins where the answer before was kept last.
        answer = tuple(_reference(PROMPT))
        num_hits = kv.num_hits
        _check(core, [PROMPT + answer + OTHER[:9]])
        assert kv.num_hits - num_hits >= 64


def test_prompts_that_end_between_two_states_begin_at_the_first() -> None:
    long, other = prompt_of(1100, seed=3), prompt_of(1100, seed=4)
    with engine("lfm2", block_size=BLOCK, max_model_len=1200) as core:
        kv = core.scheduler.kv
        for place, num_cached in ((511, 0), (513, 512), (700, 512), (1025, 1024), (1099, 1096)):
            core.scheduler.reset_prefix_cache()
            _check(core, [tuple(long)])
            num_hits = kv.num_hits
            _check(core, [tuple(long[:place] + other[place:])])
            assert kv.num_hits - num_hits == num_cached


def test_steps_of_a_device_equal_transformers(monkeypatch) -> None:
    use_kind("device, eager", monkeypatch)
    with engine("lfm2", block_size=BLOCK, state_interval=INTERVAL) as core:
        for _ in range(2):
            _check(core, [PROMPT[:length] for length in (1, 8, 33, 64)])


@pytest.mark.parametrize("num_slots", [1, 2, 9])
def test_few_slots_only_cost_time(num_slots: int) -> None:
    prompts = [PROMPT[:length] for length in (3, 8, 16, 33, 64, 65)] + [OTHER[:40]]
    flags = {"num_state_slots": num_slots, "state_interval": BLOCK, "block_size": BLOCK}
    with engine("lfm2", **flags) as core:
        for _ in range(2):
            _check(core, prompts)
        assert core.scheduler.load().num_preemptions == 0


@pytest.mark.parametrize("variant", ["lfm2", "qwen3_5", "qwen3_next"])
def test_requests_are_resumed_at_every_token(variant: str) -> None:
    """First on an engine that knows nothing of them, then on one with states of all of them."""
    prompt, num_tokens = PROMPT[:21], 14
    expected = reference_greedy(tiny_checkpoint(variant), list(prompt), num_tokens)
    request = engine_request(request_id="0", prompt_token_ids=prompt, max_tokens=num_tokens)
    begun = [request]
    for count in range(1, num_tokens):
        progress = (CandidateProgress(0, tuple(expected[:count])),)
        spec = replace(request.spec, request_id=str(count))
        begun.append(replace(request, spec=spec, progress=progress))
    with engine(variant, block_size=BLOCK, state_interval=BLOCK) as core:
        for _ in range(2):
            outputs = run_all(core, begun)
            for count in range(num_tokens):
                assert tokens_of(outputs[str(count)]) == expected[count:]
        assert core.scheduler.kv.num_hits > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"state_interval": 12}, "--state-interval is 12; it must be a multiple of --block-size 8"),
        ({"num_state_slots": 0}, "--num-state-slots is 0; it must be >= 1"),
    ],
)
def test_what_does_not_work_with_states_is_refused(flags, message) -> None:
    with pytest.raises(ConfigurationError, match=message), engine("lfm2", **flags):
        pass
