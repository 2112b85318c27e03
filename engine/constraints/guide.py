"""`Guide`: which tokens may follow a sequence, and which follow it without a draw.

It combines a request's constraint with the reasoning part that may come before the constrained
text.
"""

from collections.abc import Sequence

import numpy as np

from baton.common.request.request_spec import ReasoningMarks, ReasoningStart, RequestSpec
from engine.constraints.matcher import Constraint, Matcher
from engine.constraints.retokenizer import Retokenizer
from engine.constraints.vocabulary import bits_of

__all__ = ["Guide", "ReasoningPart"]


class ReasoningPart:
    """The position of a generated text relative to its reasoning part.

    Unless `marks.start` says where the text begins, the prompt's last tag does: the part is open
    if that is the one that starts it, and over if that is the one that ends it. Before the part,
    it exists only if the generated text begins with the start tag.

    Args:
        marks: the tags.
        budget: the most tokens before the end tag; None for no limit.
        prompt: the prompt's tokens.

    Attributes:
        is_over: whether the part has ended, or does not exist.
        opening: the tokens that would complete the start tag, if the generated text is still a
            beginning of it; else empty.
    """

    def __init__(self, marks: ReasoningMarks, budget: int | None, prompt: Sequence[int]) -> None:
        self._marks = marks
        self._budget = budget
        start = marks.start
        if start is ReasoningStart.BY_PROMPT:
            start = _start_by_prompt(marks, prompt)
        self.is_over = start is ReasoningStart.AFTER
        self.opening = marks.start_token_ids if start is ReasoningStart.BEFORE else ()
        self._latest: list[int] = []  # tokens of the open part, at most as many as the end tag
        self._num_tokens = 0
        self._is_closing = False

    @property
    def opened(self) -> tuple[int, ...]:
        """The tokens of an incomplete start tag that were generated."""
        start = self._marks.start_token_ids
        return start[: len(start) - len(self.opening)] if self.opening else ()

    @property
    def required_token(self) -> int | None:
        """The token that must come next, of the end tag, as the budget is used up or the part is
        closed; else None.
        """
        if self.is_over or self.opening:
            return None
        is_used_up = self._budget is not None and self._num_tokens >= self._budget
        return self._next_end_token if is_used_up or self._is_closing else None

    def close(self) -> int:
        """Makes the end tag come next; returns its first token. The part must be open."""
        self._is_closing = True
        return self._next_end_token

    @property
    def _next_end_token(self) -> int:
        """The token that completes the end tag, or brings it nearest to that."""
        end = self._marks.end_token_ids
        width = next(n for n in range(len(end) - 1, -1, -1) if self._ends_with(end[:n]))
        return end[width]

    def accept(self, token_id: int) -> tuple[int, ...]:
        """Moves on by a generated token; the part must not be over.

        Returns:
            The generated tokens if this one shows that the text begins otherwise than with the
            start tag, so that they are constrained text; else none.
        """
        if self.opening:
            if token_id == self.opening[0]:
                self.opening = self.opening[1:]
                return ()
            text = (*self.opened, token_id)
            self.is_over, self.opening = True, ()
            return text
        self._num_tokens += 1
        end = self._marks.end_token_ids
        self._latest = [*self._latest, token_id][-len(end) :]
        self.is_over = self._ends_with(end)
        return ()

    def fork(self) -> "ReasoningPart":
        """Returns an independent copy."""
        twin = ReasoningPart(self._marks, self._budget, ())
        twin.is_over, twin.opening = self.is_over, self.opening
        twin._latest, twin._num_tokens = self._latest, self._num_tokens
        twin._is_closing = self._is_closing
        return twin

    def _ends_with(self, token_ids: tuple[int, ...]) -> bool:
        return tuple(self._latest[len(self._latest) - len(token_ids) :]) == token_ids


