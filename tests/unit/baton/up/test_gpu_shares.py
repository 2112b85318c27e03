"""The GPUs that `baton serve` gives its workers, and what each takes of a shared one."""

import argparse
import asyncio

import pytest

from baton.cli import serve, serve_config
from baton.cli.serve_config import cluster_config_from_args
from baton.common.errors import ConfigurationError
from baton.up import cluster, plan
from baton.up.gpus import GPUS_VARIABLE, default_workers, share_gpus, visible_gpus
from baton.up.plan import ClusterConfig, plan_cluster
from engine.config import EngineConfig

_DRIVER = "baton.up.gpus._DRIVER_FILES"


def engine(**fields):
    return EngineConfig(model="/models/some", kv_connector="shm://x", **fields)


def planned(monkeypatch, gpus, num_prefill=1, num_decode=1, **fields):
    monkeypatch.setattr(plan, "visible_gpus", lambda: gpus)
    config = ClusterConfig.grpc_only(
        engine(**fields), num_prefill=num_prefill, num_decode=num_decode
    )
    return plan_cluster(config).workers


def parsed(flags):
    parser = argparse.ArgumentParser()
    serve.add_args(parser)
    return parser.parse_args(flags)


def gpus_of(workers):
    return [worker.spec.environment.get(GPUS_VARIABLE) for worker in workers]


def utilization_of(worker):
    flags = worker.spec.arguments
    found = [float(flags[at + 1]) for at, f in enumerate(flags) if f == "--gpu-memory-utilization"]
    return found[0] if found else EngineConfig(model="x").gpu_memory_utilization


def test_each_worker_gets_a_gpu_of_its_own(monkeypatch):
    workers = planned(monkeypatch, ("0", "1", "2"), num_decode=2)
    assert gpus_of(workers) == ["0", "1", "2"]
    assert [utilization_of(worker) for worker in workers] == [0.9] * 3


def test_the_workers_of_one_gpu_share_its_memory(monkeypatch):
    workers = planned(monkeypatch, ("0",))
    assert gpus_of(workers) == ["0", "0"]
    assert [utilization_of(worker) for worker in workers] == [0.45, 0.45]


def test_workers_beyond_the_number_of_gpus_share_them_in_turn(monkeypatch):
    workers = planned(monkeypatch, ("0", "1"), num_decode=2)
    assert gpus_of(workers) == ["0", "1", "0"]
    assert [utilization_of(worker) for worker in workers] == [0.45, 0.9, 0.45]


def test_an_engine_of_several_ranks_gets_as_many_gpus(monkeypatch):
    workers = planned(monkeypatch, ("0", "1", "2", "3", "4"), tensor_parallel_size=2)
    assert gpus_of(workers) == ["0,1", "2,3"]


def test_an_engine_with_more_ranks_than_gpus_is_left_to_refuse_itself(monkeypatch):
    assert gpus_of(planned(monkeypatch, ("0",), tensor_parallel_size=2)) == [None, None]


@pytest.mark.parametrize(
    ("given", "expected"),
    [(0.9, 0.45), (0.8, 0.45), (0.4, 0.4), (1.0, 0.5)],
)
def test_a_smaller_share_than_the_default_is_kept_where_all_workers_fit(given, expected):
    (share, _) = share_gpus(("0",), engine(), 2)
    divided = share.divide_memory(engine(gpu_memory_utilization=given))
    assert divided.gpu_memory_utilization == pytest.approx(expected)


