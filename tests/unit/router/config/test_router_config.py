"""The router's configuration, flags and targets, and `Discovery`."""

import asyncio
import logging
import socket
import threading
from pathlib import Path

import pytest

from baton.common.errors import ConfigurationError
from baton.common.flags.parser import FlagParser
from router.config import discovery as discovery_module
from router.config.discovery import Discovery, FileTarget, HostTarget, parse_target
from router.config.http import HttpConfig
from router.config.router import RouterConfig, ServedModelConfig, add_args, router_config_from_args
from rpc.server_config import ServerConfig


def config_of(*flags):
    parser = FlagParser()
    add_args(parser)
    return router_config_from_args(parser.parse_args(flags))


def parse_config(*flags):
    return config_of("--model", "org/name", *flags)


def parse_model(*flags):
    (model,) = parse_config(*flags).models
    return model


def test_flags_set_the_configuration():
    config = parse_config(
        *("--decode", "a:1, b:2", "--decode", "dns:///d:3", "--prefill", "p:4,"),
        *("--port", "7", "--grpc-port", "none", "--max-local-prefill-tokens", "0"),
        *("--default-timeout-s", "1.5"),
    )
    (model,) = config.models
    assert model.decode == ("a:1", "b:2", "dns:///d:3")
    assert model.prefill == ("p:4",)
    assert (config.http.port, config.grpc.port) == (7, None)
    assert (config.max_local_prefill_tokens, config.default_timeout_s) == (0, 1.5)


def test_defaults_are_those_of_the_dataclass():
    config = parse_config("--decode", "a:1")
    model = ServedModelConfig(model="org/name", decode=("a:1",))
    servers = {"http": HttpConfig(port=8000), "grpc": ServerConfig(port=50051)}
    assert config == RouterConfig(models=(model,), **servers)
    assert model.names == ("name",)
    (model,) = parse_config("--decode", "a:1", "--served-model-name", "n,m").models
    assert model.names == ("n", "m")


def test_connections_stay_open_for_longer_than_load_balancers_keep_them():
    """One that closes first loses the request that the load balancer is sending on it."""
    assert HttpConfig().keep_alive_timeout_s > 75


def test_the_revision_is_part_of_the_name():
    assert parse_model("--decode", "a:1", "--revision", "v2").model == "org/name@v2"


def test_one_of_the_servers_must_be_on():
    with pytest.raises(ConfigurationError, match="--port and --grpc-port are both none"):
        parse_config("--decode", "a:1", "--port", "none", "--grpc-port", "none")


def test_the_servers_have_ports_of_their_own():
    message = "--port and --grpc-port are both 8123; each server needs a port of its own"
    with pytest.raises(ConfigurationError, match=message):
        parse_config("--decode", "a:1", "--port", "8123", "--grpc-port", "8123")
    config = parse_config("--decode", "a:1", "--port", "0", "--grpc-port", "0")
    assert (config.http.port, config.grpc.port) == (0, 0)


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_a_number_that_is_no_port_names_its_flag(flag):
    with pytest.raises(ConfigurationError, match=rf"^{flag} is 70000; it must be in"):
        parse_config("--decode", "a:1", flag, "70000")


def test_the_switch_of_vllm_for_tool_calls_changes_nothing():
    assert parse_config("--decode", "a:1", "--enable-auto-tool-choice") == parse_config(
        "--decode", "a:1"
    )


def test_a_file_names_several_models(tmp_path):
    path = tmp_path / "models.yaml"
    path.write_text(
        "- {model: org/a, decode: 'a:1,a:2', served-model-name: [a, first]}\n"
        "- {model: org/b, decode: ['b:1'], prefill: 'b:2', reasoning_parser: qwen3}\n"
    )
    config = config_of("--models", str(path))
    assert config.models == (
        ServedModelConfig(model="org/a", decode=("a:1", "a:2"), served_model_name=("a", "first")),
        ServedModelConfig(
            model="org/b", decode=("b:1",), prefill=("b:2",), reasoning_parser="qwen3"
        ),
    )


