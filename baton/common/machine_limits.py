"""The cores, the memory and the tasks that this process may use, by affinity and control groups.

This is a leaf module: every package may import it, and it imports only the standard library.
Containers set limits through control groups, version 1 or 2 (cgroups(7)). A group's limit also
holds for the groups below it, so the smallest limit between our group and the root counts.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Memory",
    "Tasks",
    "affine_cores",
    "count_memory_kills",
    "cpu_quota",
    "is_in_memory",
    "kept_memory_share",
    "private_bytes",
    "read_memory",
    "read_tasks",
    "usable_cores",
]

_KIB = 1024
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in bytes; None where the system does not report it.

    Attributes:
        total: the machine's memory.
        available: bytes that can still be allocated without swapping and within the limit.
        limit: the smallest limit of the control groups; None if there is none.
    """

    total: int | None
    available: int | None
    limit: int | None


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks of the control group: a process is one task for each of its threads.

    Attributes:
        limit: the smallest limit of the control groups; None if there is none.
        used: the tasks in the group with this limit.
    """

    limit: int | None
    used: int = 0


def usable_cores() -> int:
    """Returns the number of cores this process can keep busy: its affinity, at most its quota."""
    return max(1, math.floor(min(affine_cores(), cpu_quota() or math.inf)))


def affine_cores() -> int:
    """Returns the number of cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Returns the control groups' CPU time in cores; None if there is no limit.

    Args:
        root: the folder that holds `proc` and `sys`.
    """
    quotas = [_quota_v2(folder) for folder in _folders(root, "")]
    quotas += [_quota_v1(folder) for folder in _folders(root, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def read_memory(root: Path = Path("/")) -> Memory:
    """Reads the machine's memory and the control groups' limit.

    Args:
        root: the folder that holds `proc` and `sys`.
    """
    machine = _keyed_numbers(root / "proc/meminfo")
    total, available = (
        None if value is None else value * _KIB
        for value in (machine.get("MemTotal"), machine.get("MemAvailable"))
    )
    groups = [_limit_and_room(*paths) for paths in _memory_files(root)]
    # Version 1 reports "no limit" as a number larger than the machine's memory.
    bounding = [
        group for group in groups if group is not None and (total is None or group[0] < total)
    ]
    rooms = [room for _, room in bounding]
    if available is not None:
        rooms.append(available)
    return Memory(
        total, min(rooms, default=None), min((size for size, _ in bounding), default=None)
    )


def read_tasks(root: Path = Path("/")) -> Tasks:
    """Reads the control groups' limit of tasks, which containers call `pids`.

    Args:
        root: the folder that holds `proc` and `sys`.
    """
    folders = [*_folders(root, ""), *_folders(root, "pids")]
    limits = [(_number(folder / "pids.max"), folder) for folder in folders]
    limited = [(limit, folder) for limit, folder in limits if limit is not None]
    if not limited:
        return Tasks(None)
    limit, folder = min(limited)
    return Tasks(limit, _number(folder / "pids.current") or 0)


def count_memory_kills(root: Path = Path("/")) -> int | None:
    """Returns how many processes of our control group the kernel has killed for lack of memory;
    None if it does not say.

    Args:
        root: the folder that holds `proc` and `sys`.
    """
    files = [folder / "memory.events" for folder in _folders(root, "")]
    files += [folder / "memory.oom_control" for folder in _folders(root, "memory")]
    counts = (_keyed_numbers(file).get("oom_kill") for file in files)
    return next((count for count in counts if count is not None), None)


def kept_memory_share(root: Path = Path("/")) -> float | None:
    """Returns the part of the control groups' memory limit that is in use and that the kernel
    cannot take back, which leaves out cached files and their entries; None without a limit.

    Args:
        root: the folder that holds `proc` and `sys`.
    """
    total = _keyed_numbers(root / "proc/meminfo").get("MemTotal", math.inf) * _KIB
    shares = [
        (usage - _cached(stat_file, "active_file", "inactive_file", "slab_reclaimable")) / limit
        for limit_file, usage_file, stat_file in _memory_files(root)
        if (limit := _number(limit_file)) and limit < total
        if (usage := _number(usage_file)) is not None
    ]
    return max(shares, default=None)


def private_bytes(root: Path = Path("/")) -> int | None:
    """Returns the bytes of memory that this process has for itself alone: no files, and nothing
    that it shares. None if the system does not report it.

    Args:
        root: the folder that holds `proc`.
    """
    resident = _keyed_numbers(root / "proc/self/status").get("RssAnon")
    return None if resident is None else resident * _KIB


def is_in_memory(path: Path, root: Path = Path("/")) -> bool:
    """Returns whether the files of a folder lie in memory, which counts for the limit.

    Args:
        path: absolute; need not exist.
        root: the folder that holds `proc`.
    """
    rows = [line.split() for line in _text(root / "proc/self/mounts").splitlines()]
    mounts = {Path(row[1]): row[2] for row in rows if len(row) > 2}
    kinds = (mounts[folder] for folder in (path, *path.parents) if folder in mounts)
    return next(kinds, "") in _MEMORY_FILE_SYSTEMS


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yields the folder of our group and those of the groups above it, if they are visible.

    Args:
        root: the folder that holds `proc` and `sys`.
        controller: a controller of version 1; empty for version 2, which has one tree for all.
    """
    mount = root / "sys/fs/cgroup" / controller
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            ours = mount / path.lstrip("/")
            # In a container the path may be the host's. Then only the mount point exists.
            yield from (folder for folder in (ours, *ours.parents) if folder.is_relative_to(mount))


def _quota_v2(folder: Path) -> float | None:
    words = _text(folder / "cpu.max").split()
    if len(words) != 2 or words[0] == "max":
        return None
    return int(words[0]) / int(words[1])


def _quota_v1(folder: Path) -> float | None:
    quota, period = (_number(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    if quota is None or period is None or quota < 0:
        return None
    return quota / period


def _memory_files(root: Path) -> Iterator[tuple[Path, Path, Path]]:
    """Yields each group's files of its memory limit, usage and statistics."""
    for folder in _folders(root, ""):
        yield folder / "memory.max", folder / "memory.current", folder / "memory.stat"
    for folder in _folders(root, "memory"):
        yield (
            folder / "memory.limit_in_bytes",
            folder / "memory.usage_in_bytes",
            folder / "memory.stat",
        )


def _limit_and_room(limit_file: Path, usage_file: Path, stat_file: Path) -> tuple[int, int] | None:
    """Returns a group's limit and its free bytes; cached files count as free."""
    limit, usage = _number(limit_file), _number(usage_file)
    if limit is None or usage is None:
        return None
    return limit, max(0, limit - usage + _cached(stat_file, "inactive_file"))


def _cached(stat_file: Path, *kinds: str) -> int:
    """Returns the bytes of cached files, which version 1 also counts with those of groups below."""
    statistics = _keyed_numbers(stat_file)
    return sum(statistics.get(f"total_{kind}", statistics.get(kind, 0)) for kind in kinds)


def _keyed_numbers(path: Path) -> dict[str, int]:
    """Parses lines that hold a name, perhaps followed by a colon, and a number."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _number(path: Path) -> int | None:
    """Returns the number in a file; None without a file or with a word such as "max"."""
    try:
        return int(_text(path))
    except ValueError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="surrogateescape")  # as in names of mounted folders
    except OSError:
        return ""
