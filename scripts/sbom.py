"""What a release consists of, as a CycloneDX document (SBOM): Baton, the source text of others in
it, and the packages that it needs, with the versions of the environment in which it is built, which
are those that its tests run with.
"""

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from urllib.parse import quote
from zipfile import Path as ZipPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["make_sbom"]

_SPEC_VERSION = "1.6"
_SCHEMA = f"http://cyclonedx.org/schema/bom-{_SPEC_VERSION}.schema.json"
_XXHASH = Path("kernels/native/src/xxhash.h")
_MAX_LICENSE_CHARS = 100

_Component = dict[str, object]


def make_sbom(
    wheel: Path, root: Path, *, time_s: int, hashes: Mapping[str, str]
) -> dict[str, object]:
    """Returns the document of a wheel. The same wheel and environment have the same document.

    Args:
        wheel: its metadata names Baton's version and what it needs.
        root: the source tree, which has xxHash.
        time_s: seconds since 1970.
        hashes: SHA-256 of files of the release, by their names.
    """
    own = _metadata_of(wheel)
    needed = _needed(own)
    installed = {name: metadata.distribution(name) for name in sorted(needed) if name != _key(own)}
    product = _component(own, "application") | {
        "hashes": [{"alg": "SHA-256", "content": content} for content in hashes.values()]
    }
    vendored = _xxhash(root)
    references = {_key(own): product["bom-ref"]}
    references |= {name: _purl(each) for name, each in installed.items()}
    return {
        "$schema": _SCHEMA,
        "bomFormat": "CycloneDX",
        "specVersion": _SPEC_VERSION,
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(time_s, UTC).isoformat(),
            "component": product,
        },
        "components": [vendored, *(_component(each, "library") for each in installed.values())],
        "dependencies": [
            {
                "ref": references[name],
                "dependsOn": [
                    *([vendored["bom-ref"]] if name == _key(own) else []),
                    *(references[other] for other in sorted(others)),
                ],
            }
            for name, others in sorted(needed.items())
        ],
    }


def _metadata_of(wheel: Path) -> metadata.Distribution:
    archive = ZipPath(wheel)
    (folder,) = (path for path in archive.iterdir() if path.name.endswith(".dist-info"))
    return metadata.PathDistribution(folder)


def _needed(own: metadata.Distribution) -> dict[str, set[str]]:
    """The packages that are needed, each with those that it needs itself, all by their names."""
    needed: dict[str, set[str]] = {}
    unread: list[tuple[metadata.Distribution, frozenset[str]]] = [(own, frozenset())]
    seen = set[tuple[str, frozenset[str]]]()
    while unread:
        distribution, extras = unread.pop()
        if (_key(distribution), extras) in seen:
            continue
        seen.add((_key(distribution), extras))
        others = needed.setdefault(_key(distribution), set())
        for requirement in _requirements(distribution, extras):
            other = metadata.distribution(requirement.name)
            others.add(_key(other))
            unread.append((other, frozenset(requirement.extras)))
    return needed


def _requirements(
    distribution: metadata.Distribution, extras: Iterable[str]
) -> Iterable[Requirement]:
    """The requirements of a package on this system, with these extras."""
    environments = [{"extra": extra} for extra in ("", *sorted(extras))]
    for line in distribution.requires or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate(each) for each in environments):
            yield requirement


def _component(distribution: metadata.Distribution, kind: str) -> _Component:
    component: _Component = {
        "type": kind,
        "bom-ref": _purl(distribution),
        "name": _key(distribution),
        "version": distribution.version,
        "purl": _purl(distribution),
    }
    licenses = _licenses(distribution.metadata)
    return component | ({"licenses": licenses} if licenses else {})


def _licenses(fields: metadata.PackageMetadata) -> list[dict[str, object]]:
    """The license as a package states it, in one of three ways."""
    if expression := fields.get("License-Expression"):
        return [{"expression": expression}]
    text = (fields.get("License") or "").strip()
    if text and len(text) <= _MAX_LICENSE_CHARS and "\n" not in text:
        return [{"license": {"name": text}}]
    lines = fields.get_all("Classifier") or []
    names = [line.rpartition(" :: ")[2] for line in lines if line.startswith("License :: ")]
    return [{"license": {"name": name}} for name in names]


def _xxhash(root: Path) -> _Component:
    """The header of xxHash, whose text is among the sources of the CPU kernels."""
    text = (root / _XXHASH).read_text()
    parts = ("MAJOR", "MINOR", "RELEASE")
    numbers = [re.findall(rf"#define XXH_VERSION_{part} +(\d+)", text)[0] for part in parts]
    version = ".".join(numbers)
    purl = f"pkg:github/Cyan4973/xxHash@v{version}"
    return {
        "type": "library",
        "bom-ref": purl,
        "name": "xxhash.h",
        "version": version,
        "purl": purl,
        "licenses": [{"expression": "BSD-2-Clause"}],
    }


def _purl(distribution: metadata.Distribution) -> str:
    return f"pkg:pypi/{_key(distribution)}@{quote(distribution.version, safe='')}"


def _key(distribution: metadata.Distribution) -> str:
    return canonicalize_name(distribution.metadata["Name"])
