"""`docker-compose.yml` and the Dockerfile, as far as a machine without Docker can check them."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys

import grpc
import pytest
import yaml

from baton import Client, SamplingParams
from baton.cli import build_parser
from baton.cli.openai_endpoint import OpenAiEndpoint
from baton.common.flags.sources import variable_of
from baton.v1 import worker_pb2, worker_pb2_grpc
from rpc.probe import wait_until_serving
from rpc.server_config import ServerConfig
from tests.support.compose import (
    ROOT,
    ROUTER_HTTP,
    ComposeProcesses,
    image_entrypoint,
    load_compose,
    mount_of,
)

START_TIMEOUT_S = 90


def test_compose_accepts_the_file():
    compose = shutil.which("docker-compose")
    if compose is None:
        pytest.skip("docker-compose is not installed")
    result = subprocess.run(
        [compose, "-f", ROOT / "docker-compose.yml", "config", "--services"],
        capture_output=True,
        text=True,
        check=True,
    )
    observability = {"prometheus", "grafana"}
    services = set(result.stdout.split()) - observability - {"router-2"}
    assert services == {"redis", "router", "prefill", "decode"}


def test_tiers_can_scale():
    """A fixed name or a published port would allow one replica only."""
    services = load_compose({})
    for tier in ("prefill", "decode"):
        assert not {"container_name", "ports", "hostname"} & services[tier].keys()
        assert f"--{tier}=dns:///{tier}:50051" in services["router"]["command"]


def test_environment_chooses_model_port_and_memory():
    ports = {"BATON_PORT": "9", "BATON_GRPC_PORT": "10"}
    services = load_compose({"BATON_MODEL": "/models/big", "BATON_REDIS_MEMORY": "1gb", **ports})
    for service in ("router", "decode"):
        model = services[service]["volumes"][0]
        assert mount_of(model) == ("/models/big", "/model")
        assert (model["type"], model["read_only"]) == ("bind", True)
    assert services["router"]["ports"] == ["9:8000", "10:50051"]
    assert "1gb" in services["redis"]["command"]


@pytest.mark.parametrize("name", ["redis", "nixl", "shm"])
def test_the_connector_is_a_variable_with_a_file_per_kind(name):
    lines = (ROOT / "deploy" / "compose" / f"{name}.env").read_text().splitlines()
    variables = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    services = load_compose(variables)
    for tier in ("prefill", "decode"):
        connector = services[tier]["environment"]["BATON_KV_CONNECTOR"]
        assert connector.startswith(f"{name}://")
        assert (
            name != "redis"
            or connector == load_compose({})[tier]["environment"]["BATON_KV_CONNECTOR"]
        )
        assert "shm:/dev/shm" in services[tier]["volumes"]
        assert services[tier]["build"]["args"]["EXTRAS"] == ("nixl" if name == "nixl" else "")


def test_services_that_end_are_started_again_and_may_drain_before():
    for name, service in load_compose({}).items():
        assert service["restart"] == "unless-stopped"
        if name != "redis":
            grace_s = float(service["stop_grace_period"].removesuffix("s"))
            assert grace_s > ServerConfig().drain_timeout_s


def test_every_service_calls_the_model_by_one_name():
    for environment, name in ({}, "baton-demo"), ({"BATON_MODEL_NAME": "big"}, "big"):
        services = load_compose(environment)
        for service in ("router", "prefill", "decode"):
            assert f"--served-model-name={name}" in services[service]["command"]


def test_the_image_checks_the_port_that_services_listen_on():
    dockerfile = (ROOT / "Dockerfile").read_text()
    (check,) = re.findall(r"^HEALTHCHECK[^\[]*(\[.*\])$", dockerfile, re.MULTILINE)
    assert image_entrypoint() == ["baton"]
    assert json.loads(check) == ["baton", "health", "127.0.0.1:50051"]
    for name, service in load_compose({}).items():
        flag = "--grpc-port=50051" if name == "router" else "--port=50051"
        assert name == "redis" or flag in service["command"]
    assert re.search(r"^USER \d+$", dockerfile, re.MULTILINE), "runs as root"


def test_workers_of_a_machine_share_a_folder_that_is_writable_in_the_image():
    services = load_compose({})
    for tier in ("prefill", "decode"):
        assert {"--turns-folder=/turns", "--weights-folder=/turns"} <= {*services[tier]["command"]}
        assert "turns:/turns" in services[tier]["volumes"]
    assert "/turns" in image_folders()


def test_a_model_of_the_hub_takes_the_place_of_the_folder():
    for variables, model in ({}, "/model"), ({"BATON_HUB_MODEL": "org/model"}, "org/model"):
        services = load_compose(variables)
        for service in ("router", "prefill", "decode"):
            assert f"--model={model}" in services[service]["command"]
            assert services[service]["environment"]["HF_HOME"] == "/hub"
            assert "hub:/hub" in services[service]["volumes"]
    assert "/hub" in image_folders()


def test_a_service_takes_the_variables_that_are_flags_of_its_command():
    flags = {"BATON_DTYPE": "bfloat16", "BATON_KV_CACHE_MEMORY_BYTES": "3GiB", "BATON_API_KEY": "k"}
    services = load_compose(flags | {"BATON_LOG_LEVEL": "debug"})
    for service in ("router", "prefill", "decode"):
        environment = services[service]["environment"]
        options = build_parser(service)._subparsers._group_actions[0].choices[service]._settable()
        unknown = {variable_of(option) for option in options} ^ environment.keys()
        assert unknown.isdisjoint(environment.keys() - {"HF_HOME", "HF_TOKEN"})
        assert environment["BATON_LOG_LEVEL"] == "debug"
    assert services["decode"]["environment"]["BATON_DTYPE"] == "bfloat16"
    assert services["prefill"]["environment"]["BATON_KV_CACHE_MEMORY_BYTES"] == "3GiB"
    assert services["router"]["environment"]["BATON_API_KEY"] == "k"


def test_limits_and_replicas_are_variables():
    limits = {"BATON_DECODE_MEMORY": "4g", "BATON_DECODE_CPUS": "2", "BATON_DECODE_REPLICAS": "3"}
    unlimited, limited = load_compose({})["decode"], load_compose(limits)["decode"]
    assert (unlimited["mem_limit"], unlimited["cpus"], unlimited["scale"]) == (0, 0, 1)
    assert (limited["mem_limit"], limited["cpus"], limited["scale"]) == ("4g", 2, 3)


def test_the_cluster_shares_a_token_whose_folder_is_writable_in_the_image():
    services = load_compose({})
    for name in ("router", "prefill", "decode"):
        assert "--cluster-token-file=/run/baton/token" in services[name]["command"]
        assert "credentials:/run/baton" in services[name]["volumes"]
    assert "/run/baton" in image_folders()


def image_folders() -> list[str]:
    """The folders of the image that any user of group 0 may write, as platforms choose the user."""
    made = r"install --directory --owner=baton --group=root --mode=0770 (.*)$"
    (folders,) = re.findall(made, (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    return folders.split()


@pytest.mark.parametrize(
    "file", ["docker-compose.yml", "deploy/compose/ranks.yml", "deploy/compose/ray.yml"]
)
def test_services_have_no_more_rights_than_they_need(file):
    services = yaml.safe_load((ROOT / file).read_text())["services"]
    for name, service in services.items():
        if file.endswith("ranks.yml") and name != "decode-rank-1":
            continue  # changes a service of docker-compose.yml
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert service.get("read_only") or name == "grafana", name
        assert {"max-size", "max-file"} == service["logging"]["options"].keys(), name
        # What the image's own user writes besides volumes.
        if "baton" in service["image"]:
            assert {line.partition(":")[0] for line in service["tmpfs"]} == {"/tmp", "/home/baton"}


def test_workers_on_gpus_keep_their_kernels_in_a_folder_that_is_writable_in_the_image():
    added = yaml.safe_load((ROOT / "deploy/compose/gpu.yml").read_text())
    assert added["services"].keys() == {"prefill", "decode"}
    gpus = []
    for service in added["services"].values():
        assert service["environment"]["TRITON_CACHE_DIR"] == "/triton"
        assert service["volumes"] == ["triton:/triton"]
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        gpus += device["device_ids"]
    assert gpus == ["${BATON_PREFILL_GPU:-0}", "${BATON_DECODE_GPU:-1}"]
    assert "triton" in added["volumes"]
    assert "/triton" in image_folders()


@pytest.mark.slow
async def test_the_services_commands_start_a_working_cluster(tmp_path):
    with ComposeProcesses(tmp_path, {}) as services:
        try:
            await wait_until_serving(services.addresses["prefill"], START_TIMEOUT_S)
            await wait_until_serving(services.addresses["router"], START_TIMEOUT_S)
            url = f"http://{services.addresses[ROUTER_HTTP]}"
            # As examples/README.md says.
            example = ROOT / "examples" / "openai_client.py"
            printed = await asyncio.to_thread(
                subprocess.check_output,
                [sys.executable, example, url, "baton-demo"],
                text=True,
                timeout=START_TIMEOUT_S,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            assert "call: Weather" in printed
            with OpenAiEndpoint(f"{url}/v1") as endpoint:
                assert endpoint.model == "baton-demo"
            with Client(services.addresses["router"], model="baton-demo") as client:
                params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
                prompt = "Return the number of items in a container. " * 4
                first = client.generate(prompt, params, timeout_s=60)
                again = client.generate(prompt, params, timeout_s=60)
            with grpc.insecure_channel(services.addresses["decode"]) as channel:
                worker = worker_pb2_grpc.WorkerServiceStub(channel)
                with pytest.raises(grpc.RpcError) as refusal:
                    worker.Drain(worker_pb2.DrainRequest(), timeout=30)
        finally:
            logs = {name: services.log(name) for name in services.processes}
            print(json.dumps(logs, indent=1))
    assert len(first.token_ids) == 8
    assert first.token_ids == again.token_ids
    assert first.timings.prefill_ms > 0
    assert again.usage.cached_tokens > 0
    shared = {file.name.partition("-")[0] for file in (tmp_path / "turns").iterdir()}
    assert shared == {"next", "turn", "weights"}
    assert {file.name for file in (tmp_path / "credentials").iterdir()} == {"token"}
    assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
