"""Free ports: who may take them, and what a machine that has none says."""

import errno
import os
import socket
import sys

import pytest

from baton.common import ports as common_ports
from baton.common.errors import ConfigurationError
from worker.processes import ports
from worker.processes.ports import bound_ports, free_port


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EAFNOSUPPORT, "choose another --host"),
        (errno.EMFILE, "raise the limit of open files (ulimit -n)"),
    ],
)
def test_a_socket_that_cannot_be_made_is_a_typed_error(number, remedy, monkeypatch):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(ConfigurationError) as raised:
        bound_ports([("::1", 0, "--port")])
    assert raised.value.message == f"cannot listen on [::1]:0: {os.strerror(number)}; {remedy}"


def test_a_port_in_use_and_a_bad_host_name_their_flags():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigurationError, match="choose another --metrics-port"):
            bound_ports([("127.0.0.1", port, "--metrics-port")])
    with pytest.raises(ConfigurationError, match="not a valid host name; choose another --host"):
        bound_ports([("\u00fc" * 64, 0, "--port")])


def test_a_free_port_may_belong_to_a_worker_that_has_not_bound_it_yet(monkeypatch):
    monkeypatch.setattr(
        ports, "bound_ports", lambda wanted: [7000 + index for index, _ in enumerate(wanted)]
    )
    assert free_port("127.0.0.1", []) == 7000
    assert free_port("127.0.0.1", [":7000", ":7001"]) == 7002


@pytest.mark.skipif(sys.platform != "linux", reason="other systems differ in TIME_WAIT")
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_only_a_server_that_asks_for_a_free_port_by_its_number_gets_it(host):
    (port,) = bound_ports([(host, 0, "--port")])
    with socket.socket() as other, pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
        other.bind(("127.0.0.1", port))  # as for any other use
    with socket.create_server(("127.0.0.1", port)) as server:
        assert server.getsockname()[1] == port
    assert bound_ports([(host, port, "--port")]) == [port]


def test_a_port_that_cannot_be_connected_to_is_free_all_the_same(monkeypatch):
    monkeypatch.setattr(common_ports, "_CONNECT_TIMEOUT_S", 0.0)  # the connection is not waited for
    assert free_port("127.0.0.1") > 0
