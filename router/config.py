"""`RouterConfig` and its command-line flags."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from baton.errors import ConfigurationError
from router.discovery import parse_target
from rpc.server_config import ServerConfig, add_server_args, server_config_from_args

__all__ = ["DEFAULT_PORT", "GENERATION_CONFIGS", "RouterConfig", "add_args", "config_from_args"]

DEFAULT_PORT = 8000
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


def _targets(tier: str, default: Any, note: str = "") -> Any:
    help_text = f"{tier} replicas: host:port, or dns:///name:port for all addresses of a DNS name"
    return field(
        default=default, metadata={"help": f"{help_text}; comma-separated, repeatable{note}"}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The router's address, its replicas and its limits for requests.

    Field names are the command line's flags with underscores.

    Raises:
        ConfigurationError: a value is out of range; names the flag. A target
            is malformed.
    """

    server: ServerConfig
    model: str = _flag(
        MISSING,
        str,
        "checkpoint folder or Hub name; the router reads its tokenizer and generation_config.json",
    )
    decode: tuple[str, ...] = _targets("decode", MISSING)
    prefill: tuple[str, ...] = _targets(
        "prefill", (), "; without any, decode workers compute all prompts"
    )
    served_model_name: str | None = _flag(
        None,
        str,
        "model name in requests, equal on all workers (default: the last part of --model)",
    )
    generation_config: str = _flag(
        "auto",
        str,
        "defaults of the sampling parameters that a request leaves unset: those of the model's "
        "generation_config.json (auto), or only Baton's own (none)",
        choices=GENERATION_CONFIGS,
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
        if not self.decode:
            raise ConfigurationError("--decode is missing; give at least one host:port")
        for target in (*self.decode, *self.prefill):
            parse_target(target)
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

    @property
    def model_name(self) -> str:
        """The name that requests give."""
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]


def add_args(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a router."""
    add_server_args(parser, default_port=DEFAULT_PORT)
    group = parser.add_argument_group("router")
    for flag in _flags():
        options: dict[str, Any] = {"help": flag.metadata["help"]}
        if "parse" in flag.metadata:
            options |= {"type": flag.metadata["parse"], "choices": flag.metadata["choices"] or None}
        else:
            options |= {"action": "append", "metavar": "TARGET"}
        if flag.default is MISSING:
            options["required"] = True
        elif flag.default not in (None, ()):
            options["default"] = flag.default
            options["help"] += " (default: %(default)s)"
        group.add_argument(f"--{flag.name.replace('_', '-')}", **options)


def config_from_args(args: argparse.Namespace) -> RouterConfig:
    """The config that parsed flags describe.

    Raises:
        ConfigurationError: a value is out of range; names the flag.
    """
    values = {flag.name: getattr(args, flag.name) for flag in _flags()}
    for tier in ("decode", "prefill"):
        given = ",".join(values[tier] or ())
        values[tier] = tuple(target.strip() for target in given.split(",") if target.strip())
    return RouterConfig(server=server_config_from_args(args), **values)


def _flags() -> list[Field[Any]]:
    return [field for field in fields(RouterConfig) if "help" in field.metadata]
