"""`CallSyntax`: how a model writes a call, for forms of text that allow calls."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CallSyntax", "json_heads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """The texts around a call of a function.

    A call is one of `heads`, the arguments, `tail`, and perhaps one of `closers`. In heads,
    `NAME` stands for the function's name.

    Attributes:
        heads: the texts before the arguments.
        tail: the text after them.
        closers: the texts that may end the call.
        separators: the texts that may stand between two calls.
        opener: the text that begins calls and nothing else; empty: calls begin like other text, so
            only a whole head shows that there is one.
        prefixes: without an opener, the texts that may stand before a call that is a JSON object.
        argument_keys: without an opener, the keys that the arguments may have in such a call.
        has_json_arguments: whether the arguments are a JSON object. If not, they are any text up to
            the tail.
    """

    heads: Sequence[str]
    tail: str
    closers: Sequence[str] = ()
    separators: Sequence[str] = ()
    opener: str = ""
    prefixes: Sequence[str] = ()
    argument_keys: Sequence[str] = ()
    has_json_arguments: bool = True


def json_heads(prefixes: Sequence[str], key: str) -> tuple[str, ...]:
    """Returns the heads of calls that are JSON objects, with and without spaces.

    Args:
        prefixes: the texts before the object.
        key: the key of the arguments.
    """
    spellings = (f'{{"name": "NAME", "{key}": ', f'{{"name":"NAME","{key}":')
    return tuple(prefix + spelling for prefix in prefixes for spelling in spellings)
