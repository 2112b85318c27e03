"""Errors of the operating system in the words of logs: what is wrong, and what to do about it."""

import errno
import os
from pathlib import Path

import pytest

from kvstore.stores import refusals
from kvstore.stores.refusals import explain


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, ["disk full: No space left on device", "free some space there"]),
        (errno.EDQUOT, ["disk full: Disk quota exceeded", "raise the quota"]),
        (errno.EROFS, ["Read-only file system", "mount it for writing"]),
        (errno.EACCES, ["Permission denied", "belongs to uid", "chown"]),
        (errno.EPERM, ["Operation not permitted", "belongs to uid"]),
        (errno.ENOENT, ["No such file or directory", "is its disk mounted?"]),
        (errno.ESTALE, ["Stale file handle", "mount it again"]),
        (errno.EIO, ["Input/output error"]),
    ],
)
def test_an_error_names_the_folder_and_the_remedy(tmp_path, number, words):
    absent = tmp_path / "absent" / "kv"
    for error in (
        OSError(number, os.strerror(number), str(absent)),
        OSError(number, os.strerror(number)),
    ):
        text = explain(error, absent)
        for part in (str(absent), *words):
            assert part in text


@pytest.mark.parametrize(
    ("num_files", "num_free", "block_bytes", "lacks"),
    [(1000, 0, 4096, True), (1000, 900, 4096, False), (0, 0, 4096, False), (1000, 0, 1, False)],
)
def test_inodes_are_named_if_they_are_what_is_lacking(
    tmp_path, monkeypatch, num_files, num_free, block_bytes, lacks
):
    free_blocks = 1000
    status = (block_bytes, block_bytes, 0, free_blocks, free_blocks, num_files, num_free, num_free)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((*status, 0, 255)))
    text = explain(OSError(errno.ENOSPC, "No space left on device"), tmp_path)
    assert ("no inodes are left" in text) == lacks
    assert text.startswith("disk full: ")


def test_shared_memory_has_a_remedy_of_its_own():
    text = explain(OSError(errno.ENOSPC, "No space left on device"), Path("/dev/shm/baton-x"))
    assert "--shm-size" in text


@pytest.mark.parametrize(("uid", "is_hinted"), [(0, True), (777, False)])
def test_root_that_is_mapped_to_another_user_gets_a_hint(tmp_path, monkeypatch, uid, is_hinted):
    owner = os.stat_result((0o40755, 1, 1, 1, 65534, 65534, 0, 0, 0, 0))
    monkeypatch.setattr(os, "getuid", lambda: uid)
    monkeypatch.setattr(refusals, "_nearest_status", lambda path: (owner, path))
    text = explain(PermissionError(errno.EACCES, "Permission denied"), tmp_path)
    assert f"{tmp_path} belongs to uid 65534 with mode 755" in text
    assert f"this process has uid {uid}" in text
    assert ("root_squash" in text) == is_hinted
