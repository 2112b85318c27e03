"""Builds a release into a folder: the source distribution, the wheel that comes of it, a list of
what both consist of (SBOM, CycloneDX) and checksums. `make dist` runs it.

The same files, compiler and packages give the same bytes, in any folder: all times are the time of
the commit (or SOURCE_DATE_EPOCH), and files have a fixed order and mode. Objects that have been
compiled before are used again; kernels/library/build.py names them by all that decides them.

    .venv/bin/python -m scripts.build_release [--out FOLDER]
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from baton.common.own_packages import PACKAGES
from kernels.library.variants import library_sets
from scripts.sbom import make_sbom

__all__ = ["ReleaseError", "build_release", "check_protos", "check_wheel", "main", "share_objects"]

ROOT = Path(__file__).parents[1]
_DEFAULT_FOLDER = ROOT / "dist"
_OBJECTS = "objects"
_PACKAGES = "baton/_packages"
_RESULTS = "benchmarks/results/"
_TIMEOUT_S = 1800


class ReleaseError(Exception):
    """A tree, or what was built from it, must not be released; the message is the reason."""


def build_release(root: Path, out: Path, *, time_s: int) -> list[Path]:
    """Builds a release of the files that git knows in a source tree.

    Args:
        root: the source tree. Objects that were compiled in it are used, and added to.
        out: receives the files once all are built, and is made if need be.
        time_s: seconds since 1970, the time of all files.

    Returns:
        The sdist, the wheel, the SBOM and the checksums.

    Raises:
        ReleaseError: the build failed, or the wheel lacks something.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=out) as draft:
        new = Path(draft)
        sources = Path(folder, "sources")
        _copy_tracked_files(root, sources)
        sdist = _build(sources, "sdist", new, time_s)
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        unpacked = Path(folder, sdist.name.removesuffix(".tar.gz"))
        share_objects(root, unpacked)
        wheel = _build(unpacked, "wheel", new, time_s)
        check_wheel(wheel, root)
        bill = new / f"{wheel.name.split('-py3-')[0]}.cdx.json"
        content = make_sbom(wheel, root, time_s=time_s, hashes={wheel.name: _sha256(wheel)})
        bill.write_text(json.dumps(content, indent=1) + "\n")
        sums = new / "SHA256SUMS"
        files = [sdist, wheel, bill]
        sums.write_text("".join(f"{_sha256(path)}  {path.name}\n" for path in files))
        return [path.replace(out / path.name) for path in (*files, sums)]


