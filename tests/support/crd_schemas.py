"""JSON schemas of the custom resources that the chart makes, by API version and kind.

They have the fields that the chart may use, with the types and required fields of the projects'
own definitions: KEDA 2.18, cert-manager 1.19, the Prometheus operator 0.86, the Gateway API
Inference Extension 1.5 and LeaderWorkerSet 0.10 with DisaggregatedSet, whose pods are checked by
Kubernetes' schemas.
"""


def _object(required=(), **properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_COUNT = {"type": "integer", "minimum": 0}
_DURATION = {"type": "string", "pattern": "^([0-9]+h)?([0-9]+m)?([0-9]+s)?$"}
_METADATA = _object(["name", "namespace"], name=_TEXT, namespace=_TEXT, labels=_TEXTS)
_KEY = _object(["name", "key"], name=_TEXT, key=_TEXT)
_SECRET_OR_MAP = _object(secret=_KEY, configMap=_KEY)


def _resource(api_version, kind, spec, metadata=_METADATA):
    return _object(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )


_SCALED_OBJECT = _object(
    ["scaleTargetRef", "triggers"],
    scaleTargetRef=_object(["name"], apiVersion=_TEXT, kind=_TEXT, name=_TEXT),
    minReplicaCount=_COUNT,
    maxReplicaCount=_COUNT,
    cooldownPeriod=_COUNT,
    pollingInterval=_COUNT,
    advanced=_object(
        horizontalPodAutoscalerConfig=_object(
            behavior=_object(scaleDown=_object(stabilizationWindowSeconds=_COUNT))
        )
    ),
    triggers={
        "type": "array",
        "minItems": 1,
        "items": _object(
            ["type", "metadata"],
            type={"const": "prometheus"},
            # All values of a trigger are texts.
            metadata=_object(
                ["serverAddress", "query", "threshold"],
                serverAddress=_TEXT,
                query=_TEXT,
                threshold={"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"},
                activationThreshold={"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?$"},
                ignoreNullValues={"enum": ["true", "false"]},
            ),
        ),
    },
)
_CERTIFICATE = _object(
    ["secretName", "issuerRef"],
    secretName=_TEXT,
    duration=_DURATION,
    privateKey=_object(
        algorithm={"enum": ["RSA", "ECDSA", "Ed25519"]},
        size={"enum": [256, 384, 521, 2048, 4096, 8192]},
        rotationPolicy={"enum": ["Never", "Always"]},
    ),
    usages={
        "type": "array",
        "items": {"enum": ["digital signature", "key encipherment", "server auth", "client auth"]},
    },
    dnsNames={"type": "array", "minItems": 1, "items": _TEXT},
    issuerRef=_object(["name"], name=_TEXT, kind=_TEXT, group=_TEXT),
)
_POD_MONITOR = _object(
    ["selector", "podMetricsEndpoints"],
    selector=_object(matchLabels=_TEXTS),
    podMetricsEndpoints={
        "type": "array",
        "items": _object(
            port=_TEXT,
            interval={"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
            scheme={"enum": ["http", "https"]},
            authorization=_object(type=_TEXT, credentials=_KEY),
            tlsConfig=_object(
                serverName=_TEXT, ca=_SECRET_OR_MAP, cert=_SECRET_OR_MAP, keySecret=_KEY
            ),
        ),
    },
)
_COUNT_OR_SHARE = {"anyOf": [_COUNT, {"type": "string", "pattern": "^[0-9]+%$"}]}
_POD_TEMPLATE = _object(["spec"], metadata={"type": "object"}, spec={"type": "object"})
_LEADER_WORKER_SET = _object(
    ["leaderWorkerTemplate"],
    replicas=_COUNT,
    rolloutStrategy=_object(
        ["type"],
        type={"const": "RollingUpdate"},
        rollingUpdateConfiguration=_object(
            maxSurge=_COUNT_OR_SHARE, maxUnavailable=_COUNT_OR_SHARE
        ),
    ),
    leaderWorkerTemplate=_object(
        ["workerTemplate"],
        size={"type": "integer", "minimum": 1},
        restartPolicy={"enum": ["RecreateGroupOnPodRestart", "None"]},
        leaderTemplate=_POD_TEMPLATE,
        workerTemplate=_POD_TEMPLATE,
    ),
)
# A role with external scaling has no number of its own: the controller of the set asks its scaler.
# The other roles are all at zero or all above.
_EXTERNAL_ROLE = _object(
    ["name", "scaling", "spec"],
    name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63},
    scaling=_object(["mode"], mode={"const": "External"}),
    spec={"allOf": [_LEADER_WORKER_SET], "not": {"required": ["replicas"]}},
)


def _static_role(replicas):
    return _object(
        ["name", "spec"],
        name=_EXTERNAL_ROLE["properties"]["name"],
        spec={
            "allOf": [_LEADER_WORKER_SET],
            "required": ["replicas"],
            "properties": {"replicas": replicas},
        },
    )


_DISAGGREGATED_SET = _object(
    ["roles"],
    roles={
        "type": "array",
        "minItems": 2,
        "maxItems": 10,
        "anyOf": [
            {"items": {"anyOf": [_EXTERNAL_ROLE, static_role]}}
            for static_role in (
                _static_role({"const": 0}),
                _static_role({"type": "integer", "minimum": 1}),
            )
        ],
    },
)
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_INFERENCE_POOL = _object(
    ["selector", "targetPorts"],
    selector=_object(["matchLabels"], matchLabels=_TEXTS),
    targetPorts={
        "type": "array",
        "minItems": 1,
        "maxItems": 8,
        "items": _object(["number"], number=_PORT),
    },
    appProtocol={"enum": ["http", "kubernetes.io/h2c"]},
    endpointPickerRef=_object(
        ["name"],
        group=_TEXT,
        kind=_TEXT,
        name=_TEXT,
        port=_object(["number"], number=_PORT),
        failureMode={"enum": ["FailOpen", "FailClose"]},
    ),
)

CRD_SCHEMAS = {
    (api_version, kind): _resource(api_version, kind, spec)
    for api_version, kind, spec in (
        ("keda.sh/v1alpha1", "ScaledObject", _SCALED_OBJECT),
        ("cert-manager.io/v1", "Certificate", _CERTIFICATE),
        ("monitoring.coreos.com/v1", "PodMonitor", _POD_MONITOR),
        ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", _LEADER_WORKER_SET),
        ("disaggregatedset.x-k8s.io/v1", "DisaggregatedSet", _DISAGGREGATED_SET),
        ("inference.networking.k8s.io/v1", "InferencePool", _INFERENCE_POOL),
    )
}