class Guide:
    """The tokens that may follow one sequence. `Guide.of` makes it at the start of generated text.

    Attributes:
        mask: `ScheduledChunk.mask` of the next token.
        unsent: the sequence's last tokens if no output has had them yet.
    """

    def __init__(
        self,
        vocab_size: int,
        matcher: Matcher | None,
        reasoning: ReasoningPart | None,
        retokenizer: Retokenizer | None,
    ) -> None:
        self._vocab_size = vocab_size
        self._matcher = matcher
        self._reasoning = reasoning
        self._retokenizer = retokenizer
        self.mask: bytes | None = None
        self.unsent: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        spec: RequestSpec,
        vocab_size: int,
        constraint: Constraint | None,
        retokenizer: Retokenizer | None,
    ) -> "Guide":
        """Returns the guide of a request that has a constraint or a budget.

        Args:
            spec: the request.
            vocab_size: number of logits.
            constraint: that of `spec.params.structured_outputs`; None without one.
            retokenizer: finds forced tokens; None to draw every token.

        Raises:
            InvalidArgumentError: no token can begin the text, or the grammar takes too long.
        """
        budget = spec.params.thinking_token_budget
        marks, prompt = spec.reasoning, spec.prompt_token_ids
        guide = cls(
            vocab_size,
            None if constraint is None else constraint.new_matcher(spec.stop_token_ids),
            None if marks is None else ReasoningPart(marks, budget, prompt),
            retokenizer,
        )
        guide._drop_reasoning()
        guide.update_mask()
        return guide

    @property
    def is_needed(self) -> bool:
        """Whether it may still forbid a token."""
        return self._matcher is not None or self._reasoning is not None

    @property
    def is_complete(self) -> bool:
        """Whether the text is complete, and nothing but a stop token can follow."""
        return self._reasoning is None and self._matcher is not None and self._matcher.is_terminated

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Moves on by generated tokens; `update_mask` must follow.

        Returns:
            Whether the constraint allows all of them. If not, the guide must not be used any more.

        Raises:
            InvalidArgumentError: the grammar takes too long.
        """
        return all(self._accept_text(self._text_of(token_id)) for token_id in token_ids)

    def close_reasoning(self) -> int | None:
        """Ends an open reasoning part where a text would end that has no constrained text yet.

        Returns:
            The token that takes the place of the stop token that was drawn: the first of the end
            tag, whose other tokens follow. None if the text may end.
        """
        part, matcher = self._reasoning, self._matcher
        if part is None or part.opening or matcher is None or matcher.may_stop:
            return None
        return part.close()

    def forced_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """Returns tokens that can be appended without drawing them ("jump-forward decoding").

        Args:
            token_ids: the sequence, prompt included; all generated tokens were accepted.
        """
        if self._reasoning is not None or self._matcher is None or self._retokenizer is None:
            return []
        return self._retokenizer.forced_tokens(self._matcher, token_ids)

    def follow(self, drafts: Sequence[int], token_ids: Sequence[int]) -> list[bytes | None]:
        """Returns the masks after draft tokens, as far as these may follow and are drawn one by
        one.

        Args:
            drafts: draft tokens.
            token_ids: the sequence, prompt included; all generated tokens were accepted.

        Raises:
            InvalidArgumentError: the grammar takes too long.
        """
        probe, masks, known = self.fork(), list[bytes | None](), list(token_ids)
        for draft in drafts:
            if probe.forbids(draft) or not probe.accept((draft,)) or probe.is_complete:
                break
            known.append(draft)
            if not probe.is_needed:
                probe.mask = None
            elif probe.forced_tokens(known):
                break
            else:
                probe.update_mask()
            masks.append(probe.mask)
        return masks

    def forbids(self, token_id: int) -> bool:
        """Whether `mask` does not allow a token."""
        if self.mask is None:
            return False
        return not self.mask[token_id // 8] >> token_id % 8 & 1

    def update_mask(self) -> None:
        """Sets `mask` for the tokens that were accepted.

        Raises:
            InvalidArgumentError: no token may come next, or the grammar takes too long.
        """
        part = self._reasoning
        if part is None:
            self.mask = None if self._matcher is None else self._make_mask(self._matcher)
        elif part.opening and self._matcher is not None:
            probe = self._matcher.fork()
            is_text = probe.replay(part.opened)
            self.mask = self._mask_with(
                part.opening[0], self._make_mask(probe) if is_text else None
            )
        else:
            token = part.required_token
            self.mask = None if token is None else self._mask_with(token, None)

    def fork(self) -> "Guide":
        """Returns an independent copy, for another candidate that has the same tokens."""
        twin = Guide(
            self._vocab_size,
            None if self._matcher is None else self._matcher.fork(),
            None if self._reasoning is None else self._reasoning.fork(),
            self._retokenizer,
        )
        twin.mask = self.mask
        return twin

    def _text_of(self, token_id: int) -> tuple[int, ...]:
        """Moves the reasoning part on by a token; returns the tokens that are constrained text."""
        if self._reasoning is None:
            return (token_id,)
        text = self._reasoning.accept(token_id)
        self._drop_reasoning()
        return text

    def _accept_text(self, token_ids: Sequence[int]) -> bool:
        return self._matcher is None or self._matcher.replay(token_ids)

    def _drop_reasoning(self) -> None:
        if self._reasoning is not None and self._reasoning.is_over:
            self._reasoning = None

    def _make_mask(self, matcher: Matcher) -> bytes:
        row = np.empty(self._num_words, dtype=np.int32)
        matcher.fill_mask(row)
        return row.tobytes()

    def _mask_with(self, token_id: int, mask: bytes | None) -> bytes:
        """Returns a mask that allows a token besides those of `mask`, or alone."""
        row = np.zeros(self._num_words, np.int32) if mask is None else np.frombuffer(mask, np.int32)
        row = row.copy()
        words, bits = bits_of((token_id,))
        row[words] |= bits
        return row.tobytes()

    @property
    def _num_words(self) -> int:
        return -(-self._vocab_size // 32)


def _start_by_prompt(marks: ReasoningMarks, prompt: Sequence[int]) -> ReasoningStart:
    """Returns where a text after the prompt begins, by the last tag in the prompt."""
    started = _last_index(prompt, marks.start_token_ids)
    ended = _last_index(prompt, marks.end_token_ids)
    if started == ended:  # there is no tag
        return ReasoningStart.BEFORE
    return ReasoningStart.INSIDE if started > ended else ReasoningStart.AFTER


def _last_index(token_ids: Sequence[int], tag: tuple[int, ...]) -> int:
    """Returns where the last occurrence of a tag begins; -1 if there is none."""
    width = len(tag)
    for start in range(len(token_ids) - width, -1, -1):
        if token_ids[start] == tag[0] and tuple(token_ids[start : start + width]) == tag:
            return start
    return -1
