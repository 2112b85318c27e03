"""Every kind of KV connector as a URL, with faults or without."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

__all__ = ["fresh_shm_name", "kv_urls", "with_faults"]


@contextmanager
def fresh_shm_name() -> Iterator[str]:
    """Yields an unused name for a shared-memory store; frees the store's memory at the end."""
    name = f"test-{uuid4().hex}"
    try:
        yield name
    finally:
        shutil.rmtree(f"/dev/shm/baton-{name}", ignore_errors=True)


def kv_urls(folder: Path, shm_name: str, redis_url: str, timeout_s: float) -> dict[str, str]:
    """Returns connector URLs by backend, with bounded stores and short leases of peers.

    Args:
        folder: folder of the file store.
        shm_name: name of the shared-memory store; see `fresh_shm_name`.
        redis_url: URL of a Redis server.
        timeout_s: longest wait for a backend; larger for tests on a busy machine.
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
    """Returns the URL with faults, such as `faults=corrupt:0.1`; of `multi://`, in each member."""
    if url.startswith("multi://"):
        members = url.removeprefix("multi://").split(",")
        return "multi://" + ",".join(with_faults(member, options) for member in members)
    return f"faulty+{url}&{options}"
