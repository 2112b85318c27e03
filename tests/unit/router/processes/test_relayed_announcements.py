"""Announcements of workers, which reach one process of a router and are known in all."""

import pytest
from prometheus_client import CollectorRegistry

from baton.common.errors import InvalidArgumentError
from baton.v1 import registration_pb2
from router.processes.other_processes import OtherProcesses
from router.processes.place import ProcessPlace
from router.processes.process_server import MetricsServicer, ProcessServer
from router.registration_servicer import RegistrationServicer
from rpc.discovery.announcements import Announcements


async def test_other_processes_know_an_announced_worker_unless_they_are_gone(tmp_path):
    places = [ProcessPlace(number, 2, str(tmp_path)) for number in range(2)]
    here, there = Announcements(), Announcements()
    metrics = MetricsServicer(CollectorRegistry())
    server = ProcessServer(places[1].target, metrics, registration=RegistrationServicer(there))
    await server.start()
    others = OtherProcesses(places[0])
    servicer = RegistrationServicer(here, others)
    request = registration_pb2.AnnounceRequest(address="a:1", labels={"role": "decode"})
    known = {}
    try:
        with there.watching(known.__setitem__):
            await servicer.Announce(request, None)
            assert known == {"a:1": {"role": "decode"}}
            with pytest.raises(InvalidArgumentError):
                await servicer.Announce(registration_pb2.AnnounceRequest(address="x"), None)
            await servicer.Withdraw(registration_pb2.WithdrawRequest(address="a:1"), None)
            assert known == {"a:1": None}
        await server.stop()
        assert (await servicer.Announce(request, None)).lease_ms == 15_000
        assert (len(here), len(there)) == (1, 0)
    finally:
        await others.close()
        await server.stop()
        here.withdraw("a:1")