def test_flags_of_a_model_beside_a_file_are_refused(tmp_path):
    path = tmp_path / "models.yaml"
    path.write_text("- {model: m, decode: 'a:1'}")
    with pytest.raises(ConfigurationError, match="--models is set; give no flags of a model"):
        config_of("--models", str(path), "--decode", "b:1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", r"models.yaml:\d: (did not find )?expected (the )?node content"),
        ("{}", "must be a list of mappings"),
        ("- a", "models.yaml:1: must be a mapping"),
        ("- {decode: 'a:1'}", "entry 0: --model is missing"),
        ("- {model: m}", "entry 0: --decode is missing"),
        (
            "- {model: m, decode: 'a:1', decod: 'b:1'}",
            "entry 0: .*models.yaml:1: unknown flag decod; did you mean decode",
        ),
        ("- {model: m, decode: 'a:1'}\n- {model: x/m, decode: 'a:2'}", "m is the name of two"),
    ],
)
def test_a_bad_file_of_models_is_refused(text, message, tmp_path):
    path = tmp_path / "models.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        config_of("--models", str(path))


def test_the_generation_config_is_one_of_two(capsys):
    assert parse_model("--decode", "a:1").generation_config == "auto"
    none = parse_model("--decode", "a:1", "--generation-config", "none")
    assert none.generation_config == "none"
    with pytest.raises(SystemExit):
        parse_config("--decode", "a:1", "--generation-config", "vllm")
    assert "--generation-config: invalid choice: 'vllm'" in capsys.readouterr().err


def test_the_marks_of_the_reasoning_part_are_texts():
    config = parse_model("--decode", "a:1")
    assert (config.reasoning_start_str, config.reasoning_end_str) == (None, None)
    flags = ("--reasoning-start-str", "<think>", "--reasoning-end-str=--end--")
    config = parse_model("--decode", "a:1", *flags)
    assert (config.reasoning_start_str, config.reasoning_end_str) == ("<think>", "--end--")


@pytest.mark.parametrize(
    "flags",
    [
        ("--decode", ""),
        ("--decode", "a:1", "--max-local-prefill-tokens", "-1"),
        ("--decode", "a:1", "--max-affinity-delay-s", "-1"),
        ("--decode", "a:1", "--max-affinity-delay-s", "nan"),
        ("--decode", "a:1", "--default-timeout-s", "0"),
        ("--decode", "a:1", "--default-timeout-s", "nan"),
        ("--decode", "a:1", "--default-timeout-s", "inf"),
        ("--decode", "a:1", "--default-timeout-s", "1e7"),
        ("--decode", "a:1", "--resume-timeout-s", "inf"),
        ("--decode", "a:1", "--resume-timeout-s", "nan"),
        ("--decode", "a:1", "--max-concurrent-requests", "0"),
        ("--decode", "a:1", "--resume-timeout-s", "-1"),
        ("--decode", "a:1", "--dns-interval-s", "0"),
    ],
)
def test_bad_values_name_their_flag(flags):
    with pytest.raises(ConfigurationError, match=rf"^{flags[-2]} is"):
        parse_config(*flags)


def test_the_longest_timeout_in_milliseconds_fits_32_bits():
    flags = ("--default-timeout-s", "4294967", "--resume-timeout-s", "4294967")
    config = parse_config("--decode", "a:1", *flags)
    assert config.default_timeout_s * 1000 < 2**32
    assert config.resume_timeout_s == config.default_timeout_s
    with pytest.raises(ConfigurationError, match=r"must be in \(0, 4294967\]"):
        parse_config("--decode", "a:1", "--default-timeout-s", "4294968")


@pytest.mark.parametrize("flag", ["--decode", "--prefill"])
def test_a_malformed_target_is_refused_with_the_flags(flag):
    with pytest.raises(ConfigurationError, match="target 'foo' must be host:port"):
        parse_config("--decode", "a:1", flag, "foo")


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("host:1", HostTarget("host", 1, is_dns=False)),
        ("[::1]:65535", HostTarget("[::1]", 65535, is_dns=False)),
        ("dns:///name.of.it:2", HostTarget("name.of.it", 2, is_dns=True)),
        ("file:///run/of it", FileTarget(Path("/run/of it"))),
    ],
)
def test_targets_are_parsed(text, target):
    assert parse_target(text) == target


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
    ],
)
def test_bad_targets_are_refused(text):
    with pytest.raises(ConfigurationError, match="must be host:port, dns:///name:port or file"):
        Discovery([text])


