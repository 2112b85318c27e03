"""The grammar of connector URLs around the backends' own: `multi://` and `faulty+`. Pure.

`multi://URL,URL,...` is several connectors as one, each with its own options;
`faulty+URL` is one whose transfers go wrong, for tests.
"""

import re

__all__ = ["FAULTY_PREFIX", "MULTI_SCHEME", "scheme_of", "split_members"]

FAULTY_PREFIX = "faulty+"
MULTI_SCHEME = "multi"

# A comma between hosts or in an option is none between members: no scheme follows it.
_NEXT_MEMBER = re.compile(r",(?=[A-Za-z][A-Za-z0-9+.-]*://)")


def scheme_of(url: str) -> str:
    """The part before `://`, in lower case; empty if there is none."""
    scheme, separator, _ = url.partition("://")
    return scheme.lower() if separator else ""


def split_members(url: str) -> tuple[str, ...]:
    """The URLs in a `multi://` URL, as written."""
    rest = url.partition("://")[2]
    return tuple(_NEXT_MEMBER.split(rest)) if rest else ()
