"""Files and batches on disk: whose they are, how many there may be, and when they go."""

import os
import stat
from dataclasses import replace

import pytest

from baton.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from router.batches import folder as folder_module
from router.batches.folder import MAX_TTL_S, BatchFolder, key_of, new_id
from router.batches.records import BATCH_INPUT
from router.batches.run import BatchRun
from tests.support.batches import HOUR_S, add_batch
from tests.support.clock import Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def folder(tmp_path, clock):
    return BatchFolder(tmp_path / "batches", clock)


def add_file(folder, tenant="a"):
    return folder.add_file(tenant, "in.jsonl", BATCH_INPUT, b"{}\n", HOUR_S)


def end(folder, queued) -> None:
    run = BatchRun(folder, queued, 4096)
    assert run.begin()
    run.finish("cancelled")
    run.close()


def test_clients_see_only_their_own(folder, tmp_path):
    file, batch = add_file(folder), add_batch(folder, ["1"], "a")
    assert folder.file("a", file.id) == file
    for call in (
        lambda: folder.file("b", file.id),
        lambda: folder.delete_file("b", file.id),
        lambda: folder.batch("b", batch.id),
        lambda: folder.cancel_batch("b", batch.id),
        lambda: folder.file("a", f"../../{key_of('a')}/files/{file.id}"),
    ):
        with pytest.raises(NotFoundError):
            call()
    assert not folder.files("b")
    assert not folder.batches("b")
    assert stat.S_IMODE((tmp_path / "batches").stat().st_mode) == 0o700


def test_a_file_that_a_batch_reads_stays(folder):
    batch = add_batch(folder, ["1"], "a")
    with pytest.raises(FailedPreconditionError, match="file_id: batch_"):
        folder.delete_file("a", batch.input_file_id)
    end(folder, folder.queue()[0])
    folder.delete_file("a", batch.input_file_id)
    assert batch.input_file_id not in {file.id for file in folder.files("a")}
    with pytest.raises(NotFoundError):
        folder.file("a", batch.input_file_id)


def test_results_of_a_batch_that_has_not_finished_stay(folder, clock, monkeypatch):
    """They may be seen already, while its last record cannot be written: it runs again then."""
    batch, key = add_batch(folder, ["1"], "a", window_s=10**6), key_of("a")
    run = BatchRun(folder, folder.queue()[0], 4096)
    assert run.begin()
    run.add_answer("1", 200, "id", b"{}")
    write = folder.write_batch

    def fail_at_last(key, record):
        if record.status == "completed":
            raise OSError(28, "No space left on device")
        write(key, record)

    monkeypatch.setattr(folder, "write_batch", fail_at_last)
    with pytest.raises(OSError, match="No space left"):
        run.finish("completed")
    run.close()
    assert batch.output_id in {file.id for file in folder.files("a")}
    with pytest.raises(FailedPreconditionError, match="file_id: batch_"):
        folder.delete_file("a", batch.output_id)
    clock.now += HOUR_S
    folder.sweep()
    assert folder.content_path(key, batch.output_id).exists()


def test_a_client_has_a_limit_of_each(folder, monkeypatch):
    monkeypatch.setattr(folder_module, "MAX_FILES", 1)
    monkeypatch.setattr(folder_module, "MAX_BATCHES", 1)
    batch = add_batch(folder, ["1"], "a")
    with pytest.raises(InvalidArgumentError, match="file: this client has 1 files"):
        add_file(folder, "a")
    with pytest.raises(InvalidArgumentError, match="input_file_id: this client has 1 batches"):
        folder.add_batch(batch)
    add_file(folder, "b")


def test_a_batch_that_has_finished_cannot_be_cancelled(folder):
    batch = add_batch(folder, ["1"], "a")
    run = BatchRun(folder, folder.queue()[0], 4096)
    assert run.begin()
    run.finish("expired")
    run.close()
    with pytest.raises(FailedPreconditionError, match="batch_id: the batch is expired"):
        folder.cancel_batch("a", batch.id)


def test_what_has_expired_is_removed(folder, clock, tmp_path):
    old, used = add_file(folder, "a"), add_batch(folder, ["1"], "a", window_s=10**6)
    left = tmp_path / "batches" / "queue" / "1.tmp"
    left.touch()
    os.utime(left, (0, 0))
    clock.now += HOUR_S
    folder.sweep()
    assert not left.exists()
    key = key_of("a")
    assert not folder.content_path(key, old.id).exists()
    assert folder.content_path(key, used.input_file_id).exists()
    end(folder, folder.queue()[0])
    clock.now += MAX_TTL_S
    folder.sweep()
    assert not folder.content_path(key, used.input_file_id).exists()
    assert not folder.batches("a")
    remaining = [path for path in (tmp_path / "batches" / "tenants").rglob("*") if path.is_file()]
    assert remaining == []


