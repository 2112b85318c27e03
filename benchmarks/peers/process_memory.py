"""Peak memory of a process and its descendants, as Linux tells it."""

from pathlib import Path

__all__ = ["peak_memory_bytes"]


def peak_memory_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """The sum of the most memory that each living process of the tree ever had resident.

    Pages that processes share, and files that are mapped, count in each.

    Args:
        pid: the tree's root.
        proc: where procfs is mounted.
    """
    own = _high_water_bytes((proc / str(pid) / "status").read_text())
    return own + sum(peak_memory_bytes(child, proc) for child in _children(pid, proc))


def _children(pid: int, proc: Path) -> list[int]:
    files = (proc / str(pid) / "task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


def _high_water_bytes(status: str) -> int:
    """The `VmHWM` of a process; 0 of one that has ended and waits for its parent."""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    return 0
