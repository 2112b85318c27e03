"""Adds options to URLs of one connector or several."""

from collections.abc import Sequence

from kvstore.url import MULTI_SCHEME, scheme_of, split_members

__all__ = ["joined", "members_of", "with_option"]


def members_of(url: str) -> tuple[str, ...]:
    """Returns the URLs of a `multi://` URL's members; of any other URL, the URL itself."""
    return split_members(url) if scheme_of(url) == MULTI_SCHEME else (url,)


def joined(members: Sequence[str]) -> str:
    """Returns the URL that names these connectors as one."""
    return members[0] if len(members) == 1 else f"{MULTI_SCHEME}://{','.join(members)}"


def with_option(url: str, option: str) -> str:
    """Returns one connector's URL with `NAME=VALUE` added."""
    return f"{url}{'&' if '?' in url else '?'}{option}"
