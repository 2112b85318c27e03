"""Equal prompts under two cache salts share nothing that counts or times can show."""

import json
import math
import random
import time
import urllib.request
from collections.abc import Iterator, Sequence

import pytest

from tests.support.serve_process import ServedCluster, running_serve

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]

PAIRS = 30
FALSE_ALARM_Z = 4.5
"""Two sides of a normal distribution have 7e-6 beyond it."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[ServedCluster]:
    with running_serve() as served:
        yield served


def prompt_of(draw: random.Random) -> list[int]:
    return [draw.randrange(100, 400) for _ in range(400)]


def first_token(cluster: ServedCluster, prompt: list[int], salt: str) -> tuple[float, int]:
    """Seconds to the first token of an answer, and the prompt tokens found in a cache."""
    body = {
        "prompt": prompt,
        "cache_salt": salt,
        "max_tokens": 2,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{cluster.url}/completions", json.dumps(body).encode(), headers
    )
    start = time.perf_counter()
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.readline()
        seconds = time.perf_counter() - start
        events = [line[6:] for line in answer if line.startswith(b"data: {")]
    usage = json.loads(events[-1])["usage"]
    return seconds, (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def rank_sum_z(first: Sequence[float], second: Sequence[float]) -> float:
    """The normal score of the rank-sum test; negative if values of `first` are smaller.

    Mann and Whitney, "On a test of whether one of two random variables is stochastically larger
    than the other", 1947. Times are not equal, so that ties need no correction.
    """
    n, m = len(first), len(second)
    wins = sum(a > b for a in first for b in second)
    return (wins - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12)


def test_another_salt_is_as_slow_as_a_new_prompt(cluster):
    draw = random.Random(7)
    times: dict[str, list[float]] = {"same salt": [], "other salt": [], "new prompt": []}
    for _ in range(PAIRS):
        known, fresh = prompt_of(draw), prompt_of(draw)
        first_token(cluster, known, "a")
        cases = {"other salt": (known, "b"), "new prompt": (fresh, "b"), "same salt": (known, "a")}
        for name in draw.sample(list(cases), len(cases)):
            seconds, cached_tokens = first_token(cluster, *cases[name])
            assert (cached_tokens > 0) == (name == "same salt"), name
            times[name].append(seconds)
    assert abs(rank_sum_z(times["other salt"], times["new prompt"])) < FALSE_ALARM_Z
    # The test would see a shared prefix.
    assert rank_sum_z(times["same salt"], times["new prompt"]) < -FALSE_ALARM_Z
