"""The Helm chart: valid manifests in several configurations, whose parts fit each other and whose
commands Baton understands; values that are wrong are refused by name.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from baton.cli import build_parser
from baton.common.flags.config_flags import config_from_args
from engine.cli_args import engine_config_from_args
from engine.runtime.ranks.place import place_of
from router.config.router import router_config_from_args
from rpc.registration import RegistrationConfig
from rpc.server_config import MetricsConfig, ServerConfig
from rpc.standard_services import LIVENESS
from tests.support.helm_chart import (
    NAMESPACE,
    ROOT,
    needs_helm,
    pod_templates,
    render_all,
    schema_errors,
    workloads,
)
from tests.support.pages import blocks

pytestmark = needs_helm

VERSIONS = ("1.30.0", "1.37.0")  # the oldest that the chart states, and the newest with schemas
COMPONENT = "app.kubernetes.io/component"
KEDA = {"type": "keda", "minReplicas": 0, "backlogSeconds": 1.5}
READER = {"podSelector": {"matchLabels": {"app": "epp"}}}
TLS = {"enabled": True, "certManager": {"enabled": True, "issuer": {"name": "ca"}}}
CASES = {
    "default": {},
    "tls": {
        "tls": TLS,
        "kvConnector": "grpc://0.0.0.0:7100",
        "redis": {"enabled": False},
        "discovery": "dns",
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "auth": {"apiKeySecret": {"name": "keys"}},
    },
    "gpus": {
        "model": {"name": "/mnt/models", "servedName": "qwen", "claimName": "qwen", "subPath": "a"},
        "prefill": {
            "gpus": 1,
            "kernelCacheClaimName": "kernels",
            "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
        },
        "decode": {
            "gpus": 2,
            "sharedMemory": "8Gi",
            "args": ["--tensor-parallel-size=2"],
            "resources": {"limits": {"memory": "64Gi"}},
        },
        "router": {"replicas": 2, "processes": 2, "preStopSeconds": 5},
    },
    "keda": {
        "model": {
            "name": "org/model",
            "hub": {"tokenSecret": {"name": "hub"}, "cacheClaimName": "hub"},
        },
        "discovery": "registration",
        "autoscaling": {
            "prometheusUrl": "http://prometheus:9090",
            "seriesSelector": {"model": "org/'model'"},
        },
        "router": {"readyWithoutWorkers": True, "batches": {"enabled": True, "sizeLimit": "9Gi"}},
        "prefill": {"autoscaling": KEDA},
        "decode": {
            "autoscaling": KEDA,
            "tolerations": [{"operator": "Exists"}],
            "nodeSelector": {"gpu": "h100"},
        },
        "networkPolicy": {"clients": [{"podSelector": {}}]},
        "podMonitor": {"enabled": True},
    },
    "groups": {
        "decode": {"groupSize": 2, "gpus": 1, "autoscaling": {**KEDA, "minReplicas": 1}},
        "autoscaling": {"prometheusUrl": "http://prometheus:9090"},
        "prefill": {"groupSize": 4, "rollingUpdate": {"maxSurge": "50%"}},
        "discovery": "dns",
    },
    "hpa": {
        "fullnameOverride": "x",
        "auth": {"existingSecret": "mine"},
        "kvConnector": "rediss://cache:6379/0",
        "redis": {"enabled": False},
        "autoscaling": {"seriesSelector": {"model": "qwen3", "cluster": "a"}},
        "prefill": {"autoscaling": {"type": "hpa"}, "pdb": {"enabled": False}},
        "networkPolicy": {"enabled": False},
        "serviceAccount": {"routerName": "given"},
    },
    "pool": {
        "endpointPicker": {"enabled": True, "failureMode": "FailClose"},
        "networkPolicy": {"clients": [{"podSelector": {}}]},
        "podMonitor": {"enabled": True},
        "router": {
            "drainTimeoutSeconds": 200,
            "args": ["--tool-call-parser=hermes"],
            "batches": {"enabled": True, "claimName": "batches"},
        },
        "decode": {"groupSize": 2},
        "prefill": {"drainTimeoutSeconds": 30},
    },
    "events": {
        "networkPolicy": {"kvEventReaders": [READER]},
        "prefill": {"args": ["--data-parallel-size=2"]},
        "decode": {
            "args": [
                *("--kv-events-zmq=tcp://*:5557", "--kv-events-replay=tcp://*:5567"),
                *("--kv-events-topic=kv@$(POD_IP):8000@m", "--data-parallel-size=4"),
            ]
        },
    },
}
CASES["set"] = {**CASES["groups"], "disaggregatedSet": {"enabled": True}}
REFUSED = {
    "/router/replicas": {"router": {"replicas": "many"}},
    "/decode/autoscaling/type": {"decode": {"autoscaling": {"type": "kedda"}}},
    "'rooter' not allowed": {"rooter": {}},
    "/prefill/drainTimeoutSeconds": {"prefill": {"drainTimeoutSeconds": -1}},
    "/model/mountPath": {"model": {"mountPath": "models"}},
    "/discovery": {"discovery": "zookeeper"},
    "/endpointPicker/failureMode": {"endpointPicker": {"failureMode": "Open"}},
    "/prefill/args/0": {"prefill": {"args": ["max-num-seqs=3"]}},
    "kvConnector is empty and redis.enabled is false": {"redis": {"enabled": False}},
    "the chart's Redis does not encrypt": {"tls": TLS},
    "tls.enabled needs tls.existingSecret": {"tls": {"enabled": True}, "kvConnector": "grpc://"},
    "issuer.name is empty": {
        "tls": {"enabled": True, "certManager": {"enabled": True}},
        "kvConnector": "grpc://",
    },
    "set autoscaling.prometheusUrl": {"prefill": {"autoscaling": {"type": "keda"}}},
    "which only type keda can do": {"prefill": {"autoscaling": {"type": "hpa", "minReplicas": 0}}},
    "set router.readyWithoutWorkers": {"decode": {"autoscaling": KEDA}},
    "minReplicas is 0 and endpointPicker.enabled": {
        "router": {"readyWithoutWorkers": True},
        "decode": {"autoscaling": KEDA},
        "endpointPicker": {"enabled": True},
    },
    "prefill.rollingUpdate: maxSurge and maxUnavailable are both 0": {
        "prefill": {"rollingUpdate": {"maxSurge": "0%"}}
    },
    "'mod-el' does not match pattern": {"autoscaling": {"seriesSelector": {"mod-el": "a"}}},
    "autoscaling.seriesSelector.model is": {
        "autoscaling": {"seriesSelector": {"model": "org/model"}},
        "decode": {"autoscaling": {"type": "hpa"}},
    },
    "router.batches.claimName is empty": {"router": {"replicas": 2, "batches": {"enabled": True}}},
    "prefill.replicas is 1 and decode.replicas is 0": {
        "disaggregatedSet": {"enabled": True},
        "decode": {"replicas": 0},
    },
    "set fullnameOverride to one of at most 30": {
        "disaggregatedSet": {"enabled": True},
        "fullnameOverride": "n" * 31,
    },
    "minReplicas is 5, above maxReplicas 4": {
        "decode": {"autoscaling": {"type": "hpa", "minReplicas": 5}}
    },
}


# Other blocks are manifests, or the rules of an adapter of metrics.
PAGE_VALUES = [
    values
    for block in blocks("docs/kubernetes.md", "yaml")
    if not {"kind", "rules"} & (values := yaml.safe_load(block)).keys()
]


@pytest.fixture(scope="module")
def answers():
    return render_all([*CASES.values(), *REFUSED.values(), *PAGE_VALUES])


@pytest.fixture(params=CASES)
def manifests(request, answers):
    rendered = answers[list(CASES).index(request.param)]
    assert not isinstance(rendered, str), rendered
    return rendered


def of_kind(manifests, *kinds):
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def by_name(manifests, kind):
    return {manifest["metadata"]["name"]: manifest for manifest in of_kind(manifests, kind)}


def pods_of(manifests):
    """The pods with each of their containers."""
    for workload in workloads(manifests):
        for template in pod_templates(workload):
            for container in template["spec"]["containers"]:
                yield template["spec"], container


def baton_pods(manifests):
    """The pods of Baton by the name of their container. Of a group, the first one is its leader."""
    pods = reversed(list(pods_of(manifests)))
    return {
        container["name"]: (pod, container)
        for pod, container in pods
        if container["name"] != "redis"
    }


def flags_of(container):
    return dict(flag.split("=", 1) for flag in container["args"][1:])


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_fit_the_schemas(manifests, version):
    assert [error for manifest in manifests for error in schema_errors(manifest, version)] == []
    named = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
    assert len(set(named)) == len(named)
    assert {manifest["metadata"]["namespace"] for manifest in manifests} == {NAMESPACE}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_values_are_refused_by_name(answers, message):
    answer = answers[len(CASES) + list(REFUSED).index(message)]
    assert isinstance(answer, str), "it was rendered"
    assert message in answer


@pytest.mark.parametrize("number", range(len(PAGE_VALUES)))
def test_values_of_the_page_make_valid_manifests(answers, number):
    manifests = answers[len(CASES) + len(REFUSED) + number]
    assert not isinstance(manifests, str), manifests
    errors = (schema_errors(manifest, VERSIONS[-1]) for manifest in manifests)
    assert [error for each in errors for error in each] == []


def test_baton_understands_commands_and_variables(manifests, monkeypatch):
    pods = baton_pods(manifests)
    assert set(pods) - {"decode-router"} == {"router", "prefill", "decode"}
    for _, container in pods.values():
        variables = {entry["name"]: entry.get("value", "10.0.0.9") for entry in container["env"]}
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        address = variables.get("POD_IP", "")
        command = [word.replace("$(POD_IP)", address) for word in container["args"]]
        args = build_parser(command[0]).parse_args(command)
        if command[0] == "router":
            config = router_config_from_args(args)
            server, ports = config.grpc, {"http": config.http.port, "grpc": config.grpc.port}
            ports["picker"] = config.picker.endpoint_picker_port
        else:
            engine_config_from_args(args)
            config_from_args(RegistrationConfig, args)
            server = config_from_args(ServerConfig, args)
            ports = {"grpc": server.port, "metrics": config_from_args(MetricsConfig, args).port}
        ports = {name: port for name, port in ports.items() if port is not None}
        assert {port["name"]: port["containerPort"] for port in container["ports"]} == ports
        assert server.host == "0.0.0.0"


def test_a_pod_has_the_time_that_its_stop_takes(manifests):
    for pod, container in baton_pods(manifests).values():
        flags = flags_of(container)
        pre_stop = container.get("lifecycle", {"preStop": {"sleep": {"seconds": 0}}})["preStop"]
        stop_s = int(flags["--shutdown-delay-s"]) + int(flags["--drain-timeout-s"])
        assert pod["terminationGracePeriodSeconds"] > stop_s + pre_stop["sleep"]["seconds"]


def test_pods_need_no_user_no_rights_and_no_writable_image(manifests):
    for pod, container in pods_of(manifests):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert pod["securityContext"]["runAsNonRoot"]
        if container["name"] != "redis":
            assert "runAsUser" not in pod["securityContext"]
        targets = [flag for flag in container.get("args", ()) if "k8s:///" in flag]
        assert pod["automountServiceAccountToken"] is bool(targets)


def test_volumes_are_mounted_and_secrets_have_their_keys(manifests):
    secrets = {name: set(secret["data"]) for name, secret in by_name(manifests, "Secret").items()}
    for pod, container in pods_of(manifests):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        paths = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(paths.values()) <= set(volumes)
        mounts = [mount for each in pod["containers"] for mount in each["volumeMounts"]]
        assert {mount["name"] for mount in mounts} == set(volumes)
        mounted = [volume.get("secret", {}) for volume in volumes.values()]
        items = [item for secret in mounted for item in secret.get("items", ())]
        for secret in mounted:
            if secret.get("secretName") in secrets:
                assert {item["key"] for item in secret["items"]} <= secrets[secret["secretName"]]
        text = str(container)
        for file in re.findall(r"/run/baton/([a-z-]+)", text):
            assert file in {item["path"] for item in items}
        for file in re.findall(r"/run/baton-tls/[a-z.]+", text):
            assert "/run/baton-tls" in paths, file


def test_pods_of_workers_have_the_role_that_llm_d_knows(manifests):
    roles = {
        workload["metadata"]["name"]: [
            pod["metadata"]["labels"].get("llm-d.ai/role") for pod in pod_templates(workload)
        ]
        for workload in workloads(manifests)
    }
    for name, of_pods in roles.items():
        tier = name.rpartition("-")[2]
        assert set(of_pods) == ({tier} if tier in ("prefill", "decode") else {None})


def test_selectors_find_the_pods_of_their_name(manifests):
    index = "leaderworkerset.sigs.k8s.io/worker-index"  # which LeaderWorkerSet adds
    labels = {
        workload["metadata"]["name"]: {
            **pod_templates(workload)[0]["metadata"]["labels"],
            **({index: "0"} if workload["kind"] != "Deployment" else {}),
        }
        for workload in workloads(manifests)
    }
    kinds = "Service", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "InferencePool"
    selecting = of_kind(manifests, *kinds)
    for manifest in selecting:
        name, spec = manifest["metadata"]["name"], manifest["spec"]
        selector = spec.get("podSelector") or spec["selector"]
        selector = selector.get("matchLabels", selector)
        found = [pod for pod, of_pod in labels.items() if selector.items() <= of_pod.items()]
        assert found == [name.replace("-routers", "-router")]
        if manifest["kind"] in ("Service", "InferencePool"):  # followers serve nothing
            assert (index in selector) == (index in labels[found[0]])
    for name, deployment in by_name(manifests, "Deployment").items():
        assert deployment["spec"]["selector"]["matchLabels"].items() <= labels[name].items()


@pytest.mark.parametrize("case", ["keda", "pool"])
def test_only_clients_reach_the_ports_for_requests(answers, case):
    """Although all pods may read the workers' metrics. A picker asks whether servers are ready."""
    manifests = answers[list(CASES).index(case)]
    (client,) = CASES[case]["networkPolicy"]["clients"]
    policies = by_name(manifests, "NetworkPolicy")
    rules = [rule for policy in policies.values() for rule in policy["spec"]["ingress"]]
    peers = [
        rule["from"]
        for rule in rules
        if {"http", "picker"} & {entry["port"] for entry in rule.get("ports", ())}
    ]
    assert all(client in those for those in peers)
    pickers = [peer for those in peers for peer in those if peer != client]
    parts = [peer["podSelector"]["matchLabels"][COMPONENT] for peer in pickers]
    assert (len(peers), parts) == ((2, ["router"]) if case == "pool" else (1, []))


