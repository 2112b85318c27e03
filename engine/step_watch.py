"""`StepWatch`: notices a step that takes much longer than such steps have taken. Pure.

A step that never returns looks like an idle engine from outside: its thread can neither answer
nor enforce deadlines. So the thread notes when a step begins, and another thread compares.
"""

from collections.abc import Callable

__all__ = ["SLOW_FACTOR", "StepWatch"]

_MIN_S = 1.0
_FIRST_S = 10.0
"""For the first step of a size, which may compile kernels, capture a graph or record commands."""
SLOW_FACTOR = 8
"""How many times longer than expected a step may take."""
_DECAY = 0.9
"""Per step: one that was slow by chance is forgotten after some tens of steps."""


class StepWatch:
    """Times the steps of one engine. One thread steps, and any thread may ask.

    Args:
        clock: monotonic seconds.
        prompt_token_s: measured seconds to compute a token of a prompt.
        read_wait_s: returns how long the engine has waited, in all and until now, for its turn
            among the engines of the machine, and for kernels to be compiled. That is not the
            step's time.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        prompt_token_s: float,
        read_wait_s: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._prompt_token_s = prompt_token_s
        self._read_wait_s = read_wait_s
        self._longest_s: dict[int, float] = {}  # by size: the number of bits of a step's tokens
        # The step under way: its start, the wait for turns before it, and its tokens. Replaced as
        # a whole, so that other threads never see parts of two steps.
        self._step: tuple[float, float, int] | None = None
        self._excuse = 0.0, 0.0  # the start of a step, and seconds that do not count for it

    def begin(self) -> None:
        """Notes the begin of a step."""
        self._step = self._clock(), self._read_wait_s(), 0

    def compute(self, num_tokens: int) -> None:
        """Notes that the step computes so many tokens; 0 changes nothing."""
        if self._step is not None and num_tokens:
            self._step = (*self._step[:2], num_tokens)

    def end(self) -> None:
        """Notes the end of the step."""
        step, self._step = self._step, None
        if step is None or not step[2]:
            return
        size = step[2].bit_length()
        duration_s = min(self._elapsed_s(step), self._limit_s(step[2]))
        self._longest_s[size] = max(duration_s, self._longest_s.get(size, 0.0) * _DECAY)

    def excuse(self, seconds: float) -> None:
        """Takes seconds off the step under way, in which this process did not get its cores."""
        step = self._step
        if step is not None:
            start, excused_s = self._excuse
            self._excuse = step[0], seconds + (excused_s if start == step[0] else 0.0)

    def elapsed_s(self) -> float:
        """Seconds since the step under way began, without waits for turns and excused ones; 0
        between steps.
        """
        step = self._step
        return 0.0 if step is None else self._elapsed_s(step)

    def num_computed(self, token_s: float) -> int:
        """About how many tokens the step under way has computed until now.

        Args:
            token_s: seconds in which a step computes a token.
        """
        step = self._step
        if step is None or token_s <= 0:
            return 0
        return min(int(max(self._elapsed_s(step), 0.0) / token_s), step[2])

    def limit_s(self) -> float:
        """The longest that the step under way may take; see `is_stalled`."""
        step = self._step
        return self._limit_s(0 if step is None else step[2])

    @property
    def is_stalled(self) -> bool:
        """Whether the step under way takes much longer than steps of its size have taken."""
        return self.elapsed_s() > self.limit_s()

    def _elapsed_s(self, step: tuple[float, float, int]) -> float:
        started, wait_s, _ = step
        excused_start, excused_s = self._excuse
        if excused_start != started:
            excused_s = 0.0
        return self._clock() - started - (self._read_wait_s() - wait_s) - excused_s

    def _limit_s(self, num_tokens: int) -> float:
        longest_s = self._longest_s.get(num_tokens.bit_length())
        if longest_s is None:
            return max(_FIRST_S, SLOW_FACTOR * num_tokens * self._prompt_token_s)
        return max(_MIN_S, SLOW_FACTOR * longest_s)
