"""Targets `k8s:///namespace/service:port`, beside an API server in this process."""

import asyncio
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.common.errors import ConfigurationError
from rpc.discovery import kubernetes, kubernetes_api
from rpc.discovery.discovery import Discovery
from rpc.discovery.kubernetes import KubernetesTarget, slice_addresses
from rpc.discovery.kubernetes_api import KubernetesError, VersionGoneError
from tests.support.conditions import until
from tests.support.fake_kubernetes import TOKEN, endpoint_slice, running_kubernetes

TARGET = "k8s:///prod/decode:grpc"


@pytest.mark.parametrize(
    ("conditions", "is_listed"),
    [
        ({}, True),
        ({"ready": True}, True),
        ({"ready": None}, True),
        ({"ready": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),
        ({"ready": True, "serving": True, "terminating": True}, False),
        ({"ready": True, "serving": False}, True),  # publishNotReadyAddresses
    ],
)
def test_pods_count_while_they_are_ready_and_do_not_terminate(conditions, is_listed):
    item = endpoint_slice("a", ("10.0.0.1", conditions))
    assert list(slice_addresses(item, "grpc")) == ["10.0.0.1:50062"] * is_listed


def test_the_port_is_a_number_or_its_name():
    item = endpoint_slice("a", "10.0.0.1", "fd00::1")
    assert slice_addresses(item, "7") == ["10.0.0.1:7", "[fd00::1]:7"]
    assert slice_addresses(item, "metrics") == ["10.0.0.1:9000", "[fd00::1]:9000"]
    assert slice_addresses(item, "other") == ()
    assert slice_addresses({"endpoints": None, "ports": None}, "grpc") == ()
    assert slice_addresses({}, "7") == []


def test_a_process_outside_of_kubernetes_is_told(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigurationError, match="KUBERNETES_SERVICE_HOST is not set"):
        Discovery([TARGET])


class Followed:
    """A discovery that runs.

    Attributes:
        discovery: the discovery.
    """

    def __init__(self):
        self.discovery = Discovery([TARGET])
        self._changed = asyncio.Event()
        self.discovery.on_change(self._changed.set)

    async def until(self, *pods):
        """Waits until these pods are known."""
        async with asyncio.timeout(20):
            while self.discovery.addresses != {f"{pod}:50062" for pod in pods}:
                await self._changed.wait()
                self._changed.clear()


@asynccontextmanager
async def following(api, folder, monkeypatch):
    """Follows the target as a pod of the fake cluster does."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
    monkeypatch.setattr(kubernetes_api, "ACCOUNT_FOLDER", folder)
    monkeypatch.setattr(kubernetes, "_FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(kubernetes, "_MAX_BACKOFF_S", 0.05)
    followed = Followed()
    running = asyncio.create_task(followed.discovery.run())
    try:
        yield followed
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_pods_come_and_go(tmp_path, monkeypatch):
    items = [endpoint_slice("a", "10.0.0.1", "10.0.0.2"), endpoint_slice("b", "10.0.1.1")]
    async with (
        running_kubernetes(tmp_path, items) as api,
        following(api, tmp_path, monkeypatch) as followed,
    ):
        await followed.until("10.0.0.1", "10.0.0.2", "10.0.1.1")
        assert followed.discovery.name_of("10.0.0.1:50062") == "decode.prod.svc"
        assert followed.discovery.name_of("10.9.9.9:50062") is None
        api.put(endpoint_slice("a", "10.0.0.1", ("10.0.0.2", {"ready": False})))
        await followed.until("10.0.0.1", "10.0.1.1")
        api.put(endpoint_slice("c", "10.0.2.1"))
        await followed.until("10.0.0.1", "10.0.1.1", "10.0.2.1")
        api.delete("b")
        await followed.until("10.0.0.1", "10.0.2.1")
        assert api.lists == 1


async def test_lists_come_in_pages(tmp_path, monkeypatch):
    items = [endpoint_slice(f"s{number}", f"10.0.0.{number}") for number in range(1, 8)]
    async with running_kubernetes(tmp_path, items) as api:
        api.page_size = 3
        async with following(api, tmp_path, monkeypatch) as followed:
            await followed.until(*(f"10.0.0.{number}" for number in range(1, 8)))
            assert api.lists == 1


async def test_a_lost_watch_goes_on_where_it_ended(tmp_path, monkeypatch):
    async with (
        running_kubernetes(tmp_path, [endpoint_slice("a", "10.0.0.1")]) as api,
        following(api, tmp_path, monkeypatch) as followed,
    ):
        await followed.until("10.0.0.1")
        for number in range(2, 5):
            api.cut()
            api.put(endpoint_slice("a", f"10.0.0.{number}"))
            await followed.until(f"10.0.0.{number}")
        assert api.lists == 1


async def test_a_bookmark_saves_the_list_after_a_lost_watch(tmp_path, monkeypatch):
    async with (
        running_kubernetes(tmp_path, [endpoint_slice("a", "10.0.0.1")]) as api,
        following(api, tmp_path, monkeypatch) as followed,
    ):
        await followed.until("10.0.0.1")
        api.bookmark()
        api.put(endpoint_slice("b", "10.0.0.2"))
        await followed.until("10.0.0.1", "10.0.0.2")
        api.bookmark()
        version = str(api._version)
        (source,) = followed.discovery._sources
        await until(lambda: source._version == version)
        api.forget_events()
        api.cut()
        api.put(endpoint_slice("c", "10.0.0.3"))
        await followed.until("10.0.0.1", "10.0.0.2", "10.0.0.3")
        assert (api.lists, api.watches[-1]) == (1, version)


@pytest.mark.parametrize("how", ["status", "event"])
async def test_events_that_are_gone_cause_a_new_list(tmp_path, monkeypatch, how):
    async with (
        running_kubernetes(tmp_path, [endpoint_slice("a", "10.0.0.1")]) as api,
        following(api, tmp_path, monkeypatch) as followed,
    ):
        await followed.until("10.0.0.1")
        if how == "event":
            api.fail_watches({"kind": "Status", "code": 410, "message": "too old"})
        else:
            api.cut()
        api.delete("a")
        api.put(endpoint_slice("b", "10.0.0.2"))
        api.forget_events()
        await followed.until("10.0.0.2")
        assert api.lists == 2


async def test_a_refused_router_says_what_it_lacks_and_keeps_what_it_knew(
    tmp_path, monkeypatch, caplog
):
    async with (
        running_kubernetes(tmp_path, [endpoint_slice("a", "10.0.0.1")]) as api,
        following(api, tmp_path, monkeypatch) as followed,
    ):
        await followed.until("10.0.0.1")
        api.refusal = 403
        api.cut()
        api.put(endpoint_slice("a", "10.0.0.2"))
        await until(lambda: "may not get, list and watch" in caplog.text)
        assert followed.discovery.addresses == {"10.0.0.1:50062"}
        api.refusal = None
        await followed.until("10.0.0.2")
    assert caplog.text.count("HTTP status 403") == 1
    assert TOKEN not in caplog.text


async def test_a_token_that_changed_is_read_again(tmp_path, monkeypatch):
    async with (
        running_kubernetes(tmp_path, [endpoint_slice("a", "10.0.0.1")]) as api,
        following(api, tmp_path, monkeypatch) as followed,
    ):
        await followed.until("10.0.0.1")
        api.token = "another"
        (tmp_path / "token").write_text("another")
        api.cut()
        api.put(endpoint_slice("a", "10.0.0.2"))
        await followed.until("10.0.0.2")


async def test_another_server_than_that_of_the_ca_is_not_trusted(tmp_path, monkeypatch, caplog):
    (tmp_path / "other").mkdir()
    async with running_kubernetes(tmp_path / "other"), running_kubernetes(tmp_path) as api:
        (tmp_path / "ca.crt").write_bytes((tmp_path / "other" / "ca.crt").read_bytes())
        async with following(api, tmp_path, monkeypatch):
            await until(lambda: "CERTIFICATE_VERIFY_FAILED" in caplog.text)
        assert not api.lists


class ScriptedSlices:
    """An API without a network: each watch yields some of the events, then ends as scripted.

    Args:
        steps: what happens between and in watches: a slice's name and its pod, None to delete it,
            or how the watch ends.
    """

    def __init__(self, steps):
        self.slices = {}
        self._steps = list(steps)
        self._missed = []
        self._version = 0

    async def list(self):
        self._missed.clear()
        return [endpoint_slice(name, pod) for name, pod in self.slices.items()], self._next()

    async def watch(self, version):
        for event in tuple(self._missed):
            yield event
        self._missed.clear()
        while self._steps:
            step = self._steps.pop(0)
            if step == "gone":
                self._missed.clear()
                raise VersionGoneError
            if step == "cut":
                raise KubernetesError("the connection was lost")
            event = self._apply(*step)
            if self._steps[:1] == ["cut"]:  # it does not arrive before the connection is lost
                self._missed.append(event)
            elif self._steps[:1] != ["gone"]:
                yield event
        raise asyncio.CancelledError  # all is done

    def _apply(self, name, pod):
        if pod is None:
            self.slices.pop(name, None)
            return "DELETED", {"metadata": {"name": name, "resourceVersion": self._next()}}
        self.slices[name] = pod
        item = endpoint_slice(name, pod)
        item["metadata"]["resourceVersion"] = self._next()
        return "MODIFIED", item

    def _next(self):
        self._version += 1
        return str(self._version)


class BrokenSlices:
    """An API that lists the slices and never has the events since the list."""

    async def list(self):
        return [endpoint_slice("a", "10.0.0.1")], "1"

    async def watch(self, version):
        raise VersionGoneError
        yield


async def test_a_server_whose_lists_are_always_too_old_is_asked_ever_less_often(monkeypatch):
    waits = []

    async def note(delay_s):
        waits.append(delay_s)
        if len(waits) == 12:
            raise asyncio.CancelledError

    monkeypatch.setattr(kubernetes.random, "uniform", lambda low, high: high)
    monkeypatch.setattr(kubernetes.asyncio, "sleep", note)
    source = kubernetes._KubernetesSource(
        KubernetesTarget("prod", "decode", "grpc"), BrokenSlices()
    )
    with pytest.raises(asyncio.CancelledError):
        await source.follow(lambda: None)
    assert waits[:3] == [0.2, 0.4, 0.8]
    assert waits[-1] == 30.0


NAMES = st.sampled_from(["a", "b", "c"])
PODS = st.sampled_from([None, "10.0.0.1", "10.0.0.2", "10.0.0.3"])
STEPS = st.lists(st.one_of(st.tuples(NAMES, PODS), st.sampled_from(["gone", "cut"])), max_size=40)


@settings(max_examples=100)
@given(steps=STEPS)
def test_no_order_of_events_and_losses_leaves_wrong_addresses(steps):
    async def check():
        slices = ScriptedSlices(steps)
        source = kubernetes._KubernetesSource(KubernetesTarget("prod", "decode", "grpc"), slices)
        source._wait = lambda began_at: asyncio.sleep(0)
        seen = [source.addresses]
        following = asyncio.create_task(source.follow(lambda: seen.append(source.addresses)))
        await asyncio.gather(following, return_exceptions=True)
        assert source.addresses == {f"{pod}:50062" for pod in slices.slices.values()}
        assert all(before != after for before, after in pairwise(seen))
        assert seen[-1] == source.addresses

    asyncio.run(check())
