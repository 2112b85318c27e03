"""The platform tag of a wheel with compiled libraries: the oldest systems that can load them.

A library names the versions of the symbols that it takes from glibc and from GCC's libraries. A
tag `manylinux_2_31_x86_64` (PEP 600) promises that a system with glibc 2.31 has all of them. The
limits are those of the tool auditwheel.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Needs", "platform_tag", "read_needs"]

_Version = tuple[int, ...]

# By the minor version of glibc: the newest symbols of the other libraries that come with it.
_SYSTEMS: dict[int, dict[str, _Version]] = {
    17: {"GLIBCXX": (3, 4, 19), "CXXABI": (1, 3, 7), "GCC": (4, 7, 0)},
    28: {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)},
    31: {"GLIBCXX": (3, 4, 28), "CXXABI": (1, 3, 12), "GCC": (7, 0, 0)},
    34: {"GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (7, 0, 0)},
    35: {"GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12, 0, 0)},
}
_LIBRARIES = {
    *("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"),
    *("libgcc_s.so.1", "libstdc++.so.6"),
}
_ARCHITECTURES = {62: "x86_64", 183: "aarch64"}
_LOADER = "ld-linux"
_MAGIC_64_BIT_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
_DYNAMIC, _NEEDED_VERSIONS = 6, 0x6FFFFFFE
_NEEDED_LIBRARY = 1


@dataclass(frozen=True, slots=True)
class _Section:
    """A section of a library, by the fields of its header."""

    kind: int
    data: bytes
    link: int
    num_entries: int


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of a library.

    Attributes:
        architecture: such as "x86_64"; empty if it is of none that has a tag.
        libraries: file names.
        symbols: versions such as "GLIBC_2.29".
    """

    architecture: str
    libraries: frozenset[str]
    symbols: frozenset[str]


def platform_tag(libraries: Iterable[Path]) -> str | None:
    """Returns the tag of the oldest systems that can load all of these libraries.

    Returns:
        None if no tag describes them: they are for another system than Linux with glibc, or need
        newer symbols or other libraries than any tag promises.
    """
    needs = [read_needs(path) for path in libraries]
    architectures = {each.architecture for each in needs}
    files = {name for each in needs for name in each.libraries}
    symbols = {symbol for each in needs for symbol in each.symbols}
    others = {name for name in files - _LIBRARIES if not name.startswith(_LOADER)}
    if others or "" in architectures or len(architectures) != 1:
        return None
    fitting = (minor for minor, limits in _SYSTEMS.items() if _has(minor, limits, symbols))
    minor = next(fitting, None)
    return None if minor is None else f"manylinux_2_{minor}_{architectures.pop()}"


def _has(minor: int, limits: dict[str, _Version], symbols: Iterable[str]) -> bool:
    """Whether a system with this glibc has all of these symbols."""
    limits = {**limits, "GLIBC": (2, minor)}
    for symbol in symbols:
        name, _, version = symbol.partition("_")
        numbers = tuple(map(int, version.split("."))) if version.replace(".", "").isdigit() else ()
        if not numbers or name not in limits or numbers > limits[name]:
            return False
    return True


def read_needs(path: Path) -> Needs:
    """Reads from a library's headers what it needs; of no architecture if it is no ELF library."""
    data = path.read_bytes()
    if not data.startswith(_MAGIC_64_BIT_LITTLE_ENDIAN):
        return Needs("", frozenset(), frozenset())
    (machine,) = struct.unpack_from("<H", data, 18)
    sections = [*_sections(data)]
    files, symbols = set[str](), set[str]()
    for section in sections:
        if section.kind == _DYNAMIC:
            files.update(_libraries(section.data, sections[section.link].data))
        elif section.kind == _NEEDED_VERSIONS:
            symbols.update(_symbols(section, sections[section.link].data))
    return Needs(_ARCHITECTURES.get(machine, ""), frozenset(files), frozenset(symbols))


def _sections(data: bytes) -> Iterator[_Section]:
    (offset,) = struct.unpack_from("<Q", data, 40)
    size, number = struct.unpack_from("<HH", data, 58)
    for index in range(number):
        fields = struct.unpack_from("<IIQQQQIIQQ", data, offset + index * size)
        kind, start, length, link, num_entries = fields[1], *fields[4:8]
        yield _Section(kind, data[start : start + length], link, num_entries)


def _libraries(dynamic: bytes, texts: bytes) -> Iterator[str]:
    for tag, value in struct.iter_unpack("<qQ", dynamic):
        if tag == _NEEDED_LIBRARY:
            yield _text(texts, value)


def _symbols(section: _Section, texts: bytes) -> Iterator[str]:
    """The versions that a section lists: per library a record, and after it one per version."""
    at = 0
    for _ in range(section.num_entries):
        _, number, _, first, following = struct.unpack_from("<HHIII", section.data, at)
        version_at = at + first
        for _ in range(number):
            _, _, _, name, step = struct.unpack_from("<IHHII", section.data, version_at)
            yield _text(texts, name)
            version_at += step
        at += following


def _text(texts: bytes, start: int) -> str:
    return texts[start : texts.index(b"\0", start)].decode()
