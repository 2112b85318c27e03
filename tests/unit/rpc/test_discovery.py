"""`Discovery`: targets, and the addresses of each kind while they change."""

import asyncio
import logging
import socket
import threading
from pathlib import Path

import pytest

from baton.common.errors import ConfigurationError
from rpc.discovery import look_ups
from rpc.discovery.announced import AnnouncedTarget
from rpc.discovery.announcements import Announcements
from rpc.discovery.discovery import Discovery, parse_target
from rpc.discovery.dns import DnsTarget
from rpc.discovery.files import FileTarget
from rpc.discovery.hosts import HostTarget
from rpc.discovery.kubernetes import KubernetesTarget
from rpc.discovery.source import Scope


async def looked_up(discovery):
    """Returns the addresses after one look-up."""
    await discovery.look_up()
    return discovery.addresses


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("host:1", HostTarget("host", 1)),
        ("[::1]:65535", HostTarget("[::1]", 65535)),
        ("dns:///name.of.it:2", DnsTarget("name.of.it", 2)),
        ("file:///run/of it", FileTarget(Path("/run/of it"))),
        ("k8s:///prod/decode:grpc", KubernetesTarget("prod", "decode", "grpc")),
        ("k8s:///prod/decode:50062", KubernetesTarget("prod", "decode", "50062")),
        ("register:///", AnnouncedTarget(())),
        (
            "register:///?role=decode&hardware=h100%20nvl",
            AnnouncedTarget((("role", "decode"), ("hardware", "h100 nvl"))),
        ),
    ],
)
def test_targets_are_parsed(text, target):
    assert parse_target(text) == target
    assert parse_target(str(target)) == target


@pytest.mark.parametrize(
    "text",
    [
        "host",
        "host:",
        ":1",
        "host:0",
        "host:65536",
        "host:x",
        "dns://a/b:1",
        "http://h:1",
        "file://a",
        "zk:///a:1",
        "k8s:///decode:1",
        "k8s:///prod/decode",
        "k8s:///prod/decode:0",
        "k8s:///prod/Decode:1",
        "register:///role=decode",
        "register:///?role",
        "register:///?role=a&role=b",
        "register:///?-=a",
    ],
)
def test_bad_targets_are_refused(text):
    with pytest.raises(ConfigurationError, match="must be host:port, dns:///name:port, file:"):
        Discovery([text])


async def test_static_targets_are_their_own_addresses():
    discovery = Discovery(["a:1", "b:2", "a:1"])
    assert discovery.addresses == {"a:1", "b:2"}
    assert discovery.name_of("a:1") is None
    async with asyncio.timeout(10):
        await discovery.run()  # there is nothing to follow


async def test_dns_names_resolve():
    assert "127.0.0.1:5" in await looked_up(Discovery(["dns:///127.0.0.1:5"]))
    assert await looked_up(Discovery(["dns:///::1:5"])) == {"[::1]:5"}


async def test_name_that_fails_to_resolve_keeps_its_last_addresses(monkeypatch):
    discovery = Discovery(["dns:///127.0.0.1:5", "a:1"])
    assert await looked_up(discovery) == {"127.0.0.1:5", "a:1"}

    def fail(*args, **kwargs):
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert await looked_up(discovery) == {"127.0.0.1:5", "a:1"}


