"""The benchmark of two tiers against one engine: turns, counted rounds, ratios, refusals."""

from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from baton.common.errors import UnavailableError
from benchmarks import split_command
from benchmarks.cluster import ServedCluster
from benchmarks.peers.cases import build_cases, requests_of_round
from engine.config import EngineConfig

ROUNDS = [requests_of_round(build_cases(100)["mixed"], number, 100) for number in range(3)]


class FakeClient:
    """Streams the requested tokens except `missing` of them; records the start of each prompt."""

    def __init__(self, name, log, missing=0):
        self._name, self._log, self._missing = name, log, missing

    async def stream(self, prompt, params):
        self._log.append((self._name, tuple(prompt[:8])))
        for _ in range(params.max_tokens - self._missing):
            yield SimpleNamespace(token_ids=(1,), timings=None, usage=None)


def write_nothing(line):
    pass


async def test_clusters_take_turns_and_the_first_round_does_not_count():
    log = []
    clusters = {name: ServedCluster(FakeClient(name, log), ()) for name in ("whole", "split")}
    rates = await split_command._take_turns(clusters, ROUNDS, write_nothing)
    assert {name: len(values) for name, values in rates.items()} == {"whole": 2, "split": 2}
    assert [log[index][0] for index in range(0, len(log), 48)] == [
        *("whole", "split"),
        *("split", "whole"),
        *("whole", "split"),
    ]
    # Both clusters answer the same prompts within a round; each round has new prompts.
    assert len(log) == 6 * 48
    assert len({prompt for _, prompt in log}) == 3 * 48


async def test_a_stream_that_lacks_tokens_is_refused():
    clusters = {"whole": ServedCluster(FakeClient("whole", [], missing=1), ())}
    with pytest.raises(UnavailableError, match="were asked for"):
        await split_command._take_turns(clusters, ROUNDS[:1], write_nothing)


async def test_the_ratio_is_computed_from_medians(monkeypatch):
    async def rates(*arguments):
        return {"whole": [10.0, 30.0, 20.0], "split": [9.0, 18.0, 99.0]}

    @asynccontextmanager
    async def no_cluster(engine, *, num_prefill):
        yield None

    monkeypatch.setattr(split_command, "_take_turns", rates)
    monkeypatch.setattr(split_command, "served_cluster", no_cluster)
    result = await split_command.measure_rates(EngineConfig(model="none"), ROUNDS, write_nothing)
    assert (result["whole"], result["split"], result["split_to_whole"]) == (20.0, 18.0, 0.9)