@pytest.mark.parametrize(
    ("gpus", "fields", "expected"),
    [
        ((), {}, (1, 1)),
        (("0",), {}, (0, 1)),
        (("0",), {"device": "cuda"}, (0, 1)),
        (("0", "1"), {}, (1, 1)),
        (("0", "1"), {"device": "cuda:1"}, (0, 1)),
        (("0", "1"), {"device": "cpu"}, (1, 1)),
        (("0", "1", "2"), {"tensor_parallel_size": 2}, (0, 1)),
        (("0", "1", "2", "3"), {"tensor_parallel_size": 2}, (1, 1)),
    ],
)
def test_one_gpu_gets_one_undivided_worker_unless_flags_say_otherwise(gpus, fields, expected):
    assert default_workers(gpus, engine(**fields)) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], (0, 1)),
        (["--device", "cpu"], (1, 1)),
        (["--prefill-workers", "1"], (1, 1)),
        (["--decode-workers", "1"], (1, 1)),
        (["--decode-workers", "2"], (1, 2)),
    ],
)
def test_a_command_without_numbers_of_workers_asks_for_the_gpus(monkeypatch, flags, expected):
    monkeypatch.setattr(serve_config, "visible_gpus", lambda: ("0",))
    config = cluster_config_from_args(parsed(flags), "shm://x")
    assert (len(config.model.prefill), len(config.model.decode)) == expected


def test_nothing_is_asked_of_this_machine_where_ray_places_the_workers(monkeypatch):
    monkeypatch.setattr(serve_config, "visible_gpus", lambda: ("0",))
    config = cluster_config_from_args(parsed([]), "redis://127.0.0.1:1/0", is_on_ray=True)
    assert (len(config.model.prefill), len(config.model.decode)) == (1, 1)


def test_workers_on_the_cpu_get_no_gpus(monkeypatch):
    workers = planned(monkeypatch, ("0", "1"), device="cpu")
    assert gpus_of(workers) == [None, None]
    assert [utilization_of(worker) for worker in workers] == [0.9, 0.9]


def test_a_gpu_that_the_device_flag_names_is_shared(monkeypatch):
    workers = planned(monkeypatch, ("0", "1"), device="cuda:1")
    assert gpus_of(workers) == [None, None]
    assert [utilization_of(worker) for worker in workers] == [0.45, 0.45]


@pytest.mark.parametrize(
    ("variable", "count", "expected"),
    [(None, 2, ("0", "1")), ("3, 5", 2, ("3", "5")), ("GPU-a,GPU-b,-1,4", 2, ("GPU-a", "GPU-b"))],
)
def test_gpus_have_the_names_by_which_processes_see_them(
    monkeypatch, tmp_path, variable, count, expected
):
    monkeypatch.setattr(_DRIVER, (tmp_path,))
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.delenv(GPUS_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(GPUS_VARIABLE, variable)
    assert visible_gpus() == expected


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr(_DRIVER, (tmp_path / "missing",))
    assert visible_gpus() == ()


@pytest.mark.parametrize(
    ("gpus", "max_starting"), [(("0",), 1), (("0", "1", "2"), 3), (("0", "1"), 2), ((), 3)]
)
async def test_workers_of_one_gpu_start_one_after_the_other(monkeypatch, gpus, max_starting):
    starting, most = set(), []

    async def start(server, process):
        starting.add(server.address)
        most.append(len(starting))
        await asyncio.sleep(0)
        starting.remove(server.address)

    monkeypatch.setattr(cluster, "start_server", start)
    workers = planned(monkeypatch, gpus, num_decode=2)
    await cluster.start_workers((worker, None) for worker in workers)
    assert len(most) == 3
    assert max(most) == max_starting


async def test_no_worker_starts_after_another_one_could_not(monkeypatch):
    started, is_serving = [], asyncio.Event()

    async def start(server, process):
        started.append(server.spec.name)
        if server.spec.name == "decode-0":
            raise ConfigurationError("no memory")
        await is_serving.wait()

    monkeypatch.setattr(cluster, "start_server", start)
    workers = planned(monkeypatch, ("0", "1"), num_decode=2)  # decode-1 waits for prefill-0
    with pytest.raises(ConfigurationError, match="no memory"):
        await cluster.start_workers((worker, None) for worker in workers)
    is_serving.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert started == ["prefill-0", "decode-0"]
