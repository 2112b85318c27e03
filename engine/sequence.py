"""`Sequence`: a candidate, or what candidates have in common, as the scheduler sees it. Pure.

Mutable; only the scheduler and what belongs to it touch it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.block_table import BlockTable
from engine.request import FinishReason
from kvstore.block_key import BlockKeyChain

if TYPE_CHECKING:
    from engine.sequence_group import SequenceGroup

__all__ = ["NO_ROW", "FinishedCandidate", "Sequence"]

NO_ROW = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and blocks of a candidate, or of what candidates have in common.

    Attributes:
        group: its request.
        index: the candidate's number.
        token_ids: the prompt and all tokens generated, here or before.
        keys: keys of the full transfer blocks, and of the full blocks, of `token_ids`.
        stop_token_ids: ids that end it.
        limit: it draws no token beyond this length.
        table: its blocks; None while it has none.
        row: the runner's slot for it, or `NO_ROW`.
        is_row_new: the runner does not know its block tables yet.
        num_computed: tokens whose KV is in the blocks. Kept up to date by
            chunks alone: while a sequence decodes, see `count_computed`.
        num_scheduled: these, and the tokens of steps in flight; see `DecodeSet`.
        logprob: sum of the generated tokens' log-probabilities, if asked for.
        is_streamed: its tokens are told as they come.
        num_saved: leading blocks that were published; see `engine.saves`.
        is_given_up: nobody wants it any more; it ends when it is back from the host.
        due: the step at which `DecodeSet` looks at it next.
        offset: `num_scheduled` minus the step number while it decodes.
    """

    group: "SequenceGroup"
    index: int
    token_ids: list[int]
    keys: BlockKeyChain
    stop_token_ids: frozenset[int]
    limit: int
    is_streamed: bool
    table: BlockTable | None = None
    row: int = NO_ROW
    is_row_new: bool = True
    num_computed: int = 0
    num_scheduled: int = 0
    logprob: float = 0.0
    num_saved: int = 0
    is_given_up: bool = False
    due: int = -1
    offset: int = 0

    @property
    def num_unscheduled(self) -> int:
        """Known tokens that no step has run or runs."""
        return len(self.token_ids) - self.num_scheduled

    def count_computed(self) -> None:
        """Counts what is computed of a sequence that decodes: all but the token drawn last,
        unless the chunk that it began with is still in flight.
        """
        if self.num_computed >= self.num_scheduled:
            self.num_computed = len(self.token_ids) - 1

    def settle(self) -> None:
        """The sequence decodes no more. What a step in flight computes of it is forgotten,
        and computed again.
        """
        self.count_computed()
        self.num_scheduled = self.num_computed

    def restart(self) -> None:
        """Nothing is computed any more."""
        self.table = None
        self.num_computed = self.num_scheduled = 0


@dataclass(frozen=True, slots=True)
class FinishedCandidate:
    """A ranked candidate that has ended; `score` is what it is ranked by."""

    token_ids: tuple[int, ...]
    score: float
    reason: FinishReason
