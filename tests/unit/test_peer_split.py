"""Two tiers against one: who is asked when, what counts, and what is refused."""

from types import SimpleNamespace

import pytest

from benchmarks.peers import split
from benchmarks.peers.catalogue import Setting
from benchmarks.peers.peer_messages import PeerError


class FakeClient:
    """Streams the tokens that are asked for, less `missing`; notes each prompt's beginning."""

    def __init__(self, name, log, missing=0):
        self._name, self._log, self._missing = name, log, missing

    async def stream(self, prompt, params):
        self._log.append((self._name, tuple(prompt[:8])))
        for _ in range(params.max_tokens - self._missing):
            yield SimpleNamespace(token_ids=(1,))


async def test_clusters_take_turns_and_the_first_round_does_not_count():
    log = []
    clients = {name: FakeClient(name, log) for name in ("whole", "split")}
    rates = await split._take_turns(clients, 100, 2, lambda line: None)
    assert {name: len(values) for name, values in rates.items()} == {"whole": 2, "split": 2}
    assert [log[index][0] for index in range(0, len(log), 48)] == [
        *("whole", "split"),
        *("split", "whole"),
        *("whole", "split"),
    ]
    # Both answer the same prompts in a round, and others in each round.
    assert len(log) == 6 * 48
    assert len({prompt for _, prompt in log}) == 3 * 48


async def test_a_stream_that_lacks_tokens_is_refused():
    clients = {"whole": FakeClient("whole", [], missing=1)}
    with pytest.raises(PeerError, match="were asked for"):
        await split._take_turns(clients, 100, 1, lambda line: None)


async def test_the_ratio_is_that_of_medians(monkeypatch, tmp_path):
    async def rates(*arguments):
        return {"whole": [10.0, 30.0, 20.0], "split": [9.0, 18.0, 99.0]}

    class NoCluster:
        async def __aenter__(self):
            return None

        async def __aexit__(self, *error):
            return None

    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    monkeypatch.setattr(split, "_take_turns", rates)
    monkeypatch.setattr(split, "_cluster", lambda setting, num_prefill: NoCluster())
    setting = Setting(model=tmp_path, num_threads=1, peers_folder=tmp_path, max_model_len=64)
    result = await split.measure_split(setting, 3, lambda line: None)
    assert (result["whole"], result["split"], result["split_to_whole"]) == (20.0, 18.0, 0.9)
