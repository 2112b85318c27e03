"""Logits processors: plug-ins that change the logits of those requests that ask for it.

A processor is a class. This one lets a request draw one token only:

    class OnlyToken(LogitsProcessor):
        def applies_to(self, args: Mapping[str, Any]) -> bool:
            return "only_token" in args

        def apply(self, logits: torch.Tensor, rows: Sequence[ProcessedRow]) -> None:
            for row_logits, row in zip(logits, rows, strict=True):
                kept = row_logits[row.args["only_token"]].clone()
                row_logits.fill_(-torch.inf)
                row_logits[row.args["only_token"]] = kept

A package offers it in its metadata, and the flag `--logits-processors only` loads it. The flag
takes `my_package.my_module:OnlyToken` too, which needs no metadata:

    [project.entry-points."baton.logits_processors"]
    only = "my_package.my_module:OnlyToken"

`engine.runtime.draws.row_processors` applies the processors. docs/sampling.md is the guide.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, cast

import torch
from typing_extensions import TypeVar

from baton.common.errors import ConfigurationError, InternalError, InvalidArgumentError
from baton.common.flags.plugins import load_plugin
from baton.common.short_texts import short_names

__all__ = [
    "LogitsProcessor",
    "ProcessedRow",
    "ProcessorContext",
    "check_extra_args",
    "load_processors",
    "make_processors",
    "processors_for",
]

_GROUP = "baton.logits_processors"
_FLAG = "--logits-processors"

State = TypeVar("State", default=None)

_logger = logging.getLogger("baton.engine")


@dataclass(frozen=True, slots=True)
class ProcessorContext:
    """The engine that a processor works for.

    Attributes:
        vocab_size: number of token ids; they start at 0.
        device: the device of the logits.
        max_rows: maximum number of sequences that run at once; `ProcessedRow.row` is below it.
        max_model_len: maximum number of prompt and generated tokens together.
    """

    vocab_size: int
    device: torch.device
    max_rows: int
    max_model_len: int


@dataclass(slots=True, eq=False)
class ProcessedRow(Generic[State]):
    """A sequence whose next token is about to be drawn.

    While a prompt is computed, one sequence stands for all candidates of its request: they draw
    their first tokens from the same logits. Then each candidate has a sequence of its own.

    Attributes:
        row: the sequence's number among those that run. It stays the same until the sequence ends
            or is preempted; then another sequence may get it. A processor may use it as an index
            into tensors with one entry per running sequence.
        args: the request's `SamplingParams.extra_args`.
        prompt_token_ids: the tokens of the prompt.
        output_token_ids: the tokens generated so far, by this engine or by another one before.
        state: what `LogitsProcessor.new_state` returned; the processor may change or replace it.
    """

    row: int
    args: Mapping[str, Any]
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    state: State


class LogitsProcessor(ABC, Generic[State]):
    """Changes the logits of the requests that it applies to.

    A processor with state per sequence names its type: `class Counter(LogitsProcessor[int])`.

    The engine creates one processor of each class before it serves. Except for `applies_to`,
    all calls come from the thread that runs the steps, in `torch.inference_mode`.

    Args:
        context: the engine.

    Attributes:
        context: the engine.
    """

    def __init__(self, context: ProcessorContext) -> None:
        self.context = context

    @abstractmethod
    def applies_to(self, args: Mapping[str, Any]) -> bool:
        """Returns whether the processor changes the logits of requests with these `extra_args`.

        Called when a request arrives, in any thread, and again when one of its sequences begins
        or continues to draw. The answer must depend on `args` alone.

        Args:
            args: JSON values by name; never empty. Other processors' values may be among them.

        Raises:
            ValueError: a value is bad. The request is refused with the error's text.
        """

    def new_state(self, row: ProcessedRow[State]) -> State:
        """Returns the state for a sequence that begins to draw, or draws again after a preemption.

        The generated tokens may already be many: after a preemption, or if another engine drew
        the first ones. They are those that the first call of `apply` gets. By default None.

        Args:
            row: the sequence; its `state` is not set yet.
        """
        return cast("State", None)

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: Sequence[ProcessedRow[State]]) -> None:
        """Changes logits in place, before the request's own rules and masks.

        Called once per step. With the same state, each call gets more generated tokens than the
        call before; usually one more.

        An exception ends the requests of `rows` with an error. NaN, infinity, or no finite logit
        in a row ends the request of that row. All other requests go on.

        Args:
            logits: `[n, vocab_size]` float32, on `context.device`, one or more rows. -inf means
                that a token is not drawn.
            rows: the sequence of each row of `logits`.
        """


AnyProcessor = LogitsProcessor[Any]


def load_processors(names: Sequence[str]) -> tuple[type[AnyProcessor], ...]:
    """Imports processors.

    Args:
        names: names of entry points, or `module:Class`.

    Raises:
        ConfigurationError: a name is unknown or given twice, or is of no `LogitsProcessor` that
            can be imported.
    """
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(f"{_FLAG} names {name!r} twice")
    return tuple([load_plugin(name, LogitsProcessor, _FLAG, _GROUP) for name in names])


def make_processors(
    classes: Sequence[type[AnyProcessor]], context: ProcessorContext
) -> tuple[AnyProcessor, ...]:
    """Creates one processor per class.

    Raises:
        ConfigurationError: a constructor raised an exception.
    """
    return tuple([_make(cls, context) for cls in classes])


def processors_for(
    processors: Sequence[AnyProcessor], args: Mapping[str, Any]
) -> list[AnyProcessor]:
    """Returns the processors that apply to requests with these `extra_args`, in their order."""
    return [processor for processor in processors if processor.applies_to(args)]


def check_extra_args(processors: Sequence[AnyProcessor], args: Mapping[str, Any]) -> None:
    """Refuses `extra_args` that no processor applies to, or that a processor refuses.

    Raises:
        InvalidArgumentError: names `extra_args`.
        InternalError: a processor raised something else than a ValueError.
    """
    try:
        selected = processors_for(processors, args)
    except ValueError as error:
        raise InvalidArgumentError(f"extra_args: {error}") from error
    except Exception as error:
        _logger.exception("a logits processor failed to check extra_args")
        raise InternalError("a logits processor failed to check extra_args") from error
    if not selected:
        loaded = ", ".join(_name_of(type(processor)) for processor in processors) or "none"
        raise InvalidArgumentError(
            f"extra_args has {short_names(args)}, which no logits processor of this worker "
            f"applies to; loaded by {_FLAG}: {loaded}"
        )


def _make(cls: type[AnyProcessor], context: ProcessorContext) -> AnyProcessor:
    try:
        return cls(context)
    except Exception as error:
        message = f"{_FLAG}: {_name_of(cls)} cannot be created: {error}"
        raise ConfigurationError(message) from error


def _name_of(cls: type[AnyProcessor]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"
