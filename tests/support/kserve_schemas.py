"""JSON schemas of KServe's resources, by API version and kind, as of KServe 0.16.

They have the fields that the examples use, with the types and required fields of KServe's own
definitions. Specs of pods are checked by the schemas of Kubernetes.
"""

from tests.support.crd_schemas import _COUNT, _TEXT, _TEXTS, _object, _resource

_METADATA = _object(
    ["name", "namespace"], name=_TEXT, namespace=_TEXT, labels=_TEXTS, annotations=_TEXTS
)
_POD = {"type": "object"}
_REFS = {"type": "array", "items": _object(["name"], name=_TEXT)}
_FORMAT = _object(
    ["name"], name=_TEXT, version=_TEXT, autoSelect={"type": "boolean"}, priority=_COUNT
)

_LLM_SPEC = _object(
    model=_object(["uri"], uri={"type": "string", "pattern": "^[a-z0-9]+://"}, name=_TEXT),
    replicas=_COUNT,
    labels=_TEXTS,
    annotations=_TEXTS,
    template=_POD,
    worker=_POD,
    prefill=_object(replicas=_COUNT, labels=_TEXTS, annotations=_TEXTS, template=_POD, worker=_POD),
    baseRefs=_REFS,
    router=_object(
        route=_object(http=_object(refs=_REFS, spec={"type": "object"})),
        gateway=_object(refs={"type": "array"}),
        scheduler=_object(pool={"type": "object"}, template=_POD),
    ),
)
_RUNTIME_SPEC = _object(
    ["containers"],
    annotations=_TEXTS,
    labels=_TEXTS,
    supportedModelFormats={"type": "array", "minItems": 1, "items": _FORMAT},
    protocolVersions={"type": "array", "items": {"enum": ["v1", "v2", "grpc-v1", "grpc-v2"]}},
    multiModel={"type": "boolean"},
    containers={"type": "array", "minItems": 1, "items": {"type": "object"}},
    volumes={"type": "array", "items": {"type": "object"}},
    nodeSelector=_TEXTS,
    tolerations={"type": "array", "items": {"type": "object"}},
)
_INFERENCE_SPEC = _object(
    ["predictor"],
    predictor=_object(
        ["model"],
        minReplicas=_COUNT,
        maxReplicas=_COUNT,
        terminationGracePeriodSeconds=_COUNT,
        model=_object(
            ["modelFormat"],
            modelFormat=_object(["name"], name=_TEXT, version=_TEXT),
            runtime=_TEXT,
            storageUri={"type": "string", "pattern": "^[a-z0-9]+://"},
            resources={"type": "object"},
            args={"type": "array", "items": _TEXT},
            env={"type": "array", "items": {"type": "object"}},
        ),
    ),
)


KSERVE_SCHEMAS = {
    (api_version, kind): _resource(api_version, kind, spec, _METADATA)
    for api_version, kind, spec in (
        ("serving.kserve.io/v1alpha1", "LLMInferenceServiceConfig", _LLM_SPEC),
        ("serving.kserve.io/v1alpha1", "LLMInferenceService", _LLM_SPEC),
        ("serving.kserve.io/v1alpha1", "ServingRuntime", _RUNTIME_SPEC),
        ("serving.kserve.io/v1beta1", "InferenceService", _INFERENCE_SPEC),
    )
}
