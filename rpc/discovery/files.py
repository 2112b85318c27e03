"""`file:///path`: every address in a file, one a line. The file may change."""

from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from baton.common.addresses import split_host_port
from baton.common.errors import ConfigurationError
from rpc.discovery.source import LookedUpSource, Scope

__all__ = ["FileTarget"]


@dataclass(frozen=True, slots=True)
class FileTarget:
    """A file with addresses."""

    path: Path

    @classmethod
    def parse(cls, text: str) -> "FileTarget":
        """Parses the path, without its first slash."""
        return cls(Path("/" + text))

    def __str__(self) -> str:
        return f"file://{self.path}"

    def open(self, scope: Scope) -> LookedUpSource:
        """Makes the source of the file's addresses."""
        return _FileSource(self)


class _FileSource(LookedUpSource):
    def __init__(self, target: FileTarget) -> None:
        super().__init__(str(target))
        self._path = target.path

    @override
    def look_up(self) -> frozenset[str]:
        lines = self._path.read_text().split()
        for line in lines:
            if "://" in line or split_host_port(line) is None:
                raise ConfigurationError(f"the line {line!r} is no address")
        return frozenset(lines)
