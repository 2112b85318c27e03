"""Pages of the documentation site that are not in docs/, for `mkdocs build`; see mkdocs.yml.

- Files of the repository to which pages link become pages under `repository/`, and so do those to
  which these link. Links lead there.
- Decisions get a page that lists them.

GitHub and the site read Markdown a little differently: nested lists are indented as the site needs
it, and lists, tables or code that would be shown as text are a warning, which `--strict` makes an
error.
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

__all__ = ["on_files", "on_page_content", "on_page_markdown"]

_LOGGER = logging.getLogger("mkdocs.hooks.site_pages")
_ROOT = Path(__file__).resolve().parents[1]
_DOCS, _DECISIONS, _OTHERS = PurePosixPath("docs"), PurePosixPath("docs/adr"), "repository"
_LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=(?:#[^)\s]*)?\))")
_FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
_LANGUAGES = {".py": "python", ".proto": "protobuf", ".go": "go", ".mjs": "js", ".conf": "nginx"}
_SERVED_AS_THEY_ARE = (".json", ".png")
_LIST_INDENT = 4  # of what belongs to an item
_MARKER = re.compile(r"(?:[-*]|\d+\.) +")
_SHOWN_AS_TEXT = re.compile(r"^(?:[-*] |1\. |\|.*\|$|```).*", re.MULTILINE)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages that are not in docs/."""
    pages = [_DOCS / file.src_uri for file in files.documentation_pages()]
    for path in sorted(_linked_paths(pages)):
        place, uri = _ROOT / path, _site_path(path)
        if place.suffix in {".md", *_SERVED_AS_THEY_ARE}:
            files.append(File.generated(config, uri, abs_src_path=str(place)))
        else:
            files.append(File.generated(config, uri, content=_shown(path)))
    files.append(File.generated(config, "adr/index.md", content=_list_decisions()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links at files outside of docs/ to their pages, and indents lists."""
    uri = PurePosixPath(page.file.src_uri)
    is_other = uri.parts[0] == _OTHERS
    source = PurePosixPath(*uri.parts[1:]) if is_other else _DOCS / uri
    if not (_ROOT / source).is_file():  # made by this module, with links of the site
        return markdown

    def replace(match: re.Match[str]) -> str:
        target = _target(source, match[1])
        return match[1] if target is None else os.path.relpath(_site_path(target), uri.parent)

    return _indent_lists(_LINK.sub(replace, markdown))


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Warns of lists, tables and code that are shown as text."""
    for paragraph in re.findall(r"<p>.*?</p>", html, re.DOTALL):
        text = re.sub(r"<code>.*?</code>|<[^>]*>", "", paragraph, flags=re.DOTALL)
        for match in _SHOWN_AS_TEXT.finditer(text):
            _LOGGER.warning("%s: shown as text: %s", page.file.src_uri, match[0][:80])
    return html


def _indent_lists(markdown: str) -> str:
    """Indents what belongs to an item of a list by four spaces for each list around it."""
    lines: list[str] = []
    offsets: list[int] = []  # of the contents of the items that are open
    is_code = False
    for line in markdown.splitlines():
        text = line.lstrip(" ")
        indent = len(line) - len(text)
        while text and not is_code and offsets and indent < offsets[-1]:
            offsets.pop()
        inner = max(indent - offsets[-1], 0) if offsets else indent
        lines.append(" " * (_LIST_INDENT * len(offsets) + inner) + text if text else "")
        marker = None if is_code else _MARKER.match(text)
        if marker is not None:
            offsets.append(indent + marker.end())
        is_code ^= text.startswith("```")
    return "\n".join(lines)


def _linked_paths(pages: Iterable[PurePosixPath]) -> set[PurePosixPath]:
    """Returns the files and folders outside of docs/ to which pages lead, directly or by others.

    Args:
        pages: paths in the repository.
    """
    linked: set[PurePosixPath] = set()
    waiting = list(pages)
    while waiting:
        source = waiting.pop()
        text = _FENCED.sub("", (_ROOT / source).read_text())
        targets = {_target(source, match[1]) for match in _LINK.finditer(text)}
        new = {target for target in targets if target and _DOCS not in target.parents} - linked
        linked |= new
        waiting += [target for target in new if target.suffix == ".md"]
    return linked


def _target(source: PurePosixPath, link: str) -> PurePosixPath | None:
    """Returns the path in the repository to which a link leads; None if there is none, or if the
    site finds it by the same link.
    """
    target = PurePosixPath(os.path.normpath(source.parent / link))
    is_in_docs = _DOCS in source.parents and _DOCS in target.parents and target != _DECISIONS
    return None if is_in_docs or not (_ROOT / target).exists() else target


def _site_path(path: PurePosixPath) -> str:
    """Returns the source of a page by its path in the repository."""
    if path == _DECISIONS:
        return "adr/index.md"
    if _DOCS in path.parents:
        return str(path.relative_to(_DOCS))
    if (_ROOT / path).is_dir():
        return f"{_OTHERS}/{path}/index.md"
    is_page = path.suffix not in {".md", *_SERVED_AS_THEY_ARE}
    return f"{_OTHERS}/{path}.md" if is_page else f"{_OTHERS}/{path}"


def _shown(path: PurePosixPath) -> str:
    """Returns a page of a file, or of the files of a folder, which the search leaves out."""
    place = _ROOT / path
    is_folder = place.is_dir()
    parts = ["---\nsearch: {exclude: true}\n---", f"# {path}"]
    for file in sorted(filter(Path.is_file, place.iterdir())) if is_folder else [place]:
        parts += [f"## {file.name}"] if is_folder else []
        parts.append(f"````{_LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}\n````")
    return "\n\n".join(parts)


def _list_decisions() -> str:
    """Returns the page that lists all decisions."""
    return "\n".join(["# Decisions", "", *_decision_items()])


def _decision_items() -> Iterator[str]:
    for file in sorted((_ROOT / _DECISIONS).glob("[0-9]*.md")):
        with file.open() as lines:
            title = next(lines).removeprefix("# ").strip()
        yield f"- [{title}]({file.name})"
