"""GetCluster and `baton top` over a router with fake workers."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from baton.cli import main
from baton.common.security.config import CredentialsConfig
from baton.v1 import cluster_pb2, cluster_pb2_grpc, worker_pb2
from router import cluster_servicer
from router.config.security import RouterSecurityConfig
from router.fleet import replica_health, tier
from tests.support.conditions import until
from tests.support.fake_workers import MODEL, FakeDecode, FakePrefill, running_workers
from tests.support.running_router import request, running_router, script_of

SCRIPT = script_of("The quick brown fox.")
LOAD = {"num_running": 3, "num_waiting": 2, "num_free_blocks": 1000, "num_blocks": 4096}
NOBODY = "127.0.0.1:1"
COUNTERS = {"prompt_tokens": 40, "generated_tokens": 20, "saved_bytes": 4000}
LOST = cluster_pb2.REPLICA_STATE_LOST


def stub_of(router):
    return cluster_pb2_grpc.ClusterServiceStub(router.channel)


async def cluster_of(router, **options):
    return await stub_of(router).GetCluster(cluster_pb2.GetClusterRequest(), timeout=20, **options)


async def test_the_state_of_replicas():
    prefill, decode, gone = FakePrefill(SCRIPT), FakeDecode(SCRIPT), FakeDecode(SCRIPT)
    async with running_workers(prefill, decode, gone), running_router(prefill, decode, gone) as r:
        decode.current_load = worker_pb2.WorkerLoad(**LOAD)
        decode.current_counters = worker_pb2.WorkerCounters(**COUNTERS)
        await gone.stop()
        await r.until(lambda: gone.address in r.fleet.decode.problems)
        first, second, lost = sorted(
            (await cluster_of(r)).replicas, key=lambda replica: (replica.state, replica.role)
        )
        assert (first.role, first.address) == (worker_pb2.WORKER_ROLE_PREFILL, prefill.address)
        assert second == cluster_pb2.ReplicaStatus(
            model=MODEL,
            role=worker_pb2.WORKER_ROLE_DECODE,
            address=decode.address,
            worker_id=decode.info.worker_id,
            version="test",
            state=cluster_pb2.REPLICA_STATE_READY,
            load=worker_pb2.WorkerLoad(**LOAD),
            counters=worker_pb2.WorkerCounters(**COUNTERS),
        )
        assert (lost.address, lost.state) == (gone.address, LOST)
        assert lost.problem
        assert not lost.HasField("load")


async def test_a_draining_replica():
    decode = FakeDecode(SCRIPT)
    async with running_workers(decode), running_router(decode) as router:
        decode.current_load = worker_pb2.WorkerLoad(**LOAD, draining=True)
        await router.until(lambda: not router.candidate_ids())
        (replica,) = (await cluster_of(router)).replicas
        assert replica.state == cluster_pb2.REPLICA_STATE_DRAINING
        assert replica.load.draining


async def test_a_replica_that_has_just_been_connected_is_not_back_before_it_reports():
    decode = FakeDecode(SCRIPT)
    async with running_workers(decode), running_router(decode) as router:
        await decode.stop()
        await router.until(lambda: decode.address in router.fleet.decode.problems)
        decode.is_frozen = True  # it describes itself, and reports nothing
        await decode.start(decode.port)
        await until(lambda: router.fleet.decode.connected)
        (replica,) = (await cluster_of(router)).replicas
        assert (replica.state, replica.address) == (LOST, decode.address)
        assert "has not reported" in replica.problem


async def test_a_replica_that_connects_while_others_are_asked_is_shown(monkeypatch):
    monkeypatch.setattr(cluster_servicer, "_LOAD_TIMEOUT_S", 20)
    prefill, decode = FakePrefill(SCRIPT), FakeDecode(SCRIPT)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        await decode.stop()
        await router.until(lambda: decode.address in router.fleet.decode.problems)
        num_loads, prefill.is_frozen = prefill.num_loads, True
        asked = asyncio.create_task(cluster_of(router))
        await prefill.changes.until(lambda: prefill.num_loads > num_loads)
        await decode.start(decode.port)
        await until(lambda: router.fleet.decode.connected)
        await prefill.stop()
        shown = (await asked).replicas
        assert {each.address for each in shown} == {prefill.address, decode.address}


async def test_a_lost_replica_is_shown_while_its_channel_is_closed(monkeypatch):
    open_channel, may_close = tier.open_cluster_channel, asyncio.Event()

    @asynccontextmanager
    async def open_slowly_closed_channel(*arguments):
        async with open_channel(*arguments) as channel:
            try:
                yield channel
            finally:
                await may_close.wait()

    monkeypatch.setattr(tier, "open_cluster_channel", open_slowly_closed_channel)
    decode = FakeDecode(SCRIPT)
    async with running_workers(decode), running_router(decode) as router:
        await decode.stop()
        await router.until(lambda: not router.fleet.decode.connected)
        shown = (await cluster_of(router)).replicas
        may_close.set()
        assert [(each.state, each.address) for each in shown] == [(LOST, decode.address)]
        assert shown[0].problem


async def test_an_ejected_replica(monkeypatch):
    monkeypatch.setattr(replica_health, "_FIRST_COOLDOWN_S", 60)
    decode = FakeDecode(SCRIPT)
    async with running_workers(decode), running_router(decode) as router:
        (replica,) = router.fleet.decode.connected
        for _ in range(3):
            replica._breaker.fail(replica._breaker.begin())
        (shown,) = (await cluster_of(router)).replicas
        assert shown.state == cluster_pb2.REPLICA_STATE_EJECTED
        assert shown.HasField("load")


async def test_the_requests_of_the_router():
    decode = FakeDecode(SCRIPT)
    async with running_workers(decode), running_router(decode, queue_timeout_s=0) as router:
        await router.generate(request(max_tokens=4))
        with pytest.raises(grpc.aio.AioRpcError):
            await router.generate(request(max_tokens=0, request_id="bad"))
        decode.pause_after = 1
        stream = router.stub.GenerateStream(request(max_tokens=4, request_id="cancelled"))
        await stream.read()
        running = await cluster_of(router)
        assert running.activity.num_running == 1
        stream.cancel()
        await decode.changes.until(lambda: not decode.running)
        await decode.stop()
        with pytest.raises(grpc.aio.AioRpcError):
            await router.generate(request(max_tokens=4, request_id="refused"))
        answer = await cluster_of(router)
        activity = answer.activity
        assert answer.uptime_s > 0
        assert activity.num_running == 0
        assert dict(activity.finished) == {"length": 1, "CANCELLED": 1}
        assert dict(activity.failed) == {"INVALID_ARGUMENT": 1, "UNAVAILABLE": 1}
        assert [(error.code, error.request_id) for error in activity.errors] == [
            ("UNAVAILABLE", "refused")
        ]
        assert activity.first_token.count == 2


def methods_of_cluster_service():
    service = cluster_pb2.DESCRIPTOR.services_by_name["ClusterService"]
    return [(method.name, method.input_type._concrete_class) for method in service.methods]


async def test_every_method_asks_for_the_clusters_token(tmp_path):
    path = tmp_path / "token"
    config = RouterSecurityConfig(cluster=CredentialsConfig(token_file=str(path)))
    async with running_router(security=config, decode=(NOBODY,)) as router:
        good = (("authorization", f"Bearer {path.read_text().strip()}"),)
        await cluster_of(router, metadata=good)
        for name, make_request in methods_of_cluster_service():
            call = getattr(stub_of(router), name)
            for metadata in ((), (("authorization", "Bearer wrong"),)):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call(make_request(), metadata=metadata, timeout=20)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_requests_that_wait_for_a_replica():
    decode = FakeDecode(SCRIPT)
    async with running_workers(decode), running_router(decode) as router:
        await decode.stop()
        await router.until(lambda: not router.candidate_ids())
        stream = router.stub.GenerateStream(request(max_tokens=4), timeout=30)
        await router.until(lambda: len(router.fleet.waiting))
        assert dict((await cluster_of(router)).activity.waiting) == {MODEL: 1}
        stream.cancel()


async def top(router, *flags):
    arguments = ["top", "--address", router.server.address, "--once", "--interval", "0.2"]
    return await asyncio.to_thread(main, [*arguments, *flags])


async def test_top_prints_one_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    decode = FakeDecode(SCRIPT)
    async with running_workers(decode), running_router(decode) as router:
        await router.generate(request(max_tokens=4))
        assert await top(router) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"router {router.server.address}  baton ")
    assert lines[1] == "requests  0 running  0/s  1 finished  0 cancelled  0 resumed"
    assert lines[-1].split() == (
        ["decode", decode.address, "ready", "0", "0", "0.00s", "0%", "0", "0", "-"]
    )
    assert max(map(len, lines)) <= 80


async def test_top_shows_its_token(tmp_path, capsys):
    path = tmp_path / "token"
    config = RouterSecurityConfig(cluster=CredentialsConfig(token_file=str(path)))
    async with running_router(security=config, decode=(NOBODY,)) as router:
        assert await top(router) == 1
        assert "valid credential of this cluster" in capsys.readouterr().err
        assert await top(router, "--cluster-token-file", str(path)) == 0
        assert f"decode  {NOBODY}" in capsys.readouterr().out


async def test_top_names_a_bad_flag(capsys):
    assert main(["top", "--interval", "0"]) == 2
    assert "--interval is 0.0; it must be in [0.2, 3600]" in capsys.readouterr().err
    assert main(["top", "--cluster-token-file", "/does/not/exist"]) == 2
    assert "--cluster-token-file /does/not/exist" in capsys.readouterr().err


WORKING = {"name": "KV store redis://cache:6379/0", "can_load": True, "can_save": True}
DOWN = {"name": WORKING["name"], "problem": "cannot be used: redis: Connection refused"}


def stored(*statuses):
    return [worker_pb2.KvBackendStatus(**status) for status in statuses]


async def doctor(capsys, *targets):
    """Returns the exit status and the findings about running workers, one a line."""
    flags = [f"--target={target}" for target in targets]
    status = await asyncio.to_thread(main, ["doctor", *flags])
    return status, " ".join(capsys.readouterr().out.split())


async def test_doctor_shows_what_running_workers_see_of_their_stores(capsys):
    prefill, decode = FakePrefill(SCRIPT), FakeDecode(SCRIPT)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        prefill.current_kv_backends = decode.current_kv_backends = stored(WORKING)
        status, text = await doctor(capsys, router.server.address)
        assert status == 0
        for worker in (prefill, decode):
            assert f"{worker.address}: KV store redis://cache:6379/0 works" in text
        decode.current_kv_backends = stored(DOWN)
        for target in (router.server.address, decode.address):
            status, text = await doctor(capsys, target)
            assert status == 1
            assert f"{decode.address}: KV store redis://cache:6379/0 cannot be used" in text
        assert (await doctor(capsys, prefill.address))[0] == 0
        await decode.stop()
        await router.until(lambda: decode.address in router.fleet.decode.problems)
        status, text = await doctor(capsys, router.server.address)
        assert status == 1
        assert f"{decode.address}: not connected" in text
        assert (await doctor(capsys, NOBODY))[0] == 1


async def test_tiers_on_different_stores_are_shown_and_logged_once(capsys, caplog):
    prefill, decode = FakePrefill(SCRIPT), FakeDecode(SCRIPT)
    for worker, name in ((prefill, "a"), (decode, "b")):
        worker.current_load.kv_store_ids.append(name)
    async with running_workers(prefill, decode), running_router(prefill, decode) as router:
        await router.until(lambda: router.fleet.stores.warning)
        (warning,) = (await cluster_of(router)).warnings
        assert "have different KV stores" in warning
        assert await top(router) == 0
        assert "have different KV stores" in " ".join(capsys.readouterr().out.split())
        status, text = await doctor(capsys, router.server.address)
        assert (status, "have different KV stores" in text) == (1, True)
        assert caplog.text.count("have different KV stores") == 1
        decode.current_load.kv_store_ids[:] = ["a"]
        await router.until(lambda: not router.fleet.stores.warning)
        assert not (await cluster_of(router)).warnings
