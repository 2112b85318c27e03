"""Every kind of KV connector as a URL, with faults or without."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

__all__ = ["fresh_shm_name", "kv_urls", "with_faults"]


@contextmanager
def fresh_shm_name() -> Iterator[str]:
    """A name of a shared-memory store that nobody has; its memory is freed at the end."""
    name = f"test-{uuid4().hex}"
    try:
        yield name
    finally:
        shutil.rmtree(f"/dev/shm/baton-{name}", ignore_errors=True)


def kv_urls(folder: Path, shm_name: str, redis_url: str, timeout_s: float) -> dict[str, str]:
    """URLs by backend; all bounded in size, and leases of peers in time.

    Args:
        folder: of the file store.
        shm_name: see `fresh_shm_name`.
        redis_url: of a server.
        timeout_s: longest wait for a backend; long where the machine has much else to do.
    """
    wait = f"timeout_s={timeout_s:g}"
    peer = f"{wait}&lease_s=10"
    return {
        "memory": f"memory://{shm_name}?{wait}",
        "shm": f"shm://{shm_name}?max_bytes=64MiB&{wait}",
        "file": f"file://{folder}/kv?max_bytes=64MiB&{wait}",
        "redis": f"{redis_url}?{wait}",
        "grpc": f"grpc://?{peer}",
        "nixl": f"nixl://?{peer}",
        "multi": f"multi://grpc://?{peer},file://{folder}/multi?max_bytes=64MiB&{wait}",
    }


def with_faults(url: str, options: str) -> str:
    """The connector with faults, options as `faults=corrupt:0.1`; of several, each member."""
    if url.startswith("multi://"):
        members = url.removeprefix("multi://").split(",")
        return "multi://" + ",".join(with_faults(member, options) for member in members)
    return f"faulty+{url}&{options}"
