"""What a worker plans to need of a memory limit."""

import re
import weakref
from collections import namedtuple
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from baton.common.container_limits import SHARE_VARIABLE, LimitsShare
from baton.common.errors import ConfigurationError
from baton.common.machine_limits import Memory
from engine.config import EngineConfig
from engine.runtime.forward import memory_plan
from engine.runtime.forward.memory_plan import check_weights
from engine.runtime.launch import worker_plan
from engine.runtime.launch.worker_plan import layer_bytes, plan_memory, step_bytes
from engine.runtime.weights.loader import load_model
from kvstore import url as kvstore_url
from kvstore.layout import KvLayout
from kvstore.registry import memory_bytes
from tests.support.checkpoints import prompt_of
from tests.support.paged_session import PagedSession, loaded

MIB = 1 << 20
LAYOUT = KvLayout(num_layers=2, num_kv_heads=3, block_size=16, head_dim=4, dtype="float16")
CONFIG = EngineConfig(model="demo")


@pytest.fixture
def limited(monkeypatch):
    """Returns a function that sets a limit of memory, and what the process has of it."""

    def limit(num_bytes, used=300 * MIB):
        memory = Memory(1 << 40, 1 << 40, num_bytes)
        for module in (worker_plan, memory_plan, kvstore_url):
            monkeypatch.setattr(module, "read_memory", lambda: memory)
        monkeypatch.setattr(worker_plan, "private_bytes", lambda: used)

    return limit


@pytest.fixture(scope="module")
def demo():
    return load_model("demo", "auto", "cpu", progress=False)


def test_nothing_is_planned_without_a_limit(limited, demo):
    limited(None)
    assert plan_memory(CONFIG, demo, LAYOUT) is None


def test_weights_of_the_process_are_counted_once(limited, demo):
    limited(1000 * MIB)
    assert demo.weight_bytes > 0
    own = plan_memory(CONFIG, demo, LAYOUT)
    shared = plan_memory(CONFIG, replace(demo, shares_weights=True), LAYOUT)
    assert own.parts["weights"] == shared.parts["weights"] == demo.weight_bytes
    assert shared.parts["process"] - own.parts["process"] == demo.weight_bytes


def test_starts_of_a_small_process_have_the_same_plan(limited, demo):
    plans = []
    for used in (120 * MIB, 150 * MIB):
        limited(1000 * MIB, used)
        plans.append(plan_memory(CONFIG, demo, LAYOUT))
    assert plans[0] == plans[1]


def test_workers_of_a_container_share_its_limit_and_the_weights(limited, demo, monkeypatch):
    limited(3100 * MIB)
    share = LimitsShare(num_workers=2, other_bytes=100 * MIB)
    monkeypatch.setenv(SHARE_VARIABLE, share.environment[SHARE_VARIABLE])
    plan = plan_memory(CONFIG, replace(demo, shares_weights=True), LAYOUT)
    assert plan.parts["weights"] == demo.weight_bytes // 2
    assert plan.left == 1500 * MIB - sum(plan.parts.values())
    ranks = plan_memory(CONFIG, demo, LAYOUT, num_local=3)
    assert ranks.left == 500 * MIB - sum(ranks.parts.values())


@pytest.mark.parametrize(
    ("flags", "part", "num_bytes"),
    [
        ({"swap_space": 64 * MIB}, "swapped KV", 64 * MIB),
        ({"kv_connector": "memory://?max_bytes=80MiB"}, "KV store", 80 * MIB),
        ({"kv_connector": "shm://kv?max_bytes=80MiB"}, "KV store", 90 * MIB),
        ({"kv_connector": "faulty+shm://kv?max_bytes=80MiB"}, "KV store", 90 * MIB),
        ({"kv_connector": "multi://grpc://,shm://kv?max_bytes=80MiB"}, "KV store", 90 * MIB),
        ({"kv_connector": "redis://host:6379/0"}, "KV store", 0),
        ({"kv_connector": "file:///var/kv?max_bytes=80MiB"}, "KV store", 0),
        ({"kv_connector": "file:///dev/shm/kv?max_bytes=80MiB"}, "KV store", 80 * MIB),
    ],
)
def test_what_flags_add_is_planned(limited, demo, flags, part, num_bytes):
    limited(800 * MIB)
    plan = plan_memory(replace(CONFIG, **flags), demo, LAYOUT)
    assert plan.parts[part] == num_bytes


