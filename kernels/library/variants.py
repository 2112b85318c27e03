"""The instruction sets that the kernels are compiled for, and the files of the compiled ones."""

import hashlib
import json
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = [
    "BUILD_COMMAND",
    "LIBRARY_FOLDER",
    "SOURCE_FOLDER",
    "VARIANTS",
    "BuildRecord",
    "LibrarySet",
    "Variant",
    "fingerprint_sources",
    "library_path",
    "library_sets",
    "read_record",
    "record_path",
    "variants_for",
    "write_record",
]

SOURCE_FOLDER = Path(__file__).parents[1] / "native" / "src"
LIBRARY_FOLDER = Path(__file__).parents[1] / "native" / "lib"
BUILD_COMMAND = "python -P -m baton.common.module_process 0 kernels.library.build"
"""`python -m kernels.library.build` could run another distribution's package `kernels`."""

_X86_64_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_X86_64_V4 = _X86_64_V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

_X86_64 = "x86_64"
_AARCH64 = "aarch64"
_OTHER_SPELLINGS = {"amd64": _X86_64, "arm64": _AARCH64}


@dataclass(frozen=True, slots=True)
class Variant:
    """One library: the kernels compiled for one instruction set.

    Attributes:
        name: as in the library's file name and in `BATON_CPU_KERNELS`.
        compiler_flags: make the compiler use the instruction set.
        cpu_features: required of the CPU, by their names in Linux' /proc/cpuinfo.
    """

    name: str
    compiler_flags: tuple[str, ...] = ()
    cpu_features: frozenset[str] = frozenset()


_GENERIC = Variant("generic")
_BY_MACHINE = {
    # The flags are the psABI's levels, each with everything that CPUs of its time have.
    _X86_64: (
        Variant(
            "avx512_bf16",
            ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
            _X86_64_V4 | {"avx512_bf16", "avx512_vnni"},
        ),
        Variant("avx512_vnni", ("-march=x86-64-v4", "-mavx512vnni"), _X86_64_V4 | {"avx512_vnni"}),
        Variant("avx512", ("-march=x86-64-v4",), _X86_64_V4),
        Variant("avx2_vnni", ("-march=x86-64-v3", "-mavxvnni"), _X86_64_V3 | {"avx_vnni"}),
        Variant("avx2", ("-march=x86-64-v3",), _X86_64_V3),
        _GENERIC,
    ),
    # Every AArch64 CPU has NEON, and every compiler for it uses it.
    _AARCH64: (Variant("neon"),),
}

VARIANTS = (*_BY_MACHINE[_X86_64], *_BY_MACHINE[_AARCH64])
"""The variants of all architectures."""


def variants_for(machine: str | None = None) -> tuple[Variant, ...]:
    """Returns the variants of an architecture, the fastest first.

    Args:
        machine: a value of `platform.machine()`; None for this machine.
    """
    name = (machine or platform.machine()).lower()
    return _BY_MACHINE.get(_OTHER_SPELLINGS.get(name, name), (_GENERIC,))


@dataclass(frozen=True, slots=True)
class LibrarySet:
    """Libraries that are built from the same sources.

    Attributes:
        name: what they are, for people.
        without: what happens without any of them, for people.
        source_folder: holds the `.cpp` and `.h` files.
        library_folder: receives a library and a `BuildRecord` per variant.
        variants: those of this machine's architecture.
    """

    name: str
    without: str
    source_folder: Path
    library_folder: Path
    variants: tuple[Variant, ...]


def library_sets(root: Path = SOURCE_FOLDER.parents[2]) -> tuple[LibrarySet, ...]:
    """Returns the sets of libraries whose sources lie under a folder, the CPU kernels first.

    Args:
        root: holds the packages.
    """
    kernels, keys = root / "kernels" / "native", root / "kvstore" / "native"
    slow = "inference on the CPU will run on torch, which is slower"
    sets = (
        LibrarySet("CPU kernels", slow, kernels / "src", kernels / "lib", variants_for()),
        # `kvstore.native_keys` loads it, in processes without kernels too.
        LibrarySet(
            "block keys",
            "Python computes them, while its other threads wait",
            keys / "src",
            keys / "lib",
            (Variant("block_keys"),),
        ),
    )
    return tuple(libraries for libraries in sets if libraries.source_folder.is_dir())


def library_path(variant: str, folder: Path = LIBRARY_FOLDER) -> Path:
    """Returns the path of a variant's library, which exists once it is built."""
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return folder / f"libbaton_cpu_{variant}.{suffix}"


@dataclass(frozen=True, slots=True)
class BuildRecord:
    """The record of a variant's last build, a file beside its library.

    Attributes:
        sources: `fingerprint_sources` of the compiled sources.
        command: the compiler, its version and its flags.
        problem: why there is no library, in one line; empty if there is.
    """

    sources: str
    command: str
    problem: str = ""


def fingerprint_sources(folder: Path = SOURCE_FOLDER) -> str:
    """Returns a hash of the names and texts of all C++ files."""
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.cpp"), *folder.glob("*.h")]):
        text = path.read_bytes()
        digest.update(f"{path.name} {len(text)}\n".encode())
        digest.update(text)
    return digest.hexdigest()


def record_path(variant: str, folder: Path = LIBRARY_FOLDER) -> Path:
    """Returns the path of a variant's `BuildRecord`."""
    return folder / f"{variant}.json"


def read_record(variant: str, folder: Path = LIBRARY_FOLDER) -> BuildRecord | None:
    """Returns the record of a variant's last build; None if there is none or it is unreadable."""
    try:
        return BuildRecord(**json.loads(record_path(variant, folder).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write_record(variant: str, record: BuildRecord, folder: Path = LIBRARY_FOLDER) -> None:
    """Replaces a variant's `BuildRecord`."""
    path = record_path(variant, folder)
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(asdict(record), indent=2) + "\n")
    draft.replace(path)
