"""The demo model's training text, which every Python installation contains.

It consists of the docstrings of the standard library and the help topics of `pydoc`. They are
read from source with `ast`, each document once and in the same order on every machine.
"""

import ast
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HELD_OUT_EVERY", "Corpus", "collect_corpus"]

HELD_OUT_EVERY = 50
_MIN_DOCUMENT_CHARS = 40
# Tests, bundled third-party code and applications, which are not the library itself.
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "_vendor", "dist-packages", "site-packages"}
    | {"ensurepip", "idlelib", "lib2to3", "test", "tests", "turtledemo"}
)


@dataclass(frozen=True)
class Corpus:
    """The documents in a fixed order, split for training and evaluation."""

    training: list[str]
    held_out: list[str]

    @property
    def digest(self) -> str:
        """The SHA-256 of all documents, in hexadecimal."""
        text = "\0".join(self.training + self.held_out)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def library_sources() -> Iterator[Path]:
    """Yields the standard library's Python files, in the same order on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
            yield path


def docstrings(path: Path) -> Iterator[str]:
    """Yields the docstrings of a file's module, classes and functions."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, documented):
            yield ast.get_docstring(node) or ""


def help_topics() -> Iterator[str]:
    """Yields the texts that `help("topic")` shows."""
    path = Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py"
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign):
            yield from ast.literal_eval(node.value).values()


def collect_corpus() -> Corpus:
    """Collects every document once; documents too short to learn from are left out."""
    texts = [text for path in library_sources() for text in docstrings(path)]
    texts.extend(help_topics())
    stripped = (text.strip() for text in texts)
    documents = list(dict.fromkeys(text for text in stripped if len(text) >= _MIN_DOCUMENT_CHARS))
    training = [text for i, text in enumerate(documents) if i % HELD_OUT_EVERY]
    return Corpus(training, held_out=documents[::HELD_OUT_EVERY])
