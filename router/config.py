"""`RouterConfig`, `ModelConfig` and their command-line flags."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from baton.errors import ConfigurationError
from router.discovery import parse_target
from rpc.server_config import (
    ServerConfig,
    add_address_args,
    add_lifecycle_args,
)

__all__ = [
    "DEFAULT_GRPC_PORT",
    "DEFAULT_PORT",
    "GENERATION_CONFIGS",
    "ModelConfig",
    "RouterConfig",
    "add_args",
    "config_from_args",
]

DEFAULT_PORT = 8000
DEFAULT_GRPC_PORT = 50051
GENERATION_CONFIGS = ("auto", "none")
"""Where defaults of sampling parameters come from: the checkpoint, or `SamplingParams` alone."""
_MAX_TIMEOUT_S = (2**32 - 1) // 1000
"""Workers receive the time left in milliseconds, in 32 bits."""


def _flag(
    default: Any, parse: Callable[[str], Any], help_text: str, *, choices: Sequence[str] = ()
) -> Any:
    """Makes a field and the parser, help and choices of its command-line flag."""
    metadata = {"parse": parse, "help": help_text, "choices": choices}
    return field(default=default, metadata=metadata)


def _list_flag(default: Any, metavar: str, help_text: str) -> Any:
    """Makes a field whose flag is repeatable and takes comma-separated values."""
    help_text = f"{help_text}; comma-separated, repeatable"
    return field(default=default, metadata={"metavar": metavar, "help": help_text})


def _targets(tier: str, default: Any, note: str = "") -> Any:
    help_text = f"{tier} replicas: host:port, or dns:///name:port for all addresses of a DNS name"
    return _list_flag(default, "TARGET", help_text + note)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A served model: its files, its names and its replicas.

    Field names are the command line's flags with underscores.

    Raises:
        ConfigurationError: there is no decode replica, or a target is malformed.
    """

    model: str = _flag(
        MISSING,
        str,
        "checkpoint folder or Hub name; the router reads its tokenizer, chat template and "
        "generation_config.json",
    )
    decode: tuple[str, ...] = _targets("decode", MISSING)
    prefill: tuple[str, ...] = _targets(
        "prefill", (), " (without any, decode workers compute all prompts)"
    )
    served_model_name: tuple[str, ...] = _list_flag(
        (),
        "NAME",
        "names of the model in requests; workers must serve the first one (default: the last "
        "part of --model)",
    )
    generation_config: str = _flag(
        "auto",
        str,
        "defaults of the sampling parameters that a request leaves unset: those of the model's "
        "generation_config.json (auto), or only Baton's own (none)",
        choices=GENERATION_CONFIGS,
    )
    chat_template: str | None = _flag(
        None,
        str,
        "chat template: a file, or the template itself (default: that of the checkpoint)",
    )
    tool_call_parser: str | None = _flag(
        None, str, "format in which the model writes tool calls, such as hermes; see docs/chat.md"
    )
    reasoning_parser: str | None = _flag(
        None, str, "format in which the model writes its reasoning, such as qwen3"
    )
    reasoning_start_str: str | None = _flag(
        None,
        str,
        "text before the part in which the model reasons, such as <think>; with it, structured "
        "outputs begin after that part, and requests may limit it (thinking_token_budget)",
    )
    reasoning_end_str: str | None = _flag(
        None, str, "text after that part, such as </think>; set both or none"
    )

    def __post_init__(self) -> None:
        if not self.decode:
            raise ConfigurationError("--decode is missing; give at least one host:port")
        for target in (*self.decode, *self.prefill):
            parse_target(target)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may give. The first is the model's own, also on workers."""
        return self.served_model_name or (self.model.rstrip("/").rsplit("/", 1)[-1],)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The router's addresses, its models and its limits for requests.

    Attributes:
        grpc: the address of the gRPC server, and how the router stops.
        http: the address of the HTTP server.
        models: the served models; the first one is used by requests that name none.

    Raises:
        ConfigurationError: a value is out of range, two models have the same name, or both
            servers are off; names the flag.
    """

    grpc: ServerConfig
    http: ServerConfig
    models: tuple[ModelConfig, ...]
    max_local_prefill_tokens: int = _flag(
        16,
        int,
        "a decode worker computes uncached remainders of up to this many prompt tokens itself",
    )
    default_timeout_s: float = _flag(
        600.0,
        float,
        "deadline in seconds of requests without one, and the longest deadline accepted",
    )
    max_concurrent_requests: int = _flag(
        4096, int, "maximum number of running requests; further ones get RESOURCE_EXHAUSTED"
    )
    resume_timeout_s: float = _flag(
        30.0, float, "seconds for which a request that lost its decode replica waits for another"
    )
    dns_interval_s: float = _flag(5.0, float, "seconds between two look-ups of dns:/// targets")
    max_indexed_blocks: int = _flag(
        100_000, int, "maximum number of KV block keys remembered per replica"
    )

    def __post_init__(self) -> None:
        if self.grpc.port is None and self.http.port is None:
            raise ConfigurationError("--port and --grpc-port are both none; set one of them")
        names = [name for model in self.models for name in model.names]
        for name in names:
            if names.count(name) > 1:
                raise ConfigurationError(f"--served-model-name {name} is the name of two models")
        for name, holds, limit in self._limits():
            if not holds:
                flag = name.replace("_", "-")
                raise ConfigurationError(f"--{flag} is {getattr(self, name)!r}; it must be {limit}")

    def _limits(self) -> Sequence[tuple[str, bool, str]]:
        """Per field: its name, whether its value is in range, and the range."""
        default_s, resume_s = self.default_timeout_s, self.resume_timeout_s
        most_s = _MAX_TIMEOUT_S
        return (
            ("max_local_prefill_tokens", self.max_local_prefill_tokens >= 0, ">= 0"),
            ("default_timeout_s", 0 < default_s <= most_s, f"in (0, {most_s}]"),
            ("max_concurrent_requests", self.max_concurrent_requests >= 1, ">= 1"),
            ("resume_timeout_s", 0 <= resume_s <= most_s, f"in [0, {most_s}]"),
            ("dns_interval_s", self.dns_interval_s > 0, "> 0"),
            ("max_indexed_blocks", self.max_indexed_blocks >= 1, ">= 1"),
        )


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a router."""
    server = add_lifecycle_args(parser)
    add_address_args(server, "", "HTTP", DEFAULT_PORT)
    add_address_args(server, "grpc-", "gRPC", DEFAULT_GRPC_PORT)
    group = parser.add_argument_group("model")
    for flag in _flags(ModelConfig):
        _add_flag(group, flag)
    group.add_argument(
        "--models",
        metavar="FILE",
        help="YAML file with a list of models, each with the keys model, decode, prefill, "
        "served-model-name ... of the flags of this group, which are then not given",
    )
    group = parser.add_argument_group("router")
    for flag in _flags(RouterConfig):
        _add_flag(group, flag)


