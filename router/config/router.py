"""`RouterConfig` and its command-line flags."""

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import add_flags, config_from_args, flag, flags_of_config
from baton.common.flags.values import auto_or_count
from baton.common.model_files.named_models import HubFlags, with_revision
from baton.common.security.config import CredentialsConfig
from router.config.endpoint_picker import EndpointPickerConfig
from router.config.entries import read_entries
from router.config.http import HttpConfig
from router.config.security import ClientTlsConfig, RouterSecurityConfig, WorkerTlsConfig
from router.config.served_model import ServedModelConfig
from router.config.tenants import TenantsConfig
from rpc.server_config import MetricsConfig, ServerConfig, check_port
from rpc.tracing import TracingConfig

__all__ = [
    "AUTO",
    "DEFAULT_GRPC_PORT",
    "DEFAULT_PORT",
    "MAX_WAITING",
    "NO_PREFILL_POLICIES",
    "RouterConfig",
    "add_args",
    "flags_of_router",
    "router_config_from_args",
]

AUTO = "auto"
DEFAULT_PORT = 8000
DEFAULT_GRPC_PORT = 50051
NO_PREFILL_POLICIES = ("local", "wait", "fail")
MAX_WAITING = 4096
"""How many requests wait at most, beside those that the replicas run, unless a flag says so."""
_MAX_TIMEOUT_S = (2**32 - 1) // 1000
"""Workers receive the time left in milliseconds, in 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The router's addresses, its models and its limits for requests.

    Attributes:
        grpc: the address of the gRPC server, and how the router stops.
        http: the address and the limits of the HTTP server.
        models: the served models; the first one is used by requests that name none.
        security: certificates and credentials, towards clients and workers.
        metrics: the address for metrics alone, and who may read metrics.
        tracing: where spans are sent.
        picker: where a proxy asks for the servers of its requests.

    Raises:
        ConfigurationError: a value is out of range, two models have the same name, both
            servers are off, or both have the same port; names the flag.
    """

    grpc: ServerConfig
    http: HttpConfig
    models: tuple[ServedModelConfig, ...]
    security: RouterSecurityConfig = field(default_factory=RouterSecurityConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    picker: EndpointPickerConfig = field(default_factory=EndpointPickerConfig)
    routing_policy: str = flag(
        "prefix",
        "chooses the replicas of requests: prefix, least-load, round-robin, consistent-hash, "
        "power-of-two, an entry point baton.routing_policies or module:Class; see docs/routing.md",
        metavar="NAME",
    )
    max_affinity_delay_s: float = flag(
        4.0,
        "with --routing-policy prefix, seconds by which a prompt may start later than elsewhere "
        "on the prefill replica that caches it, and by at most four times what it saves there",
    )
    max_local_prefill_tokens: int | str = flag(
        AUTO,
        "a decode worker computes uncached remainders of up to this many prompt tokens itself; "
        "auto: those that it computes with less delay, for its other requests too, than a prefill "
        "worker",
        parse=auto_or_count,
        metavar="N",
    )
    default_timeout_s: float = flag(
        600.0,
        "deadline in seconds of requests without one, and the longest deadline accepted",
    )
    max_concurrent_requests: int | None = flag(
        None,
        "maximum number of requests that run or wait; further ones get RESOURCE_EXHAUSTED "
        f"(default: as many as the decode replicas run, and {MAX_WAITING} that wait)",
    )
    max_concurrent_calls: int | None = flag(
        None,
        "most gRPC calls at the same time; further ones get RESOURCE_EXHAUSTED before they are "
        f"read (default: 4 times --max-concurrent-requests, or {4 * MAX_WAITING})",
    )
    resume_timeout_s: float = flag(
        30.0, "seconds for which a request that lost its decode replica waits for another"
    )
    queue_timeout_s: float = flag(
        30.0,
        "seconds for which a request waits while no replica is ready or would queue it; 0 refuses "
        "it at once; one that only lacks a seat on a replica waits up to its deadline",
    )
    no_prefill_policy: str = flag(
        "local",
        "what happens to a prompt that no prefill replica computes: decode computes it (local), "
        "it waits for --queue-timeout-s and then fails (wait), or it fails at once (fail)",
        choices=NO_PREFILL_POLICIES,
    )
    dns_interval_s: float = flag(
        5.0, "seconds between two look-ups of dns:/// and file:/// targets"
    )

    def __post_init__(self) -> None:
        if self.grpc.port is None and not self.http.is_on:
            raise ConfigurationError("--port and --grpc-port are both none; set one of them")
        self._check_ports()
        names = [name for model in self.models for name in model.names]
        for name in names:
            if names.count(name) > 1:
                raise ConfigurationError(f"--served-model-name {name} is the name of two models")
        for name, holds, limit in self._limits():
            if not holds:
                shown = f"--{name.replace('_', '-')} is {getattr(self, name)!r}"
                raise ConfigurationError(f"{shown}; it must be {limit}")

    def _check_ports(self) -> None:
        """Refuses one port for two servers, which processes that share their ports could bind."""
        by_port = dict[int, str]()
        for name, port in (
            ("--port", self.http.port),
            ("--grpc-port", self.grpc.port),
            ("--endpoint-picker-port", self.picker.endpoint_picker_port),
        ):
            if port and by_port.setdefault(port, name) != name:
                raise ConfigurationError(
                    f"{by_port[port]} and {name} are both {port}; each server needs a port of its "
                    "own"
                )

    @property
    def most_calls(self) -> int:
        """The most gRPC calls at the same time, those that generate nothing included."""
        most = self.max_concurrent_calls
        return 4 * (self.max_concurrent_requests or MAX_WAITING) if most is None else most

    @property
    def _has_local_limit(self) -> bool:
        """Whether `max_local_prefill_tokens` is a limit that makes sense."""
        limit = self.max_local_prefill_tokens
        return limit >= 0 if isinstance(limit, int) else limit == AUTO

    def _limits(self) -> Sequence[tuple[str, bool, str]]:
        """Per field: its name, whether its value is in range, and the range."""
        default_s, resume_s = self.default_timeout_s, self.resume_timeout_s
        most_requests = self.max_concurrent_requests
        least_calls = (most_requests or 0) + 1
        most_s = _MAX_TIMEOUT_S
        return (
            ("max_affinity_delay_s", 0 <= self.max_affinity_delay_s <= most_s, f"in [0, {most_s}]"),
            ("max_local_prefill_tokens", self._has_local_limit, "auto, or >= 0"),
            ("default_timeout_s", 0 < default_s <= most_s, f"in (0, {most_s}]"),
            ("max_concurrent_requests", most_requests is None or most_requests >= 1, ">= 1"),
            ("max_concurrent_calls", self.most_calls >= least_calls, f">= {least_calls}"),
            ("resume_timeout_s", 0 <= resume_s <= most_s, f"in [0, {most_s}]"),
            ("queue_timeout_s", 0 <= self.queue_timeout_s <= most_s, f"in [0, {most_s}]"),
            ("dns_interval_s", self.dns_interval_s > 0, "> 0"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _GrpcPort:
    """The flags of the gRPC server that it does not share with the HTTP server."""

    grpc_port: int | None = flag(
        DEFAULT_GRPC_PORT,
        "port of the gRPC server; 0 picks a free one, none turns it off",
        metavar="PORT",
        is_main=True,
    )
    grpc_port_file: str | None = flag(
        None, "file to which the gRPC server writes its port when it is listening", metavar="PATH"
    )

    def __post_init__(self) -> None:
        check_port("--grpc-port", self.grpc_port)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelsFile:
    """The flag of a file with several models."""

    models: str | None = flag(
        None,
        "YAML file with a list of models, each with the keys model, decode, prefill, "
        "served-model-name ... of the flags of this group, which are then not given",
        metavar="FILE",
    )


def add_args(
    parser: argparse.ArgumentParser,
    *,
    omit: Collection[str] = (),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Adds the flags of a router.

    Args:
        parser: gets the flags.
        omit: names of fields that get no flag.
        defaults: by field, defaults that differ from a router's.
    """
    options: dict[str, Any] = {"omit": omit, "defaults": {"port": DEFAULT_PORT, **defaults}}
    add_flags(
        parser,
        ServerConfig,
        "server",
        helps={
            "port": "port of the HTTP server; 0 picks a free one, none turns it off",
            "port_file": "file to which the HTTP server writes its port when it is listening",
        },
        **options,
    )
    add_flags(parser, _GrpcPort, "server", **options)
    add_flags(parser, HttpConfig, "HTTP", **options)
    for security in (TenantsConfig, ClientTlsConfig, WorkerTlsConfig, CredentialsConfig):
        add_flags(parser, security, "security", **options)
    add_flags(parser, MetricsConfig, "metrics")
    add_flags(parser, TracingConfig, "tracing", **options)
    add_flags(parser, EndpointPickerConfig, "endpoint picker", **options)
    add_flags(parser, ServedModelConfig, "model", **options)
    add_flags(parser, HubFlags, "model", **options)
    add_flags(parser, _ModelsFile, "model", **options)
    add_flags(parser, RouterConfig, "router", **options)
    # vLLM's switch, accepted so that its command lines work. A tool parser is enough here.
    hidden: Any = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    parser.add_argument("--enable-auto-tool-choice", action="store_true", **hidden)


def router_config_from_args(args: argparse.Namespace, **model: Any) -> RouterConfig:
    """The config that parsed flags describe.

    Args:
        args: the parsed flags.
        model: by field, values of the one model's config that win over flags.

    Raises:
        ConfigurationError: a value is missing or out of range; names the flag.
    """
    server = config_from_args(ServerConfig, args)
    grpc = config_from_args(_GrpcPort, args)
    # As in vLLM, a unix socket is in place of the port, which has a default.
    http_port = server.port if getattr(args, "uds", None) is None else None
    return config_from_args(
        RouterConfig,
        args,
        http=config_from_args(
            HttpConfig, args, host=server.host, port=http_port, port_file=server.port_file
        ),
        grpc=replace(server, port=grpc.grpc_port, port_file=grpc.grpc_port_file),
        models=_models(args, model),
        security=RouterSecurityConfig.from_args(args),
        metrics=config_from_args(MetricsConfig, args),
        tracing=config_from_args(TracingConfig, args),
        picker=config_from_args(EndpointPickerConfig, args),
    )


def flags_of_router(config: RouterConfig, models_file: str | None = None) -> list[str]:
    """Returns the flags that describe a router, from which `router_config_from_args` makes an equal
    config.

    Args:
        config: the router's.
        models_file: the file of `--models` that its models are from; None if it has one model,
            which gets flags.
    """
    if models_file is None:
        (model,) = config.models
        flags_of_models = flags_of_config(model)
    else:
        flags_of_models = ["--models", models_file]
    ports = _GrpcPort(grpc_port=config.grpc.port, grpc_port_file=config.grpc.port_file)
    return [
        # Both servers share these flags, but for the ports, which are those of HTTP here.
        *("--port", "none" if config.http.port is None else str(config.http.port)),
        *flags_of_config(replace(config.grpc, port_file=config.http.port_file), omit=("port",)),
        *flags_of_config(config.http),
        *config.security.flags(),
        *flags_of_config(config.metrics),
        *flags_of_config(config.tracing),
        *flags_of_config(config.picker),
        *flags_of_config(ports),
        *flags_of_models,
        *flags_of_config(config),
    ]


def _models(args: argparse.Namespace, model: Mapping[str, Any]) -> tuple[ServedModelConfig, ...]:
    path = config_from_args(_ModelsFile, args).models
    if path is None:
        own = config_from_args(ServedModelConfig, args, **model)
        revision = config_from_args(HubFlags, args).revision
        return (replace(own, model=with_revision(own.model, revision)),)
    if args.model is not None or args.decode is not None:
        raise ConfigurationError("--models is set; give no flags of a model beside it")
    return read_entries("--models", path, ServedModelConfig)
