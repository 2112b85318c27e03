"""URLs of peer connectors, and the address of a peer in handoffs."""

import ipaddress

import pytest

from baton.common.errors import ConfigurationError
from kvstore.peer.address import PeerUrl


def test_default_values():
    url = PeerUrl.parse("grpc://")
    assert (url.host, url.port, url.advertised_host) == ("127.0.0.1", 0, "127.0.0.1")
    assert (url.lease_s, url.timeout_s) == (30, 2)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("grpc://node7", "node7", 0),
        ("grpc://:7000", "127.0.0.1", 7000),
        ("nixl://10.0.0.1:7000/", "10.0.0.1", 7000),
        ("nixl://[::1]:7000", "::1", 7000),
    ],
)
def test_hosts_and_ports_are_parsed(text, host, port):
    url = PeerUrl.parse(text)
    assert (url.host, url.port, url.advertised_host) == (host, port, host)


def test_options_are_parsed():
    url = PeerUrl.parse("nixl://0.0.0.0?lease_s=5&timeout_s=0.5&advertise=prefill-0")
    assert (url.lease_s, url.timeout_s) == (5, 0.5)
    assert url.advertised_host == "prefill-0"


def test_a_peer_that_listens_on_all_interfaces_advertises_an_address_of_this_machine(monkeypatch):
    url = PeerUrl.parse("grpc://0.0.0.0")
    assert not ipaddress.ip_address(url.advertised_host).is_unspecified

    def refuse(*_):
        raise OSError("no route")

    monkeypatch.setattr("socket.socket.connect", refuse)
    with pytest.raises(ConfigurationError, match="advertise=HOST"):
        PeerUrl.parse("grpc://0.0.0.0")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("nixl://?mode=push", "unknown option 'mode'; it takes advertise, lease_s, timeout_s"),
        ("grpc://?ttl_s=5", "ttl_s"),
        ("grpc://?lease_s=0.01", "lease_s is 0.01; it must be 0.1 to 86400"),
        ("grpc://?timeout_s=600", "timeout_s is 600; it must be 0.01 to 60"),
        ("grpc://?lease_s=soon", "lease_s"),
        ("grpc://host/path", "/path"),
        ("grpc://host:port", "Port"),
        ("grpc://host:70000", "Port"),
        ("grpc://user:secret@host", "a user and a password"),
    ],
)
def test_the_error_of_an_invalid_url_names_the_problem(text, complaint):
    with pytest.raises(ConfigurationError, match=complaint) as refused:
        PeerUrl.parse(text)
    assert "secret" not in str(refused.value)


def test_ranks_of_one_url_listen_on_ports_of_their_own():
    assert [PeerUrl.parse("grpc://:7000").of_rank(rank).port for rank in range(3)] == [
        7000,
        7001,
        7002,
    ]
    assert PeerUrl.parse("grpc://").of_rank(3) == PeerUrl.parse("grpc://"), "each takes a free one"