def test_readers_of_kv_events_reach_the_ports_of_all_workers_that_publish(answers):
    policies = by_name(answers[list(CASES).index("events")], "NetworkPolicy")
    rules = {
        name.rpartition("-")[2]: [
            rule["ports"] for rule in policy["spec"]["ingress"] if rule.get("from") == [READER]
        ]
        for name, policy in policies.items()
    }
    assert rules.pop("decode") == [
        [{"port": 5557, "endPort": 5560}, {"port": 5567, "endPort": 5570}]
    ]
    assert not any(rules.values())


def test_targets_name_services(manifests):
    services = by_name(manifests, "Service")
    for _, container in baton_pods(manifests).values():
        for flag in ("--prefill", "--decode", "--register-with"):
            target = flags_of(container).get(flag, "register:///")
            if target == "register:///":
                continue
            kind, _, rest = target.partition(":///")
            path, _, port = rest.rpartition(":")
            name = path.split("/")[-1] if kind == "k8s" else path.split(".")[0]
            entries = services[name]["spec"]["ports"]
            ports = {str(entry[key]) for entry in entries for key in ("name", "port")}
            assert port in ports
            assert services[name]["spec"]["clusterIP"] == "None"


def test_probes_answer_in_a_second_and_live_through_loading_and_drains(manifests):
    for _, container in baton_pods(manifests).values():
        has_tls = "--ssl-certfile" in flags_of(container)
        liveness, readiness = container["livenessProbe"], container["readinessProbe"]
        assert liveness["timeoutSeconds"] == 1
        if container["args"][0] == "router":
            assert liveness["httpGet"]["path"] == "/health"
            assert liveness["httpGet"]["scheme"] == ("HTTPS" if has_tls else "HTTP")
            assert readiness["timeoutSeconds"] == 1
        elif has_tls:
            assert "tcpSocket" in liveness
            command = readiness["exec"]["command"]
            build_parser("health").parse_args(command[1:])
        else:
            assert liveness["grpc"]["service"] == LIVENESS
            assert readiness["timeoutSeconds"] == 1
            assert "service" not in readiness["grpc"]


