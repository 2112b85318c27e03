"""Public names exist and are documented, and importing a package stays cheap."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import baton

PACKAGES = (
    "baton",
    "engine",
    "kernels",
    "kvstore",
    "router",
    "rpc",
    "prefill_service",
    "worker",
    "decode_service",
    "benchmarks",
)
SILENT = ("__main__", "baton.v1", "conformance", "conftest")


def public_modules():
    for package in PACKAGES:
        root = importlib.import_module(package)
        yield package
        for module in pkgutil.walk_packages(root.__path__, f"{package}."):
            if not any(part in module.name for part in SILENT):
                yield module.name


@pytest.mark.parametrize("name", list(public_modules()))
def test_every_exported_name_exists(name):
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", ())
    assert len(set(exported)) == len(exported)
    for exported_name in exported:
        assert hasattr(module, exported_name), f"{name}.__all__ has {exported_name}"
    assert module.__doc__, f"{name} has no docstring"


def test_the_package_exports_its_public_names():
    assert set(baton.__all__) == {
        "LLM",
        "AsyncClient",
        "AsyncEngineArgs",
        "AsyncLLM",
        "BatonError",
        "BeamSearchParams",
        "Client",
        "CompletionOutput",
        "EngineArgs",
        "RequestOutput",
        "RequestOutputKind",
        "SamplingParams",
        "StructuredOutputs",
        "StructuredOutputsParams",
        "TextPrompt",
        "TokensPrompt",
        "__version__",
    }
    for name in baton.__all__:
        assert getattr(baton, name)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = baton.Nothing


@pytest.mark.parametrize(
    ("public", "module", "names"),
    [
        (
            "baton.errors",
            "baton.common.errors",
            {
                "AbortedError",
                "AlreadyExistsError",
                "BatonError",
                "ConfigurationError",
                "DeadlineExceededError",
                "FailedPreconditionError",
                "InternalError",
                "InvalidArgumentError",
                "NotFoundError",
                "PermissionDeniedError",
                "PromptTooLongError",
                "RequestCancelledError",
                "ResourceExhaustedError",
                "UnauthenticatedError",
                "UnavailableError",
            },
        ),
        ("baton.prompts", "baton.common.request.prompts", {"Prompt", "TextPrompt", "TokensPrompt"}),
        (
            "baton.results",
            "baton.common.request.results",
            {
                "CompletionChunk",
                "CompletionOutput",
                "Logprob",
                "ModelDescription",
                "RequestMetrics",
                "RequestOutput",
                "Timings",
                "Usage",
            },
        ),
        (
            "baton.sampling_params",
            "baton.common.request.sampling_params",
            {"RequestOutputKind", "SamplingParams"},
        ),
    ],
)
def test_public_modules_export_the_names_of_the_modules_below(public, module, names):
    exporting, defining = importlib.import_module(public), importlib.import_module(module)
    assert names <= set(exporting.__all__) <= set(defining.__all__)
    for name in exporting.__all__:
        assert getattr(exporting, name) is getattr(defining, name)


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import baton", ("torch", "grpc", "transformers")),
        ("from baton import Client", ("torch", "transformers")),
        ("import baton.cli.serve", ("torch", "transformers")),
        ("import benchmarks.cli", ("torch", "grpc", "matplotlib", "httpx2")),
        ("import router.server", ("torch", "transformers")),
        (
            "import engine.schedule.scheduler, engine.loop.core, engine.loop.async_engine",
            ("torch", "grpc"),
        ),
        ("import kvstore.registry", ("torch", "grpc")),
    ],
)
def test_imports_do_not_load_heavy_packages(statement, unwanted):
    program = (
        f"import sys; {statement}; print([name for name in {unwanted} if name in sys.modules])"
    )
    output = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert output.strip() == "[]"
