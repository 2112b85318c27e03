"""A redis name with several addresses, one of which drops packets or never answers."""

import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack, closing, contextmanager

import pytest

from tests.support.redis_server import running_redis_server

_NAME = "redis.test"  # `.test` is reserved, so that no name server is asked
_CALLS = """
import logging, sys, time
logging.basicConfig(format="%(message)s", stream=sys.stdout)
from kvstore.conformance.objects import filled, random_keys, read
from kvstore.registry import open_store
store = open_store(sys.argv[1])
keys = random_keys(2)
for key in keys:
    store.put([key], [filled(1, 100_000)])
    assert read(store, key, 100_000) == filled(1, 100_000).to_bytes()
store.close()
print("done")
"""


@contextmanager
def dropping(port):
    """Lets a port of ::1 drop what comes: its queue of connections is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_INET6))
        try:
            listener.bind(("::1", port))
        except OSError:
            pytest.skip("needs IPv6 on the loopback interface")
        listener.listen(0)
        for _ in range(8):
            client = stack.enter_context(socket.socket(socket.AF_INET6))
            client.setblocking(False)
            client.connect_ex(("::1", port))
        with pytest.raises(TimeoutError):
            socket.create_connection(("::1", port), timeout=0.2)
        yield


@contextmanager
def silent(port):
    """Lets a port of ::1 accept connections and answer nothing, as a stopped server does."""
    try:
        listener = socket.create_server(("::1", port), family=socket.AF_INET6)
    except OSError:
        pytest.skip("needs IPv6 on the loopback interface")
    with listener:
        yield


def run_with_hosts(folder, url):
    """Runs a store's calls in a mount namespace where the name has the addresses."""
    hosts = folder / "hosts"
    hosts.write_text(f"::1 {_NAME}\n127.0.0.1 {_NAME}\n")
    script = 'mount --bind "$0" /etc/hosts && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, str(hosts), sys.executable, "-c", _CALLS]
    return subprocess.run([*command, url], check=False, capture_output=True, text=True, timeout=60)


@pytest.fixture
def namespaces():
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("a mount namespace needs root and unshare")
    probe = subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True)
    if probe.returncode:
        pytest.skip(f"no mount namespace: {probe.stderr.decode().strip()}")


@pytest.mark.parametrize("fault", [dropping, pytest.param(silent, marks=pytest.mark.slow)])
def test_an_address_that_does_not_answer_costs_its_share_once(namespaces, tmp_path, fault):
    with running_redis_server() as server, fault(server.port):
        done = run_with_hosts(tmp_path, f"redis://{_NAME}:{server.port}?timeout_s=4")
        assert done.stdout.endswith("done\n"), done
        warning, _ = done.stdout.splitlines()
        assert warning == f"redis {_NAME}:{server.port}: ::1: not answered in time"


@pytest.mark.slow
def test_all_addresses_are_named_if_none_answers(namespaces, tmp_path):
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with silent(port):
            done = run_with_hosts(tmp_path, f"redis://{_NAME}:{port}?timeout_s=3")
    last = done.stderr.splitlines()[-1]
    assert "::1: not answered in time; 127.0.0.1: Connection refused" in last
