"""Requests of all kinds for engines of several ranks, and the ranks' processes."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from baton.common.request.structured_outputs import StructuredOutputs
from baton.common.security.cluster import ClusterSecurity
from engine.loop.core import EngineCore
from engine.request import EngineRequest
from engine.runtime.ranks.processes import RankProcesses
from tests.support.checkpoints import prompt_of, reference_greedy, tiny_checkpoint
from tests.support.rank_hosts import TOKEN
from tests.support.real_engines import SplitRun, build_core, run_all, tokens_of
from tests.support.requests import engine_request

GREEDY_LENGTHS = (1, 5, 33, 60)
NUM_TOKENS = 10


def all_kinds() -> list[EngineRequest]:
    """Greedy requests, and one of each other kind; some prompts begin alike."""
    greedy = [
        engine_request(str(length), tuple(prompt_of(length)), max_tokens=NUM_TOKENS)
        for length in GREEDY_LENGTHS
    ]
    others: list[dict[str, object]] = [
        {"temperature": 1.0, "seed": 7, "n": 3, "top_k": 50},
        {"beam_width": 3, "n": 2},
        {"temperature": 0.8, "seed": 1, "best_of": 2, "repetition_penalty": 1.3},
        {"logprobs": 2, "prompt_logprobs": 3},
        {"structured_outputs": StructuredOutputs(regex="[a-c]{4,8}")},
    ]
    return greedy + [
        engine_request(f"o{index}", tuple(prompt_of(20 + 9 * index)), max_tokens=8, **options)
        for index, options in enumerate(others)
    ]


def tokens(variant: str, **flags: object) -> dict[tuple[str, int], list[int]]:
    """Returns the tokens of each candidate of each request."""
    with closing(build_core(tiny_checkpoint(variant), "both", **flags)) as core:
        outputs = run_all(core, all_kinds())
    assert not [
        output
        for of_request in outputs.values()
        for output in of_request
        if output.error is not None
    ]
    return {
        (request_id, index): tokens_of(of_request, index)
        for request_id, of_request in outputs.items()
        for index in range(3)
    }


def check_greedy(variant: str, drawn: dict[tuple[str, int], list[int]]) -> None:
    """Checks the tokens of greedy requests against `transformers`."""
    for length in GREEDY_LENGTHS:
        expected = reference_greedy(tiny_checkpoint(variant), prompt_of(length), NUM_TOKENS)
        assert drawn[str(length), 0] == expected


@contextmanager
def tiers(
    path: Path, prefill: dict[str, object], decode: dict[str, object], **common: object
) -> Iterator[SplitRun]:
    """Yields a prefill engine and a decode engine that recomputes nothing."""
    common["security"] = ClusterSecurity(token=TOKEN)
    flags_of_roles = (
        ("prefill", prefill),
        ("decode", {**decode, "kv_load_failure_policy": "fail"}),
    )
    with ExitStack() as opened:
        cores = [
            opened.enter_context(closing(build_core(path, role, **common, **flags)))
            for role, flags in flags_of_roles
        ]
        yield SplitRun(*cores)


def check_handed_over(path: Path, split: SplitRun) -> None:
    """Sends greedy requests through both tiers, and checks tokens and that all KV was loaded."""
    prompts = [tuple(prompt_of(length, seed=length)) for length in (1, 8, 9, 31, 43)]
    split.run(
        [
            engine_request(str(index), prompt, max_tokens=NUM_TOKENS)
            for index, prompt in enumerate(prompts)
        ]
    )
    for request in split.handed.values():
        outputs, prompt = split.outputs[request.spec.request_id], request.spec.prompt_token_ids
        drawn = [*request.progress[0].output_token_ids, *tokens_of(outputs)]
        assert drawn == reference_greedy(path, prompt, NUM_TOKENS)
        assert outputs[0].cached_tokens == len(prompt)
    for core in (split._prefill, split._decode):
        for rank in range(1, core.config.num_ranks):
            wait_for_report(core, rank)


def wait_for_report(core: EngineCore, rank: int) -> None:
    """Waits until metrics have what a rank reports after its first step."""
    give_up_at = time.monotonic() + 30
    while ("baton_engine_rank_cpu_seconds", str(rank)) not in core.metrics.snapshot().values:
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def pids_of(core: EngineCore) -> list[int]:
    """Returns the process ids of the other ranks."""
    ranks = core._runner._ranks
    assert isinstance(ranks, RankProcesses)
    return ranks._children.pids


def is_running(pid: int) -> bool:
    """Whether a process is there."""
    return Path(f"/proc/{pid}").exists()


def wait_until_ended(pid: int) -> None:
    """Waits for the end of a process."""
    give_up_at = time.monotonic() + 30
    while is_running(pid):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