def test_staging_is_planned_for_each_connector(limited, demo):
    limited(1000 * MIB)
    urls = None, "grpc://", "multi://grpc://,memory://,redis://host:6379/0"
    configs = [replace(CONFIG, kv_connector=url) for url in urls]
    sizes = [plan_memory(config, demo, LAYOUT).parts["transfers"] for config in configs]
    assert sizes == [0, sizes[1], 3 * sizes[1]]
    assert sizes[1] > 0


def test_a_larger_step_needs_more(demo):
    least = step_bytes(CONFIG, demo)
    assert step_bytes(replace(CONFIG, max_num_batched_tokens=8192), demo) > least
    assert step_bytes(replace(CONFIG, max_num_seqs=4096), demo) > least


@pytest.mark.parametrize(
    "variant",
    ["llama", "gpt2", "falcon", "gemma2", "deepseek_v2", "lfm2", "qwen3_5_moe", "qwen3_next"],
)
def test_layers_need_at_most_what_is_planned(variant):
    """The memory of tensors that exist at the same time while a prompt is computed."""
    num_tokens = 96
    model = loaded(variant)
    session = PagedSession(model, [num_tokens])
    inputs = session.inputs([(0, prompt_of(num_tokens))], [0])
    kv = session.kv(inputs)
    with torch.inference_mode(), _Allocations() as allocations:
        model.model(inputs.token_ids, inputs.positions, kv)
    planned = layer_bytes(model.model.config, num_tokens, itemsize=4)
    assert planned / 2.5 < allocations.peak <= planned


class _Allocations(TorchDispatchMode):
    """Counts the bytes of the tensors that are made meanwhile, as long as they are alive.

    Attributes:
        peak: the most bytes that were alive at once.
    """

    def __init__(self):
        super().__init__()
        self.peak, self._alive = 0, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        known = {id(storage) for storage in storages_of(args)} | self._alive.keys()
        for storage in storages_of(result):
            if id(storage) not in known:
                self._alive[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self._alive.pop, id(storage))
        self.peak = max(self.peak, sum(self._alive.values()))
        return result


def storages_of(values):
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if torch.is_tensor(leaf)]


def test_a_model_on_a_gpu_needs_none_of_this_memory(limited, demo):
    limited(1000 * MIB)
    plan = plan_memory(CONFIG, demo, LAYOUT, is_on_cpu=False)
    assert plan.parts["weights"] == plan.parts["step"] == 0


def test_weights_that_cannot_fit_are_refused_before_they_are_loaded(limited):
    limited(1000 * MIB)
    check_weights("small", 700 * MIB, is_shared=False)
    with pytest.raises(ConfigurationError, match="weights of large 950 MiB") as caught:
        check_weights("large", 950 * MIB, is_shared=False)
    assert "limit of this container is 1000 MiB" in caught.value.message


@pytest.mark.parametrize("url", ["memory://", "shm://kv", "memory://?max_bytes=90MiB"])
def test_the_limit_that_an_error_names_is_enough(limited, demo, monkeypatch, url):
    disk = namedtuple("disk", ["total"])(1 << 40)
    monkeypatch.setattr(kvstore_url.shutil, "disk_usage", lambda path: disk)
    config = replace(CONFIG, kv_connector=url)
    limited(400 * MIB)
    with pytest.raises(ConfigurationError) as caught:
        plan_memory(config, demo, LAYOUT).check(900 * MIB, "")
    assert caught.value.message.endswith("resources.limits.memory of Kubernetes)")
    limited(int(re.search(r"(\d+) MiB are needed", caught.value.message)[1]) * MIB)
    plan_memory(config, demo, LAYOUT).check(900 * MIB, "")


def test_a_store_in_memory_is_bounded_by_a_share_of_the_limit(limited, monkeypatch):
    disk = namedtuple("disk", ["total"])(1 << 40)
    monkeypatch.setattr(kvstore_url.shutil, "disk_usage", lambda path: disk)
    limited(320 * MIB)
    assert memory_bytes("memory://") == 20 * MIB
    assert memory_bytes("shm://kv") == 22.5 * MIB  # with the index and what is allocated ahead
    limited(None)
    assert memory_bytes("memory://") == 1024 * MIB
