"""Stores on file systems that fill, turn read-only and vanish: a program for a mount namespace.

`run_cases` runs it in one; it prints what each case raised, as JSON.
"""

import json
import logging
import shutil
import subprocess
import sys
import traceback
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvstore.conformance.objects import filled, random_keys, read
from kvstore.registry import open_store
from kvstore.store import StoreUnavailableError
from kvstore.stores.shm import store as shm_store

__all__ = ["CASES", "run_cases"]

_MIB = 1 << 20


def mount(folder, options):
    """Mounts a file system in memory, or changes one."""
    kind = () if options.startswith("remount") else ("-t", "tmpfs")
    subprocess.run(["mount", *kind, "-o", options, "tmpfs", folder], check=True)


def put(store, *keys, num_bytes=1000):
    """Puts objects of one size."""
    store.put(keys, [filled(1, num_bytes)] * len(keys))


@contextmanager
def opened(url, **arguments):
    with closing(open_store(url, **arguments)) as store:
        yield store


def refusal_of_put(store, num_bytes=1000):
    """Returns why a store takes no object."""
    try:
        put(store, *random_keys(1), num_bytes=num_bytes)
    except StoreUnavailableError as error:
        return str(error)
    raise AssertionError("the put succeeded")


def read_only_at_the_start(folder):
    """The KV that is there is read; puts work again when the disk does."""
    mount(folder, "size=8m")
    key, other = random_keys(2)
    with opened(f"file://{folder}/kv") as store:
        put(store, key)
    mount(folder, "remount,ro")
    with opened(f"file://{folder}/kv") as store:
        assert read(store, key, 1000) == filled(1, 1000).to_bytes()
        assert store.contains_prefix([key]) == 1
        refusal = refusal_of_put(store)
        assert "Read-only file system" in refusal, refusal
        assert "mount it for writing" in refusal, refusal
        put(store, key)  # what is there need not be written
        mount(folder, "remount,rw")
        put(store, other)
        assert store.contains_prefix([key, other]) == 2


def read_only_and_empty_at_the_start(folder):
    mount(folder, "size=8m,ro")
    (key,) = random_keys(1)
    with opened(f"file://{folder}/kv") as store:
        for _ in range(2):
            assert "Read-only file system" in refusal_of_put(store)
        mount(folder, "remount,rw")
        put(store, key)
        assert store.contains_prefix([key]) == 1


def turned_read_only(folder):
    """Reads go on, and change no time of a touch."""
    mount(folder, "size=8m")
    (key,) = random_keys(1)
    with opened(f"file://{folder}/kv?ttl_s=600") as store:
        put(store, key)
        path = folder / "kv" / "objects" / key.hex()[:2] / key.hex()
        touched_ns = path.stat().st_mtime_ns
        mount(folder, "remount,ro")
        assert read(store, key, 1000) == filled(1, 1000).to_bytes()
        assert store.contains_prefix([key]) == 1
        assert path.stat().st_mtime_ns == touched_ns
        assert "Read-only file system" in refusal_of_put(store)
        mount(folder, "remount,rw")
        put(store, *random_keys(1))


def filled_by_others(folder):
    """Neither an opener nor a diagnosis evicts; the bound follows the disk."""
    mount(folder, "size=64m")
    url = f"file://{folder}/kv?lease_s=0"
    keys = random_keys(20)
    with opened(url) as first:
        put(first, *keys, num_bytes=_MIB)
        (folder / "other").write_bytes(bytes(42 * _MIB))
        with opened(url, is_diagnosis=True) as diagnosis:
            probe = random_keys(1)
            put(diagnosis, *probe)
            diagnosis.delete(probe)
        with opened(url) as second:
            assert second.contains_prefix(keys) == 20
            new = random_keys(3)
            put(second, *new, num_bytes=_MIB)
            alive = [second.contains_prefix([key]) for key in (*keys, *new)]
            assert alive == [0] * 3 + [1] * 20, alive
            (folder / "other").unlink()
            more = random_keys(8)
            put(second, *more, num_bytes=_MIB)
            alive = [second.contains_prefix([key]) for key in (*keys[3:], *new, *more)]
            assert alive == [1] * 28, alive


