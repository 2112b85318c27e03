"""Finds stop strings in text that comes in pieces.

One pass over the characters with the automaton of Aho and Corasick ("Efficient
string matching", 1975): its state is the longest suffix of the text that begins
some stop, which is also exactly what must be held back. The cost per character
depends neither on the number of stops nor on their lengths.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["StopChecker"]


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
        """The state after one more character."""
        state = self
        while character not in state.following:
            if state.fallback is None:
                return state
            state = state.fallback
        return state.following[character]


class StopChecker:
    """Cuts a text before the first stop string that it completes.

    "First" is the stop whose last character comes first, so the answer does not
    depend on how the text is cut into pieces; of several that end there it is the
    longest.

    Args:
        stops: the stop strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._state = _build_automaton(stops)
        self._held = ""  # the last `self._state.depth` characters

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes the next piece of text.

        Returns:
            The text that is certain to come before any stop, and the stop if one
            is complete. Nothing may be pushed after that.
        """
        for i, character in enumerate(text):
            self._state = self._state.step(character)
            if self._state.stop is not None:
                before = self._held + text[: i + 1]
                self._held = ""
                return before.removesuffix(self._state.stop), self._state.stop
        text = self._held + text
        num_certain = len(text) - self._state.depth
        self._held = text[num_certain:]
        return text[:num_certain], None

    def flush(self) -> str:
        """Returns what is held back: the text has ended without a stop."""
        held, self._held = self._held, ""
        return held


def _build_automaton(stops: Sequence[str]) -> _State:
    """The root of the automaton for `stops`."""
    root = _State(depth=0)
    for stop in stops:
        state = root
        for character in stop:
            state = state.following.setdefault(character, _State(state.depth + 1))
        state.stop = stop
    _link_fallbacks(root)
    return root


def _link_fallbacks(root: _State) -> None:
    """Sets `fallback`, shorter states first, and hands shorter stops on."""
    queue = deque([root])
    while queue:
        state = queue.popleft()
        for character, longer in state.following.items():
            longer.fallback = state.fallback.step(character) if state.fallback else root
            longer.stop = longer.stop or longer.fallback.stop
            queue.append(longer)
