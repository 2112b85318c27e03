"""`OutputMaker`: makes the outputs of requests. Pure."""

from collections import abc
from collections.abc import Callable
from typing import Any

from engine.batch import TokenLogprobs
from engine.groups.group import SequenceGroup
from engine.request import EngineOutput

__all__ = ["OutputMaker"]


class OutputMaker:
    """Makes outputs. A group's first output carries its prompt's log-probabilities; its first and
    last ones carry timings.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Of prompts that are being computed.
        self._prompt_logprobs: dict[SequenceGroup, list[TokenLogprobs]] = {}

    def make(
        self, group: SequenceGroup, index: int = 0, *, is_last: bool = False, **fields: Any
    ) -> EngineOutput:
        """Returns an output of a candidate; `EngineOutput` describes the fields."""
        has_timings = is_last or not group.times.are_reported
        group.times.are_reported = True
        prompt_logprobs = self._prompt_logprobs.pop(group, ()) if self._prompt_logprobs else ()
        return EngineOutput(
            request_id=group.request_id,
            index=index,
            is_last=is_last,
            prompt_logprobs=tuple(prompt_logprobs),
            cached_tokens=group.num_cached or 0,
            timings=group.timings(self._clock()) if has_timings else None,
            **fields,
        )

    def keep_prompt_logprobs(
        self, group: SequenceGroup, start: int, logprobs: abc.Sequence[TokenLogprobs]
    ) -> None:
        """Keeps log-probabilities of a prompt's tokens for the group's first output.

        Args:
            group: the group.
            start: how many tokens of the prompt come before; what was kept of later ones, before a
                preemption, is replaced.
            logprobs: one per token.
        """
        kept = self._prompt_logprobs.setdefault(group, [])
        del kept[start:]
        kept += logprobs

    def drop_prompt_logprobs(self, group: SequenceGroup) -> None:
        """Forgets what is kept: no output has carried it, so it is incomplete or not needed."""
        self._prompt_logprobs.pop(group, None)
