"""Versions of the formats in which workers leave KV for each other. Pure.

All of them are in the namespace of the keys of blocks: workers with other versions find nothing of
each other's in a store, and a router refuses to serve with both.
"""

__all__ = [
    "HANDOFF_FORMAT_VERSION",
    "KEY_FORMAT_VERSION",
    "OBJECT_FORMAT_VERSION",
    "describe_formats",
    "format_parts",
]

KEY_FORMAT_VERSION = 1
"""How keys are derived (`kvstore.block_key`)."""
OBJECT_FORMAT_VERSION = 1
"""Headers of objects (`kvstore.codec`)."""
HANDOFF_FORMAT_VERSION = 1
"""The meaning of `KvHandoff` (`kvstore.handoff`)."""


def format_parts() -> list[bytes]:
    """Returns what a namespace has of the versions that are not 1, except that of the keys."""
    versions = ((b"objects", OBJECT_FORMAT_VERSION), (b"handoffs", HANDOFF_FORMAT_VERSION))
    return [
        part
        for name, version in versions
        if version != 1
        for part in (name, version.to_bytes(4, "little"))
    ]


def describe_formats() -> str:
    """Returns all versions in words."""
    return (
        f"keys {KEY_FORMAT_VERSION}, objects {OBJECT_FORMAT_VERSION}, "
        f"handoffs {HANDOFF_FORMAT_VERSION}"
    )
