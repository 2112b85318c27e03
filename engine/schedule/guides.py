"""`Guides`: gives sequences their guides once their requests' grammars are compiled. Pure."""

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Protocol

from baton.common.errors import BatonError, FailedPreconditionError, InternalError
from baton.common.request.request_spec import RequestSpec
from baton.common.request.structured_outputs import StructuredOutputs
from engine.constraints.guide import Guide
from engine.constraints.matcher import Constraint
from engine.constraints.retokenizer import Retokenizer
from engine.groups.group import GroupState, Sequence, SequenceGroup

__all__ = ["GrammarSource", "Guides", "masks_after"]

_logger = logging.getLogger("baton.engine")


class GrammarSource(Protocol):
    """Compiles constraints, as `engine.constraints.grammars.Grammars` does."""

    @property
    def retokenizer(self) -> Retokenizer:
        """The model's retokenizer; available once a constraint has been compiled."""

    def compile(self, outputs: StructuredOutputs, owner: str = "") -> "Future[Constraint]":
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
        return len(self._compiling)

    def start_compiling(self, group: SequenceGroup, outputs: StructuredOutputs) -> None:
        """Starts to compile the constraint of a new group, which waits for it."""
        group.state = GroupState.COMPILING
        # Each tenant's requests have a salt of their own.
        salt = group.request.spec.cache_salt
        self._compiling[group] = self._grammars.compile(outputs, salt)

    def forget(self, group: SequenceGroup) -> None:
        """Stops waiting for the grammar of a group that ends."""
        if (future := self._compiling.pop(group, None)) is not None:
            future.cancel()

    def take_compiled(self) -> list[tuple[SequenceGroup, Constraint | BatonError]]:
        """Returns the groups whose grammars are compiled or refused; each only once."""
        ended = [group for group, future in self._compiling.items() if future.done()]
        results = []
        for group in ended:
            future = self._compiling.pop(group)
            error = future.exception()
            if error is not None and not isinstance(error, BatonError):
                _logger.error(
                    "the grammar of %s was not compiled", group.request_id, exc_info=error
                )
                error = InternalError("the constraint could not be compiled")
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
            InternalError: a library failed.
        """
        spec = group.request.spec
        draws_all = constraint is None or group.hands_over or _draws_every_token(spec)
        retokenizer = None if draws_all else self._grammars.retokenizer
        appended = {}
        with _typed_errors():
            first = Guide.of(spec, self._vocab_size, constraint, retokenizer)
            for sequence in group.branches or group.running:
                sequence.guide = guide = first.fork()
                generated = sequence.token_ids[group.num_prompt :]
                if generated and generated[-1] not in sequence.stop_token_ids:
                    if not guide.accept(generated):
                        raise FailedPreconditionError(_OTHER_TOKENS)
                    guide.unsent = self._append_forced(sequence, guide)
                    if sequence.finish_reason is not None:
                        appended[sequence] = guide.unsent
        return appended

    def advance(self, sequence: Sequence) -> tuple[int, ...]:
        """Moves a sequence's guide past the token that it has drawn.

        A stop token within the reasoning part is no end as long as the text behind it is owed. The
        part's end tag takes its place: models that do not reason end their text there.

        Returns:
            The tokens to send: that token, and those appended before and after it without a draw.

        Raises:
            InvalidArgumentError: no token may follow, or the grammar takes too long.
            InternalError: a library failed, or the grammar does not allow the drawn token.
        """
        guide, drawn = sequence.guide, sequence.token_ids[-1]
        if guide is None:
            return (drawn,)
        before, guide.unsent = guide.unsent, ()
        if drawn in sequence.stop_token_ids:
            if (closing := guide.close_reasoning()) is None:
                return (*before, drawn)
            sequence.token_ids[-1] = drawn = closing
        with _typed_errors():
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


def masks_after(
    sequence: Sequence, guide: Guide, drafts: tuple[int, ...]
) -> tuple[bytes | None, ...]:
    """Returns the masks after draft tokens of a sequence's tokens, as far as these may follow; none
    if that fails: the error, if it is one of the tokens, occurs again when they are drawn.
    """
    try:
        with _typed_errors():
            return tuple(guide.follow(drafts, sequence.token_ids))
    except BatonError:
        return ()


_OTHER_TOKENS = (
    "structured_outputs does not allow the tokens that another replica has generated; it may have "
    "another version or --structured-outputs-backend"
)


def _draws_every_token(spec: RequestSpec) -> bool:
    """Returns whether tokens that the grammar forces must be drawn too.

    That is so if their log-probabilities are needed, or if other rules may forbid them.
    """
    params = spec.params
    is_scored = params.logprobs is not None or params.is_ranked
    may_forbid = params.allowed_token_ids or params.bad_words or params.extra_args
    return is_scored or bool(may_forbid) or params.min_tokens > 0


@contextmanager
def _typed_errors() -> Iterator[None]:
    """Turns errors of libraries into InternalError, so that they end one request alone.

    Panics of libraries in Rust are no `Exception`.
    """
    try:
        yield
    except (BatonError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        _logger.exception("a library of structured outputs failed")
        raise InternalError("structured_outputs failed on this request") from error