def full_of_leased_objects_on_a_full_disk(folder):
    mount(folder, "size=16m")
    with opened(f"file://{folder}/kv?lease_s=600") as store:
        put(store, *random_keys(6), num_bytes=_MIB)
        with (folder / "other").open("wb", buffering=0) as other:
            try:
                while other.write(bytes(4096)):
                    pass
            except OSError:
                pass
        refusal = refusal_of_put(store, _MIB)
        assert "disk full" in refusal, refusal
        (folder / "other").unlink()
        put(store, *random_keys(1), num_bytes=_MIB)


def full_in_spite_of_max_bytes(folder):
    mount(folder, "size=4m")
    with opened(f"file://{folder}/kv?max_bytes=1GiB") as store:
        put(store, *random_keys(2), num_bytes=_MIB)
        refusal = refusal_of_put(store, 3 * _MIB)
        assert "disk full" in refusal, refusal
        assert "No space left on device" in refusal, refusal
        put(store, *random_keys(1), num_bytes=_MIB)


def without_inodes(folder):
    mount(folder, "size=8m,nr_inodes=280")
    with opened(f"file://{folder}/kv") as store:
        refusals = []
        while not refusals:
            try:
                put(store, *random_keys(5))
            except StoreUnavailableError as error:
                refusals.append(str(error))
        assert "disk full" in refusals[0], refusals
        assert "no inodes are left" in refusals[0], refusals


def mounted_anew(folder):
    """A disk that was taken away and comes back is used again."""
    mount(folder, "size=8m")
    key, other = random_keys(2)
    with opened(f"file://{folder}/kv") as store:
        put(store, key)
        subprocess.run(["umount", folder], check=True)
        mount(folder, "size=8m")
        assert store.contains_prefix([key]) == 0
        put(store, other)
        assert read(store, other, 1000) == filled(1, 1000).to_bytes()
        with opened(f"file://{folder}/kv") as new:
            assert new.contains_prefix([other]) == 1


def shared_memory_without_room(folder):
    mount(folder, "size=8m")
    shm_store._SHARED_MEMORY = folder
    (key,) = random_keys(1)
    with opened("shm://small") as store:
        refusal = refusal_of_put(store)
        assert "--shm-size" in refusal, refusal
        mount(folder, "remount,size=64m")
        put(store, key)
        assert store.contains_prefix([key]) == 1


def shared_memory_filled_by_others(folder):
    mount(folder, "size=64m")
    shm_store._SHARED_MEMORY = folder
    url = "shm://small?lease_s=0"
    keys = random_keys(20)
    with opened(url) as first:
        put(first, *keys, num_bytes=_MIB)
        free_bytes = shutil.disk_usage(folder).free
        (folder / "other").write_bytes(bytes(free_bytes - 2 * _MIB))
        with opened(url, is_diagnosis=True) as diagnosis, opened(url) as second:
            put(diagnosis, *(probe := random_keys(1)))
            diagnosis.delete(probe)
            assert second.contains_prefix(keys) == 20
            put(second, *random_keys(1), num_bytes=_MIB)
            assert first.contains_prefix(keys[1:]) == 19
            (folder / "other").unlink()
            put(second, *random_keys(8), num_bytes=_MIB)
            assert first.contains_prefix(keys[1:]) == 19


CASES = [
    read_only_at_the_start,
    read_only_and_empty_at_the_start,
    turned_read_only,
    filled_by_others,
    full_of_leased_objects_on_a_full_disk,
    full_in_spite_of_max_bytes,
    without_inodes,
    mounted_anew,
    shared_memory_without_room,
    shared_memory_filled_by_others,
]


def run_cases(folder):
    """Runs all cases in a mount namespace; returns what each raised, or an empty text, by name.

    Skips the test if there can be no such namespace.
    """
    enter = ["unshare", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*enter, "true"], check=False).returncode:
        pytest.skip("no mount namespace can be created")
    command = [*enter, sys.executable, "-m", __name__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def main(root):
    """Prints the outcomes of all cases, each in a new folder."""
    logging.basicConfig(level=logging.INFO)
    outcomes = {}
    for case in CASES:
        folder = root / case.__name__
        folder.mkdir()
        try:
            case(folder)
            outcomes[case.__name__] = ""
        except Exception:
            outcomes[case.__name__] = traceback.format_exc()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
