import socket
import stat

import pytest

from baton.common.errors import ConfigurationError
from rpc.unix_socket import UnixSocket


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # absolute paths of tests are longer than paths of sockets may be
    return "http.sock"


def connects(path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(path)
        except OSError:
            return False
        return True


def test_its_group_may_connect_and_it_goes_when_it_is_removed(path, tmp_path):
    opened = UnixSocket.open(path, 8)
    with opened.listener:
        assert stat.S_IMODE((tmp_path / path).stat().st_mode) == 0o660
        assert connects(path)
        opened.remove()
        opened.remove()
    assert not (tmp_path / path).exists()


def test_a_socket_that_a_killed_server_left_is_replaced(path):
    UnixSocket.open(path, 8).listener.close()
    assert not connects(path)
    opened = UnixSocket.open(path, 8)
    with opened.listener:
        assert connects(path)


def test_a_socket_in_use_is_refused_and_stays(path):
    with UnixSocket.open(path, 8).listener:
        with pytest.raises(ConfigurationError, match="is in use by another process"):
            UnixSocket.open(path, 8)
        assert connects(path)


def test_the_socket_of_another_server_is_not_removed(path, tmp_path):
    first = UnixSocket.open(path, 8)
    (tmp_path / path).unlink()
    second = UnixSocket.open(path, 8)
    with first.listener, second.listener:
        first.remove()
        assert connects(path)


def test_what_is_no_socket_is_refused_and_stays(path, tmp_path):
    (tmp_path / path).write_text("mine")
    with pytest.raises(ConfigurationError, match="exists and is no socket"):
        UnixSocket.open(path, 8)
    assert (tmp_path / path).read_text() == "mine"


@pytest.mark.parametrize("bad", ["absent/http.sock", f"{'x' * 108}"])
def test_a_path_that_cannot_be_bound_is_refused(path, bad):
    with pytest.raises(ConfigurationError, match="cannot listen on --uds"):
        UnixSocket.open(bad, 8)
