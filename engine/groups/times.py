"""`GroupTimes`: when a request passed its stages. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.request import StageTimings

__all__ = ["GroupTimes"]


@dataclass(slots=True, eq=False)
class GroupTimes:
    """Clock times of one request.

    Attributes:
        arrived_at: its arrival.
        loaded_at: the end of its load.
        scheduled_at: its first chunk.
        first_token_at: its first token.
        are_reported: whether an output with timings was made.
    """

    arrived_at: float
    loaded_at: float | None = None
    scheduled_at: float | None = None
    first_token_at: float | None = None
    are_reported: bool = False

    def timings(
        self, now: float, *, hands_over: bool, is_saving: bool, computes_prompt: bool
    ) -> StageTimings:
        """Returns the time spent in each stage so far; 0 for stages not passed.

        Args:
            now: the present time.
            hands_over: whether the request continues on another engine after its first token.
            is_saving: whether it only waits for its saves.
            computes_prompt: whether this engine computes tokens of its prompt but the last.
        """
        return StageTimings(
            queue_ms=_ms_between(self.loaded_at or self.arrived_at, self.scheduled_at),
            prefill_ms=_ms_between(self.scheduled_at, self.first_token_at),
            transfer_ms=_ms_between(self.first_token_at, now if is_saving else None),
            load_ms=_ms_between(self.arrived_at, self.loaded_at),
            stages=tuple(self._stages(now, hands_over, computes_prompt)),
        )

    def _stages(
        self, now: float, hands_over: bool, computes_prompt: bool
    ) -> Iterator[tuple[str, float, float]]:
        """Yields the stages passed so far, each with its start and end."""
        has_prefill = hands_over or computes_prompt
        decodes_from = self.first_token_at if has_prefill else self.scheduled_at
        for name, start, end in (
            ("load", self.arrived_at, self.loaded_at),
            ("queue", self.loaded_at or self.arrived_at, self.scheduled_at),
            ("prefill", self.scheduled_at, decodes_from),
            ("transfer" if hands_over else "decode", decodes_from, now),
        ):
            if start is not None and end is not None and end > start:
                yield name, start, end


def _ms_between(start: float | None, end: float | None) -> float:
    return max(0.0, end - start) * 1000 if start is not None and end is not None else 0.0
