"""`Guides`: gives sequences their guides once their requests' grammars are compiled. Pure."""

from concurrent.futures import Future
from typing import Protocol

from baton.errors import BatonError, FailedPreconditionError, InternalError
from baton.structured_outputs import StructuredOutputs
from engine.constraints.guide import Guide
from engine.constraints.matcher import Constraint
from engine.constraints.retokenizer import Retokenizer
from engine.group import GroupState, Sequence, SequenceGroup

__all__ = ["GrammarSource", "Guides"]


class GrammarSource(Protocol):
    """Compiles constraints, as `engine.constraints.grammars.Grammars` does."""

    @property
    def retokenizer(self) -> Retokenizer:
        """Of the model's tokenizer; there once a constraint has been compiled."""

    def compile(self, outputs: StructuredOutputs) -> "Future[Constraint]":
        """Returns at once; the engine is woken when the future ends."""


class Guides:
    """The requests that wait for their grammars, and the guides of all that need one.

    Args:
        grammars: compiles constraints.
        vocab_size: number of logits.
    """

    def __init__(self, grammars: GrammarSource, vocab_size: int) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._compiling: dict[SequenceGroup, Future[Constraint]] = {}

    @property
    def num_compiling(self) -> int:
        """Requests that wait for their grammars."""
        return sum(group.state is GroupState.COMPILING for group in self._compiling)

    def start_compiling(self, group: SequenceGroup, outputs: StructuredOutputs) -> None:
        """Starts to compile the constraint of a new group, which waits for it."""
        group.state = GroupState.COMPILING
        self._compiling[group] = self._grammars.compile(outputs)

    def take_compiled(self) -> list[tuple[SequenceGroup, Constraint | BatonError]]:
        """Returns the groups whose grammars are compiled or refused; each only once.

        Groups that have ended meanwhile are left out.
        """
        ended = [group for group, future in self._compiling.items() if future.done()]
        results = []
        for group in ended:
            future = self._compiling.pop(group)
            error = future.exception()
            if error is not None and not isinstance(error, BatonError):
                raise error  # a bug: futures end with typed errors
            if group.state is GroupState.COMPILING:
                results.append((group, error or future.result()))
        return results

    def attach(
        self, group: SequenceGroup, constraint: Constraint | None
    ) -> dict[Sequence, tuple[int, ...]]:
        """Gives the group's sequences their guides, moved past the tokens that they came with.

        Args:
            group: a group whose request needs guides.
            constraint: that of its request, if it has one.

        Returns:
            By branch, the appended tokens of branches that these tokens end. The other branches
            send theirs with their next drawn token, because a handed-over request's first output
            means that its prompt is loaded.

        Raises:
            FailedPreconditionError: the grammar does not allow the tokens that they came with.
            InvalidArgumentError: no token may follow, or the grammar takes too long.
        """
        spec = group.request.spec
        # Log-probabilities of tokens that no draw needs are not computed.
        is_scored = spec.params.logprobs is not None or spec.params.is_ranked
        draws_all = constraint is None or is_scored or group.hands_over
        retokenizer = None if draws_all else self._grammars.retokenizer
        first = Guide.of(spec, self._vocab_size, constraint, retokenizer)
        appended = {}
        for sequence in group.branches or group.running:
            sequence.guide = guide = first.fork()
            generated = sequence.token_ids[group.num_prompt :]
            if generated and generated[-1] not in sequence.stop_token_ids:
                if not guide.accept(generated):
                    raise FailedPreconditionError(
                        "structured_outputs does not allow the tokens that another replica has "
                        "generated; it may have another version or --structured-outputs-backend"
                    )
                guide.unsent = self._append_forced(sequence, guide)
                if sequence.finish_reason is not None:
                    appended[sequence] = guide.unsent
        return appended

    def advance(self, sequence: Sequence) -> tuple[int, ...]:
        """Moves a sequence's guide past the token that it has drawn.

        Returns:
            The tokens to send: that token, and those appended before and after it without a draw.

        Raises:
            InvalidArgumentError: no token may follow, or the grammar takes too long.
            InternalError: the grammar does not allow the drawn token, which is a bug.
        """
        guide, drawn = sequence.guide, sequence.token_ids[-1]
        if guide is None:
            return (drawn,)
        before, guide.unsent = guide.unsent, ()
        if drawn in sequence.stop_token_ids:
            return (*before, drawn)
        if not guide.accept((drawn,)):
            raise InternalError("a token was drawn that the grammar does not allow")
        return (*before, drawn, *self._append_forced(sequence, guide))

    def _append_forced(self, sequence: Sequence, guide: Guide) -> tuple[int, ...]:
        """Appends the tokens that follow without a draw, and returns them.

        Updates the mask, or drops the guide if it is not needed any more.
        """
        forced = list[int]()
        if sequence.finish_reason is None:
            room = sequence.limit - len(sequence.token_ids)
            forced = guide.forced_tokens(sequence.token_ids)[:room]
            stops = (i for i, token in enumerate(forced, 1) if token in sequence.stop_token_ids)
            forced = forced[: next(stops, len(forced))]
            sequence.token_ids += forced
            guide.accept(forced)  # the retokenizer has tried them
        if not guide.is_needed:
            sequence.guide = None
        elif sequence.finish_reason is None:
            guide.update_mask()
        return tuple(forced)
