"""A router whose target is a replica set: its workers become replicas."""

import asyncio
import socket

import pytest

from baton.common.security.cluster import ClusterSecurity
from router.config.security import RouterSecurityConfig, WorkerTlsConfig
from tests.support.certificates import Authority, write_files
from tests.support.conditions import until
from tests.support.fake_workers import FakeDecode
from tests.support.replica_sets import running_set
from tests.support.running_router import (
    request,
    running_router,
    script_of,
    token_ids_of,
)

SCRIPT = script_of("The quick brown fox jumps over the lazy dog.")


def ids_of(*workers):
    return {worker.info.worker_id for worker in workers}


async def test_a_set_grows_and_shrinks_below_a_router():
    async with (
        running_set(SCRIPT, 2) as replicas,
        running_router(decode=(replicas.address,)) as router,
    ):
        await router.until_connected(*replicas.workers)
        for worker in replicas.workers:
            worker.pause_after = 1
        streams = [
            asyncio.create_task(router.generate(request([number] * 40, max_tokens=8)))
            for number in range(2, 6)
        ]
        for worker in replicas.workers:  # they have equal shares
            await worker.changes.until(lambda each=worker: len(each.running) == 2)
        for worker in replicas.workers:
            worker.resume()
        for responses in await asyncio.gather(*streams):
            assert token_ids_of(responses) == SCRIPT[:8]
        await replicas.replicas.scale(3)
        await router.until_connected(*replicas.workers)
        await replicas.replicas.scale(1)
        await router.until(lambda: router.candidate_ids() == ids_of(replicas.workers[0]))
        assert token_ids_of(await router.generate(request(max_tokens=8))) == SCRIPT[:8]


async def test_a_lost_set_keeps_its_workers_and_their_addresses():
    async with (
        running_set(SCRIPT, 2) as replicas,
        running_router(decode=(replicas.address,)) as router,
    ):
        await router.until_connected(*replicas.workers)
        first, second = replicas.workers
        await replicas.stop_server()
        tier = router.fleet.decode
        await until(lambda: replicas.address in tier.problems)
        assert router.candidate_ids() == ids_of(first, second)
        # A worker that is lost is found again at its address, though the set is not there.
        await second.stop()
        await router.until(lambda: router.candidate_ids() == ids_of(first))
        await second.start()
        await router.until_connected(second)


async def test_a_worker_that_moves_is_followed():
    async with (
        running_set(SCRIPT, 2) as replicas,
        running_router(decode=(replicas.address,)) as router,
    ):
        await router.until_connected(*replicas.workers)
        lost = replicas.workers[1]
        await lost.stop()
        moved = replicas.workers[1] = FakeDecode(SCRIPT)
        await moved.start()
        replicas.made[1].move(moved)
        await router.until(lambda: router.candidate_ids() == ids_of(*replicas.workers))
        await until(lambda: lost.address not in router.fleet.decode.problems)


async def test_a_set_that_starts_again_has_other_workers():
    async with (
        running_set(SCRIPT, 2) as replicas,
        running_router(decode=(replicas.address,)) as router,
    ):
        await router.until_connected(*replicas.workers)
        await replicas.close()
        earlier = {worker.address for worker in replicas.workers}
        await router.until(lambda: not router.candidate_ids())
        await replicas.start(1)
        await router.until(lambda: router.candidate_ids() == ids_of(replicas.workers[-1]))
        await until(lambda: not earlier & router.fleet.decode.problems.keys())


async def test_an_address_may_become_a_worker_and_a_set_again():
    worker = FakeDecode(SCRIPT)
    async with (
        running_set(SCRIPT, 1) as replicas,
        running_router(decode=(replicas.address,)) as router,
    ):
        await router.until_connected(*replicas.workers)
        await replicas.close()
        await worker.start(replicas.port)
        await router.until(lambda: router.candidate_ids() == ids_of(worker))
        await until(lambda: not router.fleet.decode.problems)
        await worker.stop()
        await replicas.start(1)
        await router.until(lambda: router.candidate_ids() == ids_of(replicas.workers[-1]))


async def test_workers_of_both_tiers_may_be_in_sets():
    async with (
        running_set(SCRIPT, 1) as replicas,
        running_router(prefill=(replicas.address,), decode=(replicas.address,)) as router,
    ):
        await router.until_connected(*replicas.workers)
        assert [one.address for one in router.fleet.decode.candidates] == [
            worker.address for worker in replicas.workers
        ]
        assert token_ids_of(await router.generate(request(max_tokens=8))) == SCRIPT[:8]


@pytest.mark.parametrize("named", [True, False])
async def test_workers_of_a_set_found_by_dns_have_its_name(tmp_path, monkeypatch, named):
    authority = Authority()

    def files(name, **leaf):
        leaf = authority.issue(name, **leaf)
        return write_files(tmp_path / name, leaf, authority.certificate)

    def resolve(asked, port, **options):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    name = "workers.test" if named else "other.test"
    security = ClusterSecurity(files=files("worker", dns=[name], addresses=[]))
    own = files("router")
    tls = WorkerTlsConfig(
        cluster_ssl_certfile=own.certfile,
        cluster_ssl_keyfile=own.keyfile,
        cluster_ssl_ca_certs=own.ca_certs,
    )
    async with running_set(SCRIPT, 2, security) as replicas:
        target = f"dns:///workers.test:{replicas.port}"
        options = {"security": RouterSecurityConfig(workers=tls), "dns_interval_s": 0.02}
        async with running_router(decode=(target,), **options) as router:
            if named:
                await router.until_connected(*replicas.workers)
            else:
                await until(lambda: replicas.address in router.fleet.decode.problems)
                assert not router.candidate_ids()
