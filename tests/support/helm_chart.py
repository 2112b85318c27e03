"""The Helm chart as manifests: rendered by Helm's library, checked with Kubernetes' schemas.

`python -m tests.support.helm_chart CHART` renders it for each of the values on standard input, a
JSON list, in a process of its own: the library brings Go's runtime, with its threads and signals.
"""

import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import yaml
from referencing import Registry, Resource

from tests.support.crd_schemas import CRD_SCHEMAS

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "baton"
NAMESPACE = "llm"
needs_helm = pytest.mark.skipif(
    importlib.util.find_spec("helm_python") is None
    or importlib.util.find_spec("kubernetes_validate") is None,
    reason="helm-python-sdk or kubernetes-validate is not installed; the extra test has both",
)


def render_all(all_values):
    """Renders the chart in one process; returns for each of the values a list of manifests, or the
    text of the error.
    """
    command = [sys.executable, "-m", "tests.support.helm_chart", str(CHART)]
    text = subprocess.check_output(
        command, input=json.dumps(all_values), text=True, cwd=ROOT, timeout=60
    )
    return [
        answer if isinstance(answer, str) else list(_manifests(answer))
        for answer in json.loads(text)
    ]


def _manifests(files):
    for name, text in files.items():
        if name.endswith(".yaml"):
            yield from (manifest for manifest in yaml.safe_load_all(text) if manifest)


def schema_errors(manifest, version):
    """The errors of a manifest by the strict schemas of a version of Kubernetes, or by our schemas
    of custom resources.
    """
    kind = manifest["apiVersion"], manifest["kind"]
    if kind in CRD_SCHEMAS:
        validator = jsonschema.Draft202012Validator(CRD_SCHEMAS[kind])
    else:
        validator = _validator(version, *kind)
    errors = [
        f"{kind[1]} {error.json_path}: {error.message}" for error in validator.iter_errors(manifest)
    ]
    if kind[1] in ("LeaderWorkerSet", "DisaggregatedSet"):  # their own schemas know no pods
        for workload in workloads([manifest]):
            for pod in pod_templates(workload):
                errors += schema_errors({"apiVersion": "v1", "kind": "Pod", **pod}, version)
    return errors


def workloads(manifests):
    """The Deployments, the LeaderWorkerSets, and each role of a DisaggregatedSet, as the object
    that scales it, with the LeaderWorkerSet that the role describes.
    """
    for manifest in manifests:
        if manifest["kind"] in ("Deployment", "LeaderWorkerSet"):
            yield manifest
        elif manifest["kind"] == "DisaggregatedSet":
            for role in manifest["spec"]["roles"]:
                yield {
                    "apiVersion": manifest["apiVersion"],
                    "kind": "DisaggregatedSetRoleScaler",
                    "metadata": {"name": f"{manifest['metadata']['name']}-{role['name']}"},
                    "spec": role["spec"],
                }


def pod_templates(workload):
    """The templates of the pods that serve something, and of others, of one of `workloads`."""
    if workload["kind"] == "Deployment":
        return [workload["spec"]["template"]]
    template = workload["spec"]["leaderWorkerTemplate"]
    return [template["leaderTemplate"], template["workerTemplate"]]


@cache
def _validator(version, api_version, kind):
    group, _, number = api_version.rpartition("/")
    suffix = f"{group.split('.')[0]}-{number}" if group else number
    schema = _schema(version, f"{kind.lower()}-{suffix}.json")
    return jsonschema.Draft202012Validator(schema, registry=_definitions(version))


@cache
def _definitions(version):
    return Resource.from_contents(_schema(version, "_definitions.json")) @ Registry()


def _schema(version, name):
    # Found without an import, as the package needs others.
    (folder,) = importlib.util.find_spec("kubernetes_validate").submodule_search_locations
    return json.loads(
        (Path(folder) / "kubernetes-json-schema" / f"v{version}-local-strict" / name).read_text()
    )


def _main(chart_path):
    import helm_python

    answers = []
    with helm_python.Chart.load(chart_path) as chart:
        for values in json.load(sys.stdin):
            try:
                chart.validate_schema(values)
                answers.append(chart.render(values, name="baton", namespace=NAMESPACE))
            except helm_python.HelmError as error:
                answers.append(str(error))
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    _main(sys.argv[1])
