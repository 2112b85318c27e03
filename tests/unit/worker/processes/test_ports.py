"""Free ports: what a machine that has none says."""

import errno
import os
import socket

import pytest

from baton.common.errors import ConfigurationError
from worker.processes.ports import bound_ports


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
