"""The processes of a router: their flags, their secrets, and the plan of a cluster with them."""

from dataclasses import replace
from pathlib import Path

import pytest

from baton.cli.router import add_args
from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import config_from_args
from baton.common.flags.parser import FlagParser
from baton.common.security.cluster import TOKEN_VARIABLE
from baton.up.plan import ClusterConfig, plan_cluster
from baton.up.router_processes import process_specs
from engine.config import EngineConfig
from router.config.processes import ProcessesConfig
from router.config.router import add_args as add_router_args
from router.config.router import router_config_from_args
from router.processes.place import ProcessPlace

KEY = "sk-a-key-of-this-test"


def config_of(*arguments: str, add=add_router_args):
    parser = FlagParser.of_command("test", lambda args: 0, add)
    return router_config_from_args(parser.parse_args(list(arguments)))


def test_each_process_has_the_routers_flags_and_a_place_but_no_secret_in_its_flags(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "the-token-of-this-test")
    config = config_of("--model", "m", "--decode", "a:1,b:2", "--api-key", KEY, "--port", "9")
    specs = process_specs(config, 2, Path("/run/x"))
    assert [spec.name for spec in specs.values()] == ["router-0", "router-1"]
    for place, spec in specs.items():
        assert not any("test" in argument for argument in spec.arguments)
        assert spec.environment[TOKEN_VARIABLE] == "the-token-of-this-test"
        assert ProcessPlace.from_environment(spec.environment) == place
        security = config.security
        open_security = replace(security, tenants=replace(security.tenants, api_key=()))
        assert config_of(*spec.arguments) == replace(config, security=open_security)
    assert len({place.target for place in specs}) == 2
    assert ProcessPlace.from_environment({}) is None


def test_models_of_a_file_are_read_by_each_process(tmp_path):
    path = tmp_path / "models.yaml"
    path.write_text("[{model: a, decode: 'a:1'}, {model: b, decode: 'b:1'}]")
    config = config_of("--models", str(path))
    specs = process_specs(config, 2, Path("/run/x"), str(path))
    assert {config_of(*spec.arguments) for spec in specs.values()} == {config}


@pytest.mark.parametrize("number", [0, 65])
def test_a_number_out_of_range_is_refused(number):
    with pytest.raises(ConfigurationError, match=f"--processes is {number}; it must be in"):
        ProcessesConfig(processes=number)


def test_a_cluster_starts_one_parent_for_several_processes():
    engine = EngineConfig(model="/models/some", kv_connector="shm://x")
    cluster = ClusterConfig.grpc_only(engine)
    one, two = (plan_cluster(replace(cluster, router_processes=n)).router for n in (1, 2))
    assert (one.spec.module, one.is_parent) == ("router", False)
    assert (two.spec.module, two.is_parent) == ("baton.cli.router", True)
    parser = FlagParser.of_command("test", lambda args: 0, add_args)
    args = parser.parse_args(list(two.spec.arguments))
    assert config_from_args(ProcessesConfig, args).processes == 2