def check_wheel(wheel: Path, root: Path) -> None:
    """Refuses a wheel that lacks a compiled library or a file that git knows.

    Args:
        wheel: the file.
        root: the source tree that it was built from.

    Raises:
        ReleaseError: names what is missing.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = {name.removeprefix(f"{_PACKAGES}/") for name in archive.namelist()}
        problems = [*_problems(archive)]
    libraries = {
        f"{part.library_folder.relative_to(root).as_posix()}/libbaton_cpu_{variant.name}.so"
        for part in library_sets(root)
        for variant in part.variants
    }
    if missing := problems or sorted(libraries - names):
        raise ReleaseError(f"the wheel lacks compiled libraries: {', '.join(missing)}")
    if missing := sorted({*_files_of_packages(root)} - names):
        raise ReleaseError(f"the wheel lacks files: {', '.join(missing)}")
    if "-py3-none-manylinux_2_" not in wheel.name:
        raise ReleaseError(
            f"{wheel.name} has no tag of manylinux: see kernels/library/platform_tag.py"
        )


def _problems(archive: zipfile.ZipFile) -> Iterator[str]:
    """Why libraries were not built, as their records say."""
    for name in archive.namelist():
        if "/native/lib/" in name and name.endswith(".json"):
            problem = json.loads(archive.read(name))["problem"]
            if problem:
                yield f"{Path(name).stem} ({problem})"


def check_protos(root: Path, buf: Path) -> str:
    """Compares the protos with those of the last tag, whose processes must understand today's.

    Args:
        root: the source tree, a checkout with tags.
        buf: the program.

    Returns:
        A line that says what was compared.

    Raises:
        ReleaseError: a message or service of the tag has changed, as `buf breaking` says; or the
            checkout lacks the commits by which the tag would be found.
    """
    tags = _run(["git", "describe", "--tags", "--abbrev=0", "HEAD^"], root, check=False)
    tag = tags.stdout.strip()
    if not tag and _run(["git", "rev-parse", "--is-shallow-repository"], root).stdout != "false\n":
        raise ReleaseError(
            "a shallow clone does not know the last tag: git fetch --unshallow --tags"
        )
    if not tag:
        return "protos: there is no earlier tag to compare with"
    modules = [{"path": "protos"}]
    rules = json.dumps({"version": "v2", "modules": modules, "breaking": {"use": ["WIRE"]}})
    command = [str(buf), "breaking", "--config", rules, "--against", f".git#tag={tag}"]
    compared = _run([*command, "--against-config", rules], root, check=False)
    if compared.returncode:
        raise ReleaseError(f"protos are not those of {tag}:\n{compared.stdout}{compared.stderr}")
    return f"protos: processes of {tag} understand them"


def _files_of_packages(root: Path) -> Iterable[str]:
    """The tracked files that belong in the wheel, by their paths in the source tree."""
    for name in _tracked(root):
        is_packaged = name.split("/")[0] in ("baton", *PACKAGES)
        if is_packaged and not name.startswith(_RESULTS):
            yield name


def _copy_tracked_files(root: Path, folder: Path) -> None:
    for name in _tracked(root):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)


def _tracked(root: Path) -> list[str]:
    return _run(["git", "ls-files", "-z"], root).stdout.rstrip("\0").split("\0")


def share_objects(root: Path, other: Path) -> None:
    """Lets the build in another folder use, and add to, the objects of a source tree.

    Args:
        root: the source tree.
        other: the folder, with the same sources.
    """
    for libraries in library_sets(root):
        objects = libraries.library_folder / _OBJECTS
        objects.mkdir(parents=True, exist_ok=True)
        folder = other / libraries.library_folder.relative_to(root)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _OBJECTS).symlink_to(objects.resolve())


def _build(sources: Path, target: str, out: Path, time_s: int) -> Path:
    """Builds one distribution, and returns its file."""
    with tempfile.TemporaryDirectory(dir=out) as folder:
        command = [sys.executable, "-m", "hatchling", "build", "--target", target]
        environment = {"SOURCE_DATE_EPOCH": str(time_s)}
        _run([*command, "--directory", folder], sources, environment=environment)
        (built,) = (path for path in Path(folder).iterdir() if path.name != ".gitignore")
        return built.replace(out / built.name)


def _run(
    command: Sequence[str],
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if check and result.returncode:
        raise ReleaseError(f"{' '.join(command)}:\n{result.stdout}{result.stderr}")
    return result


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _time_of_commit(root: Path) -> int:
    """The time of the commit, or SOURCE_DATE_EPOCH."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given is not None and not given.isdecimal():
        raise ReleaseError(f"SOURCE_DATE_EPOCH is {given!r}: it must be seconds since 1970")
    return int(given or _run(["git", "log", "-1", "--format=%ct"], root).stdout)


def _check_committed(root: Path) -> None:
    changed = _run(["git", "status", "--porcelain"], root).stdout
    if changed:
        raise ReleaseError(f"these files differ from the commit:\n{changed.rstrip()}")


def main() -> int:
    """Builds the release of this tree; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=_DEFAULT_FOLDER, help="default: dist/")
    args = parser.parse_args()
    try:
        _check_committed(ROOT)
        print(check_protos(ROOT, Path(sys.executable).with_name("buf")))
        built = build_release(ROOT, args.out.resolve(), time_s=_time_of_commit(ROOT))
    except (ReleaseError, PackageNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    for path in built:
        print(f"{path.stat().st_size / 1e6:7.2f} MB  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