def test_names_in_the_queue_that_another_version_gave_are_replaced(folder, clock):
    clock.now = 10_000.0
    batch = add_batch(folder, ["1"], "a", window_s=10**6)
    (queued,) = folder.queue()
    other = queued.marker.rename(queued.marker.with_name(f"{0:020}.{batch.id}.{key_of('a')}"))
    assert not folder.queue()
    folder.sweep()
    assert other.exists()  # it is new: a router of the other version may just have made it
    os.utime(other, (0, 0))
    folder.sweep()
    assert not other.exists()
    assert [each.id for each in folder.queue()] == [batch.id]


def test_contents_that_a_killed_router_left_without_a_record_are_removed(folder, clock):
    clock.now = 10_000.0
    batch, key = add_batch(folder, ["1"], "a", window_s=10**6), key_of("a")
    left, new = new_id("file-"), new_id("file-")
    for file_id in (left, new, batch.output_id, batch.error_id):
        folder.content_path(key, file_id).touch()
        age_s = 0 if file_id == new else HOUR_S + 1
        os.utime(folder.content_path(key, file_id), (clock.now - age_s, clock.now - age_s))
    os.utime(folder.content_path(key, batch.input_file_id), (0, 0))
    folder.sweep()
    for file_id in (new, batch.input_file_id, batch.output_id, batch.error_id):
        assert folder.content_path(key, file_id).exists()
    assert not folder.content_path(key, left).exists()


def test_beside_a_batch_that_cannot_be_read_no_content_is_removed(folder, clock, tmp_path):
    """It may be one of a newer version, which another router runs."""
    clock.now = 10_000.0
    batch = add_batch(folder, ["1"], "a")
    (path,) = (tmp_path / "batches" / "tenants").rglob(f"{batch.id}.json")
    path.write_text('{"of": "another version"}')
    output = folder.content_path(key_of("a"), batch.output_id)
    output.touch()
    os.utime(output, (0, 0))
    folder.sweep()
    assert output.exists()


def test_a_malformed_record_concerns_its_batch_alone(folder, clock, tmp_path):
    bad, good = add_batch(folder, ["1"], "a"), add_batch(folder, ["2"], "a")
    old = add_file(folder, "a")
    (path,) = (tmp_path / "batches" / "tenants").rglob(f"{bad.id}.json")
    path.write_text('{"of": "another version"}')
    assert [batch.id for batch in folder.batches("a")] == [good.id]
    folder.delete_file("a", bad.input_file_id)
    with pytest.raises(FailedPreconditionError, match=good.id):
        folder.delete_file("a", good.input_file_id)
    clock.now += HOUR_S
    folder.sweep()
    assert not folder.content_path(key_of("a"), old.id).exists()


def fail_in(monkeypatch, folder_name, suffix, *, is_written) -> None:
    """Lets writes into a folder fail, also those whose last step fails: the file is there then."""
    write = folder_module._write

    def fail(path, content):
        fails = path.parent.name == folder_name and path.name.endswith(suffix)
        if is_written or not fails:
            write(path, content)
        if fails:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_module, "_write", fail)


@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize(("name", "suffix"), [("queue", ""), ("batches", ".json")])
def test_a_batch_that_is_refused_for_a_full_disk_is_not_kept(
    folder, monkeypatch, name, suffix, is_written
):
    batch = add_batch(folder, ["1"], "a")
    with monkeypatch.context() as context:
        fail_in(context, name, suffix, is_written=is_written)
        with pytest.raises(OSError, match="No space left"):
            folder.add_batch(replace(batch, id=new_id("batch_")))
    folder.sweep()  # puts batches that are kept into the queue
    assert [each.id for each in folder.batches("a")] == [batch.id]


@pytest.mark.parametrize("is_written", [False, True])
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_a_file_that_is_refused_for_a_full_disk_is_not_kept(
    folder, monkeypatch, tmp_path, suffix, is_written
):
    fail_in(monkeypatch, "files", suffix, is_written=is_written)
    with pytest.raises(OSError, match="No space left"):
        add_file(folder)
    assert not [path for path in (tmp_path / "batches" / "tenants").rglob("*") if path.is_file()]


def test_a_batch_that_a_killed_router_left_out_of_the_queue_is_put_there(folder):
    batch = add_batch(folder, ["1"], "a")
    folder.leave_queue(folder.queue()[0])
    folder.sweep()
    assert [queued.id for queued in folder.queue()] == [batch.id]
    folder.sweep()
    assert len(folder.queue()) == 1
    end(folder, folder.queue()[0])
    folder.sweep()
    assert not folder.queue()


def test_what_cannot_be_swept_keeps_no_other_file(folder, clock, tmp_path):
    files = {tenant: add_file(folder, tenant) for tenant in "abc"}
    for name in ("!", "~"):  # first and last by name, wherever the file system lists them
        (tmp_path / "batches" / "tenants" / name).write_text("no folder")
    clock.now += HOUR_S
    folder.sweep()
    for tenant, file in files.items():
        assert not folder.content_path(key_of(tenant), file.id).exists()
