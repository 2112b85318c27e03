"""HTTP on a unix socket, from the flag to its removal."""

from argparse import ArgumentParser
from dataclasses import replace

import httpx2
import pytest

from baton.common.errors import ConfigurationError
from baton.common.flags.parser import FlagParser
from router.config.http import HttpConfig
from router.config.router import add_args, flags_of_router, router_config_from_args
from rpc.unix_socket import UnixSocket
from tests.support.fake_workers import FakeDecode, running_workers
from tests.support.running_router import running_router

FLAGS = ("--model", "demo", "--decode", "127.0.0.1:1")


def parsed(*flags: str):
    parser: ArgumentParser = FlagParser()
    add_args(parser)
    return router_config_from_args(parser.parse_args([*FLAGS, *flags]))


async def test_a_completion_comes_over_the_socket_which_goes_with_the_router(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    remove, removed = UnixSocket.remove, []
    monkeypatch.setattr(UnixSocket, "remove", lambda opened: removed.append(remove(opened)))
    config = HttpConfig(port=None, uds="http.sock")
    decode = FakeDecode([300] * 4)
    async with (
        running_workers(decode),
        running_router(decode, http=config) as router,
        httpx2.AsyncClient(
            transport=httpx2.AsyncHTTPTransport(uds="http.sock"),
            base_url="http://localhost",
            timeout=30,
        ) as client,
    ):
        body = {"prompt": [72, 105], "max_tokens": 1}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert (await client.get("/status")).status_code == 403  # clients of a proxy may ask
        await router.service.drain(20)
        assert not (tmp_path / "http.sock").exists()
    assert len(removed) == 1  # the stop after the drain leaves the path to the next server


def test_a_router_takes_the_socket_in_place_of_the_port():
    config = parsed("--uds", "/run/http.sock")
    assert (config.http.uds, config.http.port) == ("/run/http.sock", None)
    flags = flags_of_router(replace(config))
    assert flags[flags.index("--uds") + 1] == "/run/http.sock"
    assert parsed("--uds", "/run/http.sock", "--grpc-port", "none").http.is_on


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--uds", ""), "--uds is ''; it must be a path"),
        (("--uds", "a.sock", "--port-file", "port"), "--port-file is set"),
    ],
)
def test_a_socket_with_what_it_lacks_is_refused(flags, message):
    with pytest.raises(ConfigurationError, match=message):
        parsed(*flags)
