"""KServe's resources in examples/kserve: valid manifests, whose commands Baton understands."""

from pathlib import Path

import jsonschema
import pytest
import yaml

from baton.cli import build_parser
from baton.cli.serve_config import cluster_config_from_args
from tests.support.helm_chart import needs_helm, schema_errors
from tests.support.kserve_schemas import KSERVE_SCHEMAS

FOLDER = Path(__file__).parents[3] / "examples" / "kserve"
GRACE_S = 90
VERSIONS = ("1.30.0", "1.37.0")
MANIFESTS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yaml"))}
PLACEHOLDERS = "{{ .Spec.Model.Name }}", "{{.Name}}"  # which KServe replaces


def pods():
    """The pods that KServe makes of the resources that name a command."""
    return {
        "config": MANIFESTS["config"]["spec"]["template"],
        "serving-runtime": {
            name: MANIFESTS["serving-runtime"]["spec"][name] for name in ("containers", "volumes")
        },
    }


@pytest.mark.parametrize("name", MANIFESTS)
def test_resources_fit_kserves_schemas(name):
    manifest = MANIFESTS[name]
    schema = KSERVE_SCHEMAS[manifest["apiVersion"], manifest["kind"]]
    errors = list(jsonschema.Draft202012Validator(schema).iter_errors(manifest))
    assert not errors, [f"{error.json_path}: {error.message}" for error in errors]


@needs_helm
@pytest.mark.parametrize("version", VERSIONS)
def test_pods_fit_the_schemas_of_kubernetes(version):
    for spec in pods().values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
        assert schema_errors(pod, version) == []


@pytest.mark.parametrize("name", ["config", "serving-runtime"])
def test_baton_understands_the_command_and_answers_the_probes(name):
    (container,) = pods()[name]["containers"]
    program, *command = [*container["command"], *container["args"]]
    assert program == "baton"
    for placeholder in PLACEHOLDERS:
        command = [word.replace(placeholder, "qwen3") for word in command]
    args = build_parser(command[0]).parse_args(command)
    config = cluster_config_from_args(args, "shm://test")
    assert config.model.model == "/mnt/models"
    assert config.model.names == ("qwen3",)
    http = config.router.http
    (port,) = container["ports"]
    assert (http.host, http.port) == ("0.0.0.0", port["containerPort"])
    probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness")}
    assert {probe["port"] for probe in probes.values()} == {http.port}
    assert probes["liveness"]["path"] == "/health"
    assert probes["startup"]["path"] == container["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_parts_name_each_other():
    service, runtime = MANIFESTS["service"]["spec"], MANIFESTS["inference-service"]["spec"]
    assert service["baseRefs"] == [{"name": MANIFESTS["config"]["metadata"]["name"]}]
    model = runtime["predictor"]["model"]
    assert model["runtime"] == MANIFESTS["serving-runtime"]["metadata"]["name"]
    (known,) = MANIFESTS["serving-runtime"]["spec"]["supportedModelFormats"]
    assert model["modelFormat"].items() <= known.items()
    for spec in pods().values():
        (container,) = spec["containers"]
        assert container["image"] == "registry.example/baton:1"
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}
        pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        drain = next(word for word in container["args"] if "drain" in word)
        assert pause + int(drain.rpartition("=")[2]) + 15 <= GRACE_S
    assert MANIFESTS["config"]["spec"]["template"]["terminationGracePeriodSeconds"] == GRACE_S
    assert runtime["predictor"]["terminationGracePeriodSeconds"] == GRACE_S
