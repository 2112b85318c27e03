"""Ranks on Ray without Ray: what is reserved, and what is refused."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from baton.common import ray_cluster
from baton.common.errors import ConfigurationError
from engine.config import EngineConfig
from engine.runtime.ranks.hosts import HostRanks
from engine.runtime.ranks.ray_ranks import RayRanks, check_reach, rank_resources
from tests.support.ports import reserved_port

CPU_RANK = {"model": "m", "device": "cpu", "tensor_parallel_size": 2}


def config(**flags):
    return EngineConfig(**{**CPU_RANK, **flags}, distributed_executor_backend="ray")


class FakeGroup:
    """A placement group."""

    def __init__(self, has_room):
        self.has_room, self.is_removed = has_room, False

    def wait(self, timeout_s):
        return self.has_room


@pytest.fixture
def fake_ray(monkeypatch):
    """Stands for Ray; `groups` has the placement groups that were asked for."""
    fake = SimpleNamespace(has_room=True, groups=[])

    def placement_group(bundles, strategy):
        assert strategy == "PACK"
        fake.groups.append(FakeGroup(fake.has_room))
        return fake.groups[-1]

    groups = ModuleType("ray.util.placement_group")
    groups.placement_group = placement_group
    groups.placement_group_table = lambda group: {"bundles_to_node_id": {0: "a", 1: "b"}}
    groups.remove_placement_group = lambda group: setattr(group, "is_removed", True)
    for name in ("ray", "ray.util"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, groups.__name__, groups)
    fake.cluster_resources = lambda: {"CPU": 4.0, "memory": 1e9}
    fake.available_resources = lambda: {"CPU": 0.5}
    return fake


def test_an_engine_without_ray_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'baton-llm\[ray\]'"):
        RayRanks(config(), None)


def test_a_cluster_that_does_not_answer_is_an_error_at_once(monkeypatch):
    module = ModuleType("ray")
    module.is_initialized = lambda: False
    monkeypatch.setitem(sys.modules, "ray", module)
    address = f"127.0.0.1:{reserved_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigurationError, match=f"RAY_ADDRESS is {address}: Connection refused"):
        ray_cluster.join_cluster()


@pytest.mark.parametrize("has_begun_it", [True, False])
def test_a_command_stays_connected_only_to_a_cluster_that_it_began(monkeypatch, has_begun_it):
    calls = []
    ray = SimpleNamespace(
        get_runtime_context=lambda: SimpleNamespace(gcs_address="10.0.0.1:6379"),
        shutdown=lambda: calls.append("shutdown"),
        _private=SimpleNamespace(
            worker=SimpleNamespace(_global_node=SimpleNamespace(is_head=lambda: has_begun_it))
        ),
    )
    monkeypatch.setattr(ray_cluster, "join_cluster", lambda: ray)
    assert ray_cluster.cluster_address() == "10.0.0.1:6379"
    assert calls == ([] if has_begun_it else ["shutdown"])


def test_a_program_that_uses_ray_stays_connected(monkeypatch):
    module = ModuleType("ray")
    module.is_initialized = lambda: True
    monkeypatch.setitem(sys.modules, "ray", module)
    assert ray_cluster.join_cluster() is module


def test_a_reservation_names_the_nodes(fake_ray):
    group, nodes = ray_cluster.reserve(fake_ray, [{"CPU": 1}] * 2, "2 ranks")
    assert nodes == ["a", "b"]
    assert not group.is_removed


def test_a_cluster_without_room_is_named_and_nothing_stays_reserved(fake_ray):
    fake_ray.has_room = False
    with pytest.raises(ConfigurationError) as caught:
        ray_cluster.reserve(fake_ray, [{"CPU": 8}, {"CPU": 1, "GPU": 1}], "2 ranks", 60)
    assert caught.value.message == (
        "the Ray cluster had no room within 60 s for 2 ranks: 8 CPU, 0 GPU + 1 CPU, 1 GPU; it has "
        "4 CPU, 0 GPU, free 0.5 CPU, 0 GPU"
    )
    assert fake_ray.groups[0].is_removed


def test_a_rank_needs_the_cores_of_its_threads():
    assert rank_resources(config()) == {"CPU": 1}
    assert rank_resources(config(num_threads=8)) == {"CPU": 8}


def test_a_store_of_one_machine_is_refused_for_ranks_on_several():
    check_reach("shm://kv", ["a", "a"])
    check_reach("redis://host:1/0", ["a", "b"])
    check_reach(None, ["a", "b"])
    check_reach("grpc://0.0.0.0", ["a", "b"])
    for of_one_machine in ("shm://kv", "grpc://", "nixl://0.0.0.0?advertise=a"):
        with pytest.raises(ConfigurationError, match=r"reaches .* placed the ranks on 2"):
            check_reach(of_one_machine, ["a", "b", "a"])


def test_ray_chooses_the_machines():
    with pytest.raises(ConfigurationError, match="--nnodes is 2; it must be 1 with Ray"):
        config(nnodes=2)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_group_that_is_lost_is_not_waited_for(is_lost, monkeypatch):
    monkeypatch.setattr(HostRanks, "close", lambda self: None)
    calls = []
    ranks = RayRanks.__new__(RayRanks)
    ranks._is_closing, ranks._is_lost = False, is_lost
    ranks._results, ranks._group = ["result"], "group"
    util = SimpleNamespace(remove_placement_group=lambda _: calls.append("remove"))
    ranks._ray = SimpleNamespace(wait=lambda *_, **__: calls.append("wait"), util=util)
    ranks.close()
    assert calls == (["remove"] if is_lost else ["wait", "remove"])
