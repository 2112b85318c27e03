"""Which rank a process is, by flags and by the variables of launchers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.common.errors import ConfigurationError
from engine.config import EngineConfig
from engine.runtime.ranks.place import RankPlace, place_of

TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
AGENT = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}
LEADER_WORKER_SET = {
    "LWS_LEADER_ADDRESS": "leader.svc",
    "LWS_WORKER_INDEX": "0",
    "LWS_GROUP_SIZE": "2",
}


def config(**flags: object) -> EngineConfig:
    return EngineConfig(model="m", **{"tensor_parallel_size": 2, **flags})


def launched(**flags: object) -> EngineConfig:
    return config(distributed_executor_backend="external_launcher", **flags)


def test_one_process_starts_all_ranks_of_one_machine():
    assert place_of(config(), TORCHRUN) is None


def test_flags_name_the_machine():
    found = place_of(config(nnodes=2, node_rank=1, master_addr="h", master_port=7), {})
    assert found == RankPlace(1, 2, "h", 7, starts_others=True)


@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 3))
def test_the_machines_have_each_rank_once(nnodes, num_local, width):
    size = nnodes * num_local * width
    found = []
    for node_rank in range(nnodes):
        flags = {"nnodes": nnodes, "node_rank": node_rank, "pipeline_parallel_size": width}
        place = place_of(config(tensor_parallel_size=size // width, **flags), {})
        others = place.places_to_start()
        assert not any(other.starts_others for other in others)
        here = [place, *others]
        assert [each.local_rank for each in here] == list(range(size // nnodes))
        assert {each.num_local for each in here} == {size // nnodes}
        assert {each.size for each in here} == {size}
        found += [each.rank for each in here]
    assert found == list(range(size))


def test_processes_of_launchers_start_no_others():
    assert place_of(launched(), TORCHRUN).places_to_start() == []


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, RankPlace(1, 2, "10.0.0.1", 29500, num_local=2, local_rank=1)),
        (AGENT, RankPlace(1, 2, "10.0.0.1", 29500, num_local=2, local_rank=1, is_host=False)),
        (LEADER_WORKER_SET, RankPlace(0, 2, "leader.svc", 29501)),
    ],
)
def test_launchers_name_the_process(variables, expected):
    assert place_of(launched(), variables) == expected


@pytest.mark.parametrize(
    ("own", "variables", "message"),
    [
        (launched(), {}, "the variable RANK is ''"),
        (launched(), {**TORCHRUN, "WORLD_SIZE": "two"}, "the variable WORLD_SIZE is 'two'"),
        (launched(tensor_parallel_size=4), TORCHRUN, "has started 2 processes"),
        (launched(), {**TORCHRUN, "RANK": "2"}, "number 2"),
        (config(nnodes=3), {}, "--nnodes is 3; it must divide 2, --tensor-parallel-size times"),
        (config(nnodes=4), {}, "--nnodes is 4; it must divide 2, --tensor-parallel-size times"),
    ],
)
def test_what_does_not_fit_is_refused(own, variables, message):
    with pytest.raises(ConfigurationError, match=message):
        place_of(own, variables)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"node_rank": 1}, "--node-rank is 1; it must be from 0 to --nnodes 1 - 1"),
        ({"distributed_executor_backend": "uni"}, "mp, ray or external_launcher with several"),
        ({"distributed_executor_backend": "spark"}, "one of mp, ray, external_launcher, uni"),
        ({"nnodes": 0}, "--nnodes is 0"),
        ({"nnodes": 2, "tensor_parallel_size": 1}, "--nnodes is 2; it must be 1 without"),
    ],
)
def test_bad_flags_are_refused(flags, message):
    with pytest.raises(ConfigurationError, match=message):
        config(**flags)