async def test_static_targets_are_their_own_addresses():
    discovery = Discovery(["a:1", "b:2", "a:1"])
    assert discovery.is_static
    assert await discovery.addresses() == {"a:1", "b:2"}
    assert not Discovery(["a:1", "dns:///b:2"]).is_static


async def test_dns_names_resolve():
    assert "127.0.0.1:5" in await Discovery(["dns:///127.0.0.1:5"]).addresses()
    assert await Discovery(["dns:///::1:5"]).addresses() == {"[::1]:5"}


async def test_name_that_fails_to_resolve_keeps_its_last_addresses(monkeypatch):
    discovery = Discovery(["dns:///127.0.0.1:5", "a:1"])
    assert await discovery.addresses() == {"127.0.0.1:5", "a:1"}

    def fail(*args, **kwargs):
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert await discovery.addresses() == {"127.0.0.1:5", "a:1"}


async def test_a_name_that_fails_to_resolve_is_in_the_log_once_for_each_reason(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "baton.router")
    discovery = Discovery(["dns:///no-such.test:5", "dns:///other.test:6"])
    errors = {"no-such.test": socket.gaierror(-2, "Name or service not known")}

    def resolve(host, port, *, type):  # noqa: A002 - getaddrinfo's name
        if host in errors:
            raise errors[host]
        return [(socket.AF_INET, type, 0, "", ("10.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for _ in range(5):
        assert await discovery.addresses() == {"10.0.0.1:6"}
    errors["no-such.test"] = socket.gaierror(-3, "Temporary failure in name resolution")
    for _ in range(5):
        await discovery.addresses()
    errors.clear()
    for _ in range(2):
        assert await discovery.addresses() == {"10.0.0.1:5", "10.0.0.1:6"}
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
        assert await discovery.addresses() == set()
    (message,) = caplog.messages
    assert f"cannot find the addresses of {path.as_uri()}: " in message


async def test_a_file_has_addresses_that_change(tmp_path):
    path = tmp_path / "addresses"
    discovery = Discovery([path.as_uri(), "a:1"])
    assert not discovery.is_static
    assert await discovery.addresses() == {"a:1"}  # there is no file yet
    for text, addresses in (
        ("b:2\n[::1]:3\n", {"b:2", "[::1]:3"}),
        ("b:2\nnonsense\n", {"b:2", "[::1]:3"}),
        ("dns:///name:4\n", {"b:2", "[::1]:3"}),
        ("c:5", {"c:5"}),
        ("", set()),
    ):
        path.write_text(text)
        assert await discovery.addresses() == {"a:1", *addresses}
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
    monkeypatch.setattr(discovery_module, "_RESOLVE_TIMEOUT_S", 0.01)
    resolver = HangingResolver(monkeypatch)
    discovery = Discovery(["dns:///127.0.0.1:5", "a:1"])
    for _ in range(3):
        assert await discovery.addresses() == {"a:1"}
    assert resolver.num_calls == 1
    assert "dns:///127.0.0.1:5: no answer within 0.01 s" in caplog.text
    monkeypatch.setattr(discovery_module, "_RESOLVE_TIMEOUT_S", 20)
    resolver.may_answer.set()
    assert await discovery.addresses() == {"127.0.0.1:5", "a:1"}
    assert resolver.num_calls == 1
    await discovery.addresses()
    assert resolver.num_calls == 2


def test_a_look_up_that_hangs_does_not_keep_the_event_loop_from_ending(monkeypatch):
    resolver = HangingResolver(monkeypatch)

    async def leave() -> None:
        lookup = asyncio.create_task(Discovery(["dns:///127.0.0.1:5"]).addresses())
        await asyncio.to_thread(resolver.is_called.wait, 10)
        lookup.cancel()

    process = threading.Thread(target=lambda: asyncio.run(leave()))
    process.start()
    process.join(10)
    has_ended = not process.is_alive()
    resolver.may_answer.set()
    process.join()
    assert has_ended
