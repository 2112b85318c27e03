"""`TextStream`: token ids in, text out, up to a stop string; the router and `LLM` use it.

`StopChecker` finds stop strings in text that comes in pieces. It makes one pass over
the characters with the automaton of Aho and Corasick ("Efficient string matching",
1975). The automaton's state is the longest suffix of the text that begins some stop,
which is exactly the text to hold back. The cost per character depends neither on the
number of stops nor on their lengths.
"""

from collections import deque
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.common.request.request_spec import RequestSpec
from router.requests.detokenizer import make_detokenizer
from router.requests.tokenizer import Tokenizer

__all__ = ["StopChecker", "TextPiece", "TextStream"]


class TextPiece(NamedTuple):
    """The text of some tokens.

    Attributes:
        text: text that is complete now.
        matched_stop: the stop string that ended the text; part of the text only if the
            request includes it.
        num_tokens: how many of the tokens were used: all of them, or those up
            to and including the token whose text completed the stop string.
    """

    text: str
    matched_stop: str | None
    num_tokens: int


class TextStream:
    """The text of one candidate's tokens, up to a stop string or a stop token.

    Without `detokenize` there is no text, and nothing is done for it.

    Args:
        tokenizer: the model's tokenizer.
        spec: the request.
    """

    def __init__(self, tokenizer: Tokenizer, spec: RequestSpec) -> None:
        params = spec.params
        self._has_text = params.detokenize
        if not self._has_text:
            return
        self._detokenizer = make_detokenizer(
            tokenizer,
            spec.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._checker = StopChecker(params.stop, keep_stop=params.include_stop_str_in_output)
        self._unwritten = frozenset() if params.include_stop_str_in_output else spec.stop_token_ids
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        """Adds the next tokens. Must not be called after a matched stop."""
        if not self._has_text:
            return TextPiece("", None, len(token_ids))
        if not self._checker.has_stops:
            written = [token_id for token_id in token_ids if token_id not in self._unwritten]
            return TextPiece(self._detokenizer.push(written), None, len(token_ids))
        text = ""
        for num_used, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            if token_id in self._unwritten:
                continue
            certain, matched_stop = self._check(self._detokenizer.push([token_id]))
            text += certain
            if matched_stop is not None:
                return TextPiece(text, matched_stop, num_used)
        return TextPiece(text, None, len(token_ids))

    def fork(self) -> "TextStream":
        """Returns an independent copy; the automaton of the stops is shared."""
        twin = copy(self)
        if self._has_text:
            twin._detokenizer, twin._checker = self._detokenizer.fork(), copy(self._checker)
        return twin

    def finish(self) -> TextPiece:
        """Returns the text that is held back, which may still complete a stop. Called once, at
        the end, unless a stop was matched.
        """
        if not self._has_text:
            return TextPiece("", None, 0)
        certain, matched_stop = self._check(self._detokenizer.flush())
        return TextPiece(certain + self._checker.flush(), matched_stop, 0)

    def _check(self, text: str) -> tuple[str, str | None]:
        """Searches the text for stops, unless it belongs to the first `min_tokens` tokens."""
        return self._checker.push(text, may_stop=self._num_tokens > self._min_tokens)


@dataclass(slots=True, eq=False)
class _State:
    """A suffix of the text that is a prefix of a stop.

    Attributes:
        depth: its length.
        stop: the longest stop that the text ends with here, if any.
        fallback: the state of its longest proper suffix; None for the root.
        following: the longer states, by their last character.
    """

    depth: int
    stop: str | None = None
    fallback: "_State | None" = None
    following: dict[str, "_State"] = field(default_factory=dict)

    def step(self, character: str) -> "_State":
        """Returns the state after one more character."""
        state = self
        while character not in state.following:
            if state.fallback is None:
                return state
            state = state.fallback
        return state.following[character]


class StopChecker:
    """Cuts a text before the first stop string that it completes.

    The first stop is the one whose last character comes first, so the result does not
    depend on how the text is cut into pieces. If several stops end at that character,
    the longest counts.

    Args:
        stops: the stop strings, none of them empty.
        keep_stop: cut after the stop string instead.

    Attributes:
        has_stops: whether there is any stop string.
    """

    def __init__(self, stops: Sequence[str], *, keep_stop: bool = False) -> None:
        self.has_stops = bool(stops)
        self._state = _build_automaton(stops)
        self._keep_stop = keep_stop
        self._held = ""  # the last characters, which may begin a stop that is cut away

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Adds the next piece of text. Must not be called after a complete stop.

        Args:
            text: the piece.
            may_stop: whether a stop that this piece completes counts. It may begin in
                earlier pieces.

        Returns:
            The text that is certain to be part of the result, and the stop if one is
            complete.
        """
        if not self.has_stops:
            return text, None
        for i, character in enumerate(text):
            self._state = self._state.step(character)
            if may_stop and self._state.stop is not None:
                before = self._held + text[: i + 1]
                self._held = ""
                cut = "" if self._keep_stop else self._state.stop
                return before.removesuffix(cut), self._state.stop
        text = self._held + text
        num_certain = len(text) - (0 if self._keep_stop else self._state.depth)
        self._held = text[num_certain:]
        return text[:num_certain], None

    def flush(self) -> str:
        """Returns the text that is held back. Called when the text has ended without a stop."""
        held, self._held = self._held, ""
        return held


def _build_automaton(stops: Sequence[str]) -> _State:
    """Returns the root of the automaton for `stops`."""
    root = _State(depth=0)
    for stop in stops:
        state = root
        for character in stop:
            state = state.following.setdefault(character, _State(state.depth + 1))
        state.stop = stop
    _link_fallbacks(root)
    return root


def _link_fallbacks(root: _State) -> None:
    """Sets each state's `fallback`, shorter states first, and its stop to that of the fallback if
    the state completes none itself.
    """
    queue = deque([root])
    while queue:
        state = queue.popleft()
        for character, longer in state.following.items():
            longer.fallback = state.fallback.step(character) if state.fallback else root
            longer.stop = longer.stop or longer.fallback.stop
            queue.append(longer)