async def test_a_name_that_fails_to_resolve_is_in_the_log_once_for_each_reason(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "baton.discovery")
    discovery = Discovery(["dns:///no-such.test:5", "dns:///other.test:6"])
    errors = {"no-such.test": socket.gaierror(-2, "Name or service not known")}

    def resolve(host, port, *, type):  # noqa: A002 - getaddrinfo's name
        if host in errors:
            raise errors[host]
        return [(socket.AF_INET, type, 0, "", ("10.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for _ in range(5):
        assert await looked_up(discovery) == {"10.0.0.1:6"}
    errors["no-such.test"] = socket.gaierror(-3, "Temporary failure in name resolution")
    for _ in range(5):
        await looked_up(discovery)
    errors.clear()
    for _ in range(2):
        assert await looked_up(discovery) == {"10.0.0.1:5", "10.0.0.1:6"}
    lost, found = "cannot find the addresses of dns:///no-such.test:5", "dns:///no-such.test:5 is"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", f"{lost}: Name or service not known"),
        ("WARNING", f"{lost}: Temporary failure in name resolution"),
        ("INFO", f"{found} found again; addresses: 1"),
    ]


@pytest.mark.parametrize("text", [None, "nonsense\n", "dns:///name:4\n", b"\xff"])
async def test_a_file_without_addresses_is_in_the_log(tmp_path, caplog, text):
    path = tmp_path / "addresses"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    discovery = Discovery([path.as_uri()])
    for _ in range(3):
        assert await looked_up(discovery) == set()
    (message,) = caplog.messages
    assert f"cannot find the addresses of {path.as_uri()}: " in message


async def test_a_file_has_addresses_that_change(tmp_path):
    path = tmp_path / "addresses"
    discovery = Discovery([path.as_uri(), "a:1"])
    assert await looked_up(discovery) == {"a:1"}  # there is no file yet
    for text, addresses in (
        ("b:2\n[::1]:3\n", {"b:2", "[::1]:3"}),
        ("b:2\nnonsense\n", {"b:2", "[::1]:3"}),
        ("dns:///name:4\n", {"b:2", "[::1]:3"}),
        ("c:5", {"c:5"}),
        ("", set()),
    ):
        path.write_text(text)
        assert await looked_up(discovery) == {"a:1", *addresses}
    assert discovery.name_of("a:1") is None


class HangingResolver:
    """A resolver whose lookups hang until `may_answer` is set."""

    def __init__(self, monkeypatch) -> None:
        self.num_calls = 0
        self.is_called, self.may_answer = threading.Event(), threading.Event()
        self._resolve = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self)

    def __call__(self, *args, **kwargs):
        self.num_calls += 1
        self.is_called.set()
        self.may_answer.wait(30)
        return self._resolve(*args, **kwargs)


async def test_no_other_lookup_starts_while_one_hangs(monkeypatch, caplog):
    monkeypatch.setattr(look_ups, "_TIMEOUT_S", 0.01)
    resolver = HangingResolver(monkeypatch)
    discovery = Discovery(["dns:///127.0.0.1:5", "a:1"])
    for _ in range(3):
        assert await looked_up(discovery) == {"a:1"}
    assert resolver.num_calls == 1
    assert "dns:///127.0.0.1:5: no answer within 0.01 s" in caplog.text
    monkeypatch.setattr(look_ups, "_TIMEOUT_S", 20)
    resolver.may_answer.set()
    assert await looked_up(discovery) == {"127.0.0.1:5", "a:1"}
    assert resolver.num_calls == 1
    await looked_up(discovery)
    assert resolver.num_calls == 2


async def test_names_are_looked_up_again_after_a_thread_could_not_be_started(monkeypatch):
    discovery = Discovery(["dns:///127.0.0.1:5"])

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            await discovery.look_up()
    assert await looked_up(discovery) == {"127.0.0.1:5"}


def test_a_look_up_that_hangs_does_not_keep_the_event_loop_from_ending(monkeypatch):
    resolver = HangingResolver(monkeypatch)

    async def leave() -> None:
        lookup = asyncio.create_task(Discovery(["dns:///127.0.0.1:5"]).look_up())
        await asyncio.to_thread(resolver.is_called.wait, 10)
        lookup.cancel()

    process = threading.Thread(target=lambda: asyncio.run(leave()))
    process.start()
    process.join(10)
    has_ended = not process.is_alive()
    resolver.may_answer.set()
    process.join()
    assert has_ended


class FailingSource:
    """A source that fails twice while it is followed, and has one address after that."""

    addresses = frozenset()

    def __init__(self):
        self.num_calls = 0

    async def follow(self, on_change):
        self.num_calls += 1
        if self.num_calls < 3:
            raise RuntimeError("the source is broken")
        self.addresses = frozenset({"a:1"})
        on_change()


async def test_a_source_that_fails_is_followed_again(caplog):
    discovery = Discovery((), interval_s=0.0)
    discovery._sources = (FailingSource(),)
    changed = asyncio.Event()
    discovery.on_change(changed.set)
    async with asyncio.timeout(10):
        await discovery.run()
    assert changed.is_set()
    assert discovery.addresses == {"a:1"}
    assert caplog.text.count("unexpected failure of discovery") == 2


async def test_look_ups_are_repeated_after_an_unexpected_failure(monkeypatch, caplog):
    discovery = Discovery(["dns:///127.0.0.1:5"], interval_s=0.0)
    failures = [RuntimeError("broken"), RuntimeError("broken")]
    look_up = discovery.look_up

    async def fail_at_first():
        if failures:
            raise failures.pop()
        await look_up()

    monkeypatch.setattr(discovery, "look_up", fail_at_first)
    changed = asyncio.Event()
    discovery.on_change(changed.set)
    running = asyncio.create_task(discovery.run())
    async with asyncio.timeout(10):
        await changed.wait()
    assert discovery.addresses == {"127.0.0.1:5"}
    assert caplog.text.count("unexpected failure of discovery") == 2
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def followed(*targets, announcements, **labels):
    """Returns a discovery of announced workers, and the task that follows them."""
    discovery = Discovery(targets, scope=Scope(announcements, labels))
    task = asyncio.create_task(discovery.run())
    await asyncio.sleep(0)  # the sources begin to follow
    await asyncio.sleep(0)
    return discovery, task


async def test_labels_select_announced_workers():
    announcements = Announcements()
    announcements.announce("a:1", {"model": "m", "role": "decode", "hardware": "h100"})
    options = {"announcements": announcements, "model": "m", "role": "decode"}
    every, all_task = await followed("register:///", **options)
    h100, h100_task = await followed("register:///?hardware=h100", **options)
    prefill, prefill_task = await followed("register:///?role=prefill", "s:9", **options)
    changes = []
    every.on_change(lambda: changes.append(every.addresses))
    announcements.announce("b:2", {"model": "m", "role": "decode"})
    announcements.announce("c:3", {"model": "m", "role": "prefill", "hardware": "h100"})
    announcements.announce("d:4", {"model": "other", "role": "decode", "hardware": "h100"})
    announcements.announce("e:5", {"model": "m", "role": "both", "hardware": "h100"})
    assert every.addresses == {"a:1", "b:2", "e:5"}
    assert h100.addresses == {"a:1", "e:5"}
    assert prefill.addresses == {"c:3", "e:5", "s:9"}
    announcements.announce("a:1", {"model": "m", "role": "prefill"})  # its role has changed
    announcements.withdraw("b:2")
    announcements.withdraw("b:2")
    assert every.addresses == {"e:5"}
    assert h100.addresses == {"e:5"}
    assert prefill.addresses == {"a:1", "c:3", "e:5", "s:9"}
    assert changes == [{"a:1", "b:2"}, {"a:1", "b:2", "e:5"}, {"b:2", "e:5"}, {"e:5"}]
    for task in (all_task, h100_task, prefill_task):
        task.cancel()
    await asyncio.gather(all_task, h100_task, prefill_task, return_exceptions=True)
    announcements.withdraw("c:3")  # nobody follows any more
    assert "c:3" in prefill.addresses


def test_announced_workers_need_a_port_to_which_they_can_announce_themselves():
    with pytest.raises(ConfigurationError, match="'register:///': workers announce themselves to"):
        Discovery(["register:///"])