def test_autoscalers_have_their_target_and_follow_metrics_that_exist(manifests):
    documented = (ROOT / "docs" / "metrics.md").read_text()
    targets = set()
    for scaler in of_kind(manifests, "HorizontalPodAutoscaler", "ScaledObject"):
        target = scaler["spec"]["scaleTargetRef"]
        targets.add((target["apiVersion"], target["kind"], target["name"]))
        assert scaler["metadata"]["name"] == target["name"]
        queries = [trigger["metadata"]["query"] for trigger in scaler["spec"].get("triggers", ())]
        for query in queries:
            (metric,) = re.findall(r"\bbaton_\w+", query)
            assert f"`{metric}`" in documented
    for workload in workloads(manifests):
        named = workload["apiVersion"], workload["kind"], workload["metadata"]["name"]
        assert ("replicas" in workload["spec"]) == (named not in targets)
        targets.discard(named)
    assert not targets


def test_a_horizontal_autoscaler_selects_the_series_of_its_release(answers):
    manifests = answers[list(CASES).index("hpa")]
    (scaler,) = of_kind(manifests, "HorizontalPodAutoscaler")
    metrics = [metric["external"]["metric"] for metric in scaler["spec"]["metrics"]]
    labels = {"model": "qwen3", "cluster": "a"}
    assert {metric["name"]: metric["selector"]["matchLabels"] for metric in metrics} == {
        "baton_backlog_seconds": {**labels, "tier": "prefill"},
        "baton_waiting_requests": labels,
    }


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    ("case", "labels"),
    [("keda", {"model": "org/'model'"}), ("set", {"namespace": NAMESPACE, "model": "demo"})],
)
def test_queries_count_each_replica_of_their_release_once(answers, case, labels, tmp_path):
    """Prometheus evaluates them; two routers of two releases each report one decode replica."""
    scaled = by_name(answers[list(CASES).index(case)], "ScaledObject")["baton-decode"]
    decode = {"tier": "decode", "replica": "10.0.0.1:50051"}
    series = [
        {
            "series": name + _selector({**labels, **release, **more, "pod": pod}),
            "values": str(value),
        }
        for release in ({}, {next(iter(labels)): "another"})
        for pod, value in (("router-1", 2), ("router-2", 3))
        for name, more in (
            ("baton_router_replica_backlog_seconds", decode),
            ("baton_router_replica_backlog_seconds", {**decode, "tier": "prefill"}),
            ("baton_router_waiting_requests", {}),
            ("baton_router_replica_requests", decode),
        )
    ]
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    evaluated = [
        {"expr": query, "eval_time": "0s", "exp_samples": [{"labels": "{}", "value": value}]}
        for query, value in zip(queries, (3, 5, 3), strict=False)  # the third is for zero replicas
    ]
    tests = [{"interval": "1m", "input_series": series, "promql_expr_test": evaluated}]
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"tests": tests}))
    command = ["promtool", "test", "rules", "queries.yaml"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(queries) == (3 if scaled["spec"]["minReplicaCount"] == 0 else 2)


def _selector(labels):
    return "{" + ",".join(f"{label}={json.dumps(text)}" for label, text in labels.items()) + "}"


def test_roles_of_a_set_are_the_sets_of_both_tiers(answers):
    apart, together = (answers[list(CASES).index(case)] for case in ("groups", "set"))
    (manifest,) = of_kind(together, "DisaggregatedSet")
    roles = {f"baton-{role['name']}": role["spec"] for role in manifest["spec"]["roles"]}
    sets = by_name(apart, "LeaderWorkerSet")
    assert {name: groups["spec"] for name, groups in sets.items()} == roles
    kinds = "LeaderWorkerSet", "ScaledObject", "Secret"  # the Secret is random
    assert not of_kind(together, "LeaderWorkerSet")
    others = [manifest for manifest in apart if manifest["kind"] not in kinds]
    assert [manifest for manifest in others if manifest not in together] == []


@pytest.mark.parametrize(
    ("case", "container", "volume"),
    [
        ("keda", "router", {"emptyDir": {"sizeLimit": "9Gi"}}),
        ("pool", "router", {"persistentVolumeClaim": {"claimName": "batches"}}),
        ("pool", "decode-router", {"persistentVolumeClaim": {"claimName": "batches"}}),
    ],
)
def test_batches_have_a_folder_in_a_volume(answers, case, container, volume):
    pod, router = baton_pods(answers[list(CASES).index(case)])[container]
    (mount,) = (mount for mount in router["volumeMounts"] if mount["name"] == "batches")
    assert Path(mount["mountPath"]) in Path(flags_of(router)["--batch-folder"]).parents
    assert {"name": "batches", **volume} in pod["volumes"]


def test_a_gateway_finds_the_picker_and_the_routers_beside_the_workers(answers):
    manifests = answers[list(CASES).index("pool")]
    (pool,) = of_kind(manifests, "InferencePool")
    reference, (target,) = pool["spec"]["endpointPickerRef"], pool["spec"]["targetPorts"]
    service = by_name(manifests, "Service")[reference["name"]]
    ports = {entry["port"]: entry["targetPort"] for entry in service["spec"]["ports"]}
    pods = baton_pods(manifests)
    router, (pod, beside) = pods["router"][1], pods["decode-router"]
    of_router = {port["name"]: port["containerPort"] for port in router["ports"]}
    asked, named = of_router[ports[reference["port"]["number"]]], target["number"]
    assert flags_of(router)["--endpoint-picker-port"] == str(asked)
    assert flags_of(router)["--endpoint-port"] == flags_of(beside)["--port"] == str(named)
    assert flags_of(beside)["--tool-call-parser"] == "hermes"
    assert "--endpoint-picker-port" not in flags_of(beside)
    assert pods["decode"][0] is pod
    # The worker could be found only when its pod is ready, so this must not wait for it.
    assert beside["readinessProbe"]["httpGet"]["path"] == "/health"
    sets = by_name(manifests, "LeaderWorkerSet")["baton-decode"]
    _, follower = pod_templates(sets)
    assert [container["name"] for container in follower["spec"]["containers"]] == ["decode"]


def test_gpus_and_their_kernels_have_a_place(answers):
    pods = baton_pods(answers[list(CASES).index("gpus")])
    for tier, gpus, volume in (
        ("prefill", 1, {"persistentVolumeClaim": {"claimName": "kernels"}}),
        ("decode", 2, {"emptyDir": {}}),
    ):
        pod, container = pods[tier]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
        assert {"name": "kernels", **volume} in pod["volumes"]
    assert pods["decode"][1]["resources"]["limits"]["memory"] == "64Gi"
    assert "limits" not in pods["router"][1]["resources"]


def test_the_pods_of_a_group_are_the_ranks_of_one_engine(answers):
    sets = by_name(answers[list(CASES).index("groups")], "LeaderWorkerSet")
    for name, size in (("baton-prefill", 4), ("baton-decode", 2)):
        template = sets[name]["spec"]["leaderWorkerTemplate"]
        assert template["size"] == size
        leader, follower = (pod["spec"]["containers"][0] for pod in pod_templates(sets[name]))
        assert leader["args"] == follower["args"]
        assert {key for key in leader if key not in follower} == {
            "startupProbe",
            "livenessProbe",
            "readinessProbe",
        }
        args = build_parser(leader["name"]).parse_args(leader["args"])
        config = engine_config_from_args(args)
        variables = {"LWS_GROUP_SIZE": str(size), "LWS_LEADER_ADDRESS": "leader"}
        place = place_of(config, {**variables, "LWS_WORKER_INDEX": "1"})
        assert (place.rank, place.size) == (1, size)