def config_from_args(args: argparse.Namespace) -> RouterConfig:
    """The config that parsed flags describe.

    Raises:
        ConfigurationError: a value is out of range; names the flag.
    """
    limits = {flag.name: getattr(args, flag.name) for flag in _flags(RouterConfig)}
    servers = [
        ServerConfig(
            host=args.host, port=port, port_file=port_file, drain_timeout_s=args.drain_timeout_s
        )
        for port, port_file in (
            (args.grpc_port, args.grpc_port_file),
            (args.port, args.port_file),
        )
    ]
    return RouterConfig(grpc=servers[0], http=servers[1], models=_models(args), **limits)


def _models(args: argparse.Namespace) -> tuple[ModelConfig, ...]:
    if args.models is not None:
        return _models_of_file(Path(args.models))
    values = {flag.name: getattr(args, flag.name) for flag in _flags(ModelConfig)}
    if values["model"] is None:
        raise ConfigurationError("--model is missing; give it, or --models")
    return (_model_of(values),)


def _model_of(values: Mapping[str, Any]) -> ModelConfig:
    lists = {flag.name for flag in _flags(ModelConfig) if "metavar" in flag.metadata}
    fields_: dict[str, Any] = {
        name: _split(value) if name in lists else value for name, value in values.items()
    }
    return ModelConfig(**fields_)


def _split(texts: str | Iterable[str] | None) -> tuple[str, ...]:
    """Splits comma-separated texts."""
    joined = texts if isinstance(texts, str) else ",".join(map(str, texts or ()))
    return tuple(part.strip() for part in joined.split(",") if part.strip())


def _models_of_file(path: Path) -> tuple[ModelConfig, ...]:
    """Reads the models of a YAML file.

    Raises:
        ConfigurationError: the file cannot be read, or is not such a list; names the entry.
    """
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigurationError(f"--models {path}: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise ConfigurationError(f"--models {path}: it must be a list of models")
    return tuple(_model_of_entry(f"--models {path}, entry {i}", e) for i, e in enumerate(entries))


def _model_of_entry(where: str, entry: Any) -> ModelConfig:
    if not isinstance(entry, dict):
        raise ConfigurationError(f"{where}: it must be a mapping of flags to values")
    known = {flag.name for flag in _flags(ModelConfig)}
    values = {str(name).replace("-", "_"): value for name, value in entry.items()}
    for name in values:
        if name not in known:
            raise ConfigurationError(
                f"{where}: {name} is unknown; it has {', '.join(sorted(known))}"
            )
    if "model" not in values:
        raise ConfigurationError(f"{where}: model is missing")
    try:
        return _model_of({"decode": (), **values})
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error.message}") from None


def _add_flag(group: argparse._ArgumentGroup, flag: Field[Any]) -> None:
    options: dict[str, Any] = {"help": flag.metadata["help"]}
    if "parse" in flag.metadata:
        options |= {"type": flag.metadata["parse"], "choices": flag.metadata["choices"] or None}
    else:
        options |= {"action": "append", "metavar": flag.metadata["metavar"]}
    if flag.default not in (MISSING, None, ()):
        options["default"] = flag.default
        options["help"] += " (default: %(default)s)"
    group.add_argument(f"--{flag.name.replace('_', '-')}", **options)


def _flags(config: type[ModelConfig | RouterConfig]) -> list[Field[Any]]:
    return [field for field in fields(config) if "help" in field.metadata]
