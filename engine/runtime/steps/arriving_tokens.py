"""`ArrivingTokens`: tokens on their way from the last stage of a pipeline to the first."""

from collections import deque
from collections.abc import Callable

import numpy as np

from engine.batch import ScheduledBatch
from engine.runtime.draws.rows import drawing_rows
from kernels import EngineRanks

__all__ = ["ArrivingTokens"]


class ArrivingTokens:
    """The tokens of steps that a first stage has computed, and that the last stage draws.

    Args:
        ranks: all ranks of the engine.
        keep: stores tokens; called with the rows, `[n]` int64, and their tokens, `[n]` int64.
    """

    def __init__(self, ranks: EngineRanks, keep: Callable[[np.ndarray, np.ndarray], None]) -> None:
        self._ranks, self._keep = ranks, keep
        # Rows of the steps whose tokens have not arrived, in order.
        self._undrawn: deque[np.ndarray] = deque()

    def expect(self, batch: ScheduledBatch, decode_ids: np.ndarray) -> None:
        """Notes that a step was computed.

        Args:
            batch: the step.
            decode_ids: its `decode_rows`, `[n]` int64.
        """
        self._undrawn.append(drawing_rows(batch.chunks, decode_ids))

    def store(self, decode_ids: np.ndarray) -> None:
        """Stores the tokens that have arrived; waits for those that the next step runs.

        Args:
            decode_ids: the rows that decode in the next step, `[n]` int64.

        Raises:
            RanksLostError: another rank is lost, or too late.
        """
        while self._undrawn:
            is_needed = any(np.isin(decode_ids, rows).any() for rows in self._undrawn)
            tokens = self._ranks.receive_tokens(waits=is_needed)
            if tokens is None:
                return
            self._keep(self._undrawn.popleft(), np.frombuffer(tokens, np.int64))

    def drop(self) -> None:
        """Waits for the tokens of all steps, and stores none.

        Raises:
            RanksLostError: another rank is lost, or too late.
        """
        while self._undrawn:
            self._ranks.receive_tokens()
            self._undrawn.popleft()
