"""`tests.support.ports`: the ports of servers that tests stop and start again."""

import socket

import pytest

from tests.support import ports
from tests.support.ports import reserved_port, reserved_ports


@pytest.fixture
def ephemeral(tmp_path, monkeypatch):
    """Writes the range from which the system draws ports."""
    monkeypatch.setattr(ports, "_EPHEMERAL_RANGE", path := tmp_path / "range")
    return path.write_text


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("32768\t60999\n", range(10_000, 32768)),
        ("1024\t20000\n", range(20_001, 65536)),
        ("1024\t65535\n", range(10_000, 65536)),  # nothing is outside of it
        ("9000\t62000\n", range(10_000, 65536)),
    ],
)
def test_they_are_outside_of_the_ephemeral_range_if_there_is_room(
    ephemeral, monkeypatch, written, expected
):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
    ephemeral(written)
    assert ports._share() == expected


def test_without_a_known_range_it_is_that_of_linux(ephemeral, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    assert ports._share() == range(10_000, 32768)


def test_each_process_has_its_own(ephemeral, monkeypatch):
    ephemeral("32768 60999")
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "3")
    shares = []
    for index in range(3):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{index}")
        shares.append(ports._share())
    assert [port for share in shares for port in share] == [*range(10_000, 32768)]


def test_none_is_drawn_twice_and_none_that_is_in_use():
    found = [reserved_port() for _ in range(50)]
    assert len(set(found)) == 50
    with socket.create_server(("127.0.0.1", found[0])):
        assert not ports._is_free(found[0])
    assert ports._is_free(found[1])


def test_several_are_consecutive():
    first, *others = reserved_ports(4)
    assert others == [first + 1, first + 2, first + 3]


def test_the_oldest_are_drawn_again_when_half_of_the_share_was(ephemeral, monkeypatch):
    monkeypatch.setattr(ports, "_share", lambda: range(20_000, 20_008))
    monkeypatch.setattr(ports, "_is_free", lambda port: True)
    monkeypatch.setattr(ports, "_drawn", {})
    found = [reserved_port() for _ in range(100)]
    for index in range(4, 100):
        assert found[index] not in found[index - 4 : index]


def test_a_share_without_a_free_port_is_an_error(monkeypatch):
    monkeypatch.setattr(ports, "_is_free", lambda port: False)
    with pytest.raises(RuntimeError, match="found no free ports between"):
        reserved_port()
