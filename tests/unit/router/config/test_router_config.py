"""The router's configuration, its flags and its targets."""

import pytest

from baton.common.errors import ConfigurationError
from baton.common.flags.parser import FlagParser
from router.config.http import HttpConfig
from router.config.router import RouterConfig, add_args, router_config_from_args
from router.config.served_model import ServedModelConfig
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


@pytest.mark.parametrize("folder", ["", "a\0b"])
def test_a_folder_of_batches_is_a_path(folder):
    with pytest.raises(ConfigurationError, match=r"^--batch-folder is '.*'; it must be a path"):
        HttpConfig(batch_folder=folder)


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
def test_the_endpoint_picker_has_a_port_of_its_own(flag):
    message = f"{flag} and --endpoint-picker-port are both 8123; each server needs a port"
    with pytest.raises(ConfigurationError, match=message):
        parse_config("--decode", "a:1", flag, "8123", "--endpoint-picker-port", "8123")


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
