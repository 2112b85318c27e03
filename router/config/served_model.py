"""`ServedModelConfig`: the flags of one served model."""

from dataclasses import MISSING, dataclass
from typing import Any

from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import flag
from baton.common.model_files.named_models import default_model_name
from rpc.discovery.discovery import parse_target

__all__ = ["GENERATION_CONFIGS", "ServedModelConfig"]

GENERATION_CONFIGS = ("auto", "none")
"""Where defaults of sampling parameters come from: the checkpoint, or `SamplingParams` alone."""


def _list_flag(default: Any, metavar: str, help_text: str, **options: Any) -> Any:
    """Makes a field whose flag is repeatable and takes comma-separated values."""
    return flag(default, help_text, metavar=metavar, is_main=True, **options)


def _targets(tier: str, default: Any, note: str = "") -> Any:
    help_text = (
        f"{tier} replicas: host:port, dns:///name:port for all addresses of a DNS name, "
        "file:///path for those in a file, one a line, k8s:///namespace/service:port for the pods "
        "of a Service, or register:///?label=value for workers that announce themselves; "
        "comma-separated, repeatable"
    )
    return _list_flag(default, "TARGET", help_text + note)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModelConfig:
    """A served model: its files, its names and its replicas.

    Field names are the command line's flags with underscores.

    Raises:
        ConfigurationError: there is no decode replica, or a target is malformed.
    """

    model: str = flag(
        MISSING,
        "checkpoint folder, GGUF file, demo, smollm2, gemma3-270m, or Hub name; the router reads "
        "its tokenizer, chat template and generation_config.json",
        metavar="MODEL",
        is_positional=True,
    )
    decode: tuple[str, ...] = _targets("decode", MISSING)
    prefill: tuple[str, ...] = _targets(
        "prefill", (), "; without any, decode workers compute all prompts"
    )
    served_model_name: tuple[str, ...] = _list_flag(
        (),
        "NAME",
        "names of the model in requests, comma-separated, repeatable; workers must serve the "
        "first one (default: the last "
        "part of --model)",
        is_list=True,
    )
    generation_config: str = flag(
        "auto",
        "defaults of the sampling parameters that a request leaves unset: those of the model's "
        "generation_config.json (auto), or only Baton's own (none)",
        choices=GENERATION_CONFIGS,
    )
    chat_template: str | None = flag(
        None,
        "chat template: a file, or the template itself (default: that of the checkpoint)",
        is_main=True,
    )
    tool_call_parser: str | None = flag(
        None,
        "format in which the model writes tool calls, such as hermes; see docs/chat.md",
        metavar="NAME",
        is_main=True,
    )
    reasoning_parser: str | None = flag(
        None,
        "format in which the model writes its reasoning, such as qwen3; it states the tags of "
        "--reasoning-start-str and --reasoning-end-str",
        metavar="NAME",
        is_main=True,
    )
    reasoning_start_str: str | None = flag(
        None,
        "text before the part in which the model reasons, such as <think>; with it, structured "
        "outputs begin after that part, and requests may limit it (thinking_token_budget)",
    )
    reasoning_end_str: str | None = flag(
        None, "text after that part, such as </think>; set both or none"
    )

    def __post_init__(self) -> None:
        if not self.decode:
            raise ConfigurationError("--decode is missing; give at least one host:port")
        for target in (*self.decode, *self.prefill):
            parse_target(target)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that requests may give. The first is the model's own, also on workers."""
        return self.served_model_name or (default_model_name(self.model),)
