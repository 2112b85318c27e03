"""`TextStream`: token ids in, text out, up to a stop string; the router and `LLM` use it.

`IncrementalDetokenizer` turns token ids into text piece by piece, never half a
character. The text of a token depends on the tokens beside it: a character may be spread
over several tokens, and the first word of a text loses its leading space. Therefore a
short window is decoded twice, without and with the new tokens, and the difference is
the new text. (Text Generation Inference and vLLM call its bounds prefix and read
offset.) Joined, the pieces equal the text of all tokens decoded at once.

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
from os.path import commonprefix
from typing import NamedTuple

from baton.common.request.request_spec import RequestSpec
from router.requests.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "StopChecker", "TextPiece", "TextStream"]

_REPLACEMENT = "\ufffd"
"""The decoder's text for bytes that are no character, or not yet."""
_MAX_CHARACTER_BYTES = 4
"""The longest UTF-8 sequence; every token that has text has at least one byte."""
_MAX_TAIL_TOKENS = 256
"""About the most tokens of a prompt that are decoded again with the first generated ones."""


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
        self._detokenizer = IncrementalDetokenizer(
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


class IncrementalDetokenizer:
    """Turns one sequence's generated tokens into text as they come.

    Text is held back while more tokens could change it: within a character and, in
    vocabularies with byte fallback, until a run of byte tokens ends, since one bad
    byte turns the whole run into U+FFFD. The cost per token does not grow with the
    sequence.

    Args:
        tokenizer: the model's tokenizer.
        prompt_token_ids: the tokens before the generated ones; the last of them are context.
        skip_special_tokens: special tokens have no text.
        spaces_between_special_tokens: if not, an added token that follows another one is
            written without the space that some decoders put before it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        self._is_spaced = skip_special_tokens or spaces_between_special_tokens
        self._context = self._tail(prompt_token_ids)  # tokens whose text was returned
        self._pending: list[int] = []  # tokens after them, whose text was not

    def push(self, token_ids: Sequence[int]) -> str:
        """Adds the next tokens; returns the text that they complete."""
        if len(token_ids) > 1 and not self._pending:
            text = self._push_all(token_ids)
            if text is not None:
                return text
        return "".join(self._push_one(token_id) for token_id in token_ids)

    def fork(self) -> "IncrementalDetokenizer":
        """Returns an independent copy."""
        twin = copy(self)
        twin._pending = self._pending.copy()
        return twin

    def flush(self) -> str:
        """Returns the text that is held back, complete or not. Called at the end."""
        return self._release() if self._pending else ""

    def _push_all(self, token_ids: Sequence[int]) -> str | None:
        """Adds tokens at once, which costs less than one by one; returns their text.

        Returns None, and adds nothing, if a further token could change the text.
        """
        has_text, skips = self._tokenizer.has_text, self._skips_special
        self._pending = [token_id for token_id in token_ids if has_text(token_id, skips)]
        if self._pending and self._is_spaced and not self._may_change():
            return self._release()
        self._pending = []
        return None

    def _push_one(self, token_id: int) -> str:
        if not self._tokenizer.has_text(token_id, self._skips_special):
            return ""
        self._pending.append(token_id)
        return "" if self._may_change() else self._release()

    def _may_change(self) -> bool:
        """Whether a further token could change the text of the pending ones."""
        if self._pending[-1] in self._tokenizer.byte_token_ids:
            return True
        # Bytes before the last four cannot belong to an incomplete character.
        nearby = self._context[-_MAX_CHARACTER_BYTES:] + self._pending[-_MAX_CHARACTER_BYTES:]
        end = self._decode(nearby[-_MAX_CHARACTER_BYTES:])
        return end.endswith(_REPLACEMENT)

    def _release(self) -> str:
        """Returns the pending tokens' text; the tokens become the context."""
        before = self._decode(self._context)
        after = self._decode(self._context + self._pending)
        # A prompt may end within a character, whose text the new tokens then change.
        num_known = len(commonprefix([before, after]))  # noqa: RUF071 - characters are meant
        text = after[num_known:]
        if not self._is_spaced:
            text = self._without_space(text)
        if text:
            self._context, self._pending = self._pending, []
        return text

    def _tail(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The last tokens of the prompt, which the text after it depends on.

        Of a longer run of bytes only the last ones count, from the start of a character on: each
        candidate decodes them.
        """
        bytes_of, tail = self._tokenizer.byte_token_ids, list[int]()
        for token_id in reversed(prompt_token_ids):
            if len(tail) > _MAX_CHARACTER_BYTES and tail[-1] not in bytes_of:
                break
            num_over = len(tail) - _MAX_TAIL_TOKENS
            if num_over >= 0 and not (
                num_over < _MAX_CHARACTER_BYTES and _continues_character(bytes_of[tail[-1]])
            ):
                break
            if self._tokenizer.has_text(token_id, self._skips_special):
                tail.append(token_id)
        return tail[::-1]

    def _without_space(self, text: str) -> str:
        """Removes the decoder's space between two added tokens from the pending tokens' text."""
        added = self._tokenizer.added_tokens
        is_second = bool(self._context) and self._context[-1] in added
        if is_second and text.startswith(f" {added.get(self._pending[0], text)}"):
            return text[1:]
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skips_special)


def _continues_character(byte: int) -> bool:
    """Whether a byte is one after the first of a character in UTF-8."""
    return byte & 0xC0 == 0x80


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
