"""A batch is run again and again, killed at any byte, and at its end on a disk that is full for a
time: each request has one result.
"""

import itertools
import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from router.batches.folder import BatchFolder, key_of
from router.batches.run import BatchRun
from tests.support.batches import add_batch, ids_of, results_of
from tests.support.clock import Clock

STATUSES = st.sampled_from([200, 400])
KILLS = st.lists(
    st.tuples(
        st.lists(STATUSES, max_size=6),  # of the answers before the run is killed
        st.integers(0, 300),  # bytes that a power failure takes from each file of results
        st.booleans(),  # whether clients saw the progress
    ),
    max_size=3,
)


@settings(max_examples=25)
@mock.patch("os.fsync", mock.Mock())  # no power failure, but those of the test
@given(
    num_requests=st.integers(1, 12),
    kills=KILLS,
    end=st.sampled_from(["expired", "completed"]),
    failures=st.sets(st.integers(0, 20), max_size=4),
)
def test_each_request_has_one_result(num_requests, kills, end, failures):
    custom_ids = [f"request-{i}" for i in range(num_requests)]
    with tempfile.TemporaryDirectory() as path:
        folder = BatchFolder(Path(path), Clock())
        batch = add_batch(folder, custom_ids)
        for statuses, num_lost, is_seen in kills:
            run = begun(folder)
            answer_next(run, statuses)
            if is_seen:
                run.checkpoint()
            run.close()
            lose_ends(folder, batch, num_lost)
        with mock.patch("os.fsync", side_effect=full_disk(failures)):
            while folder.queue():
                run_to_its_end(folder, end, num_requests)
        answers, errors = results_of(folder, batch)
        assert Counter(ids_of(answers) + ids_of(errors)) == Counter(custom_ids)
        record = folder.batch("", batch.id)
        assert (record.status, record.total) == (end, num_requests)
        assert (record.completed, record.failed) == (len(answers), len(errors))
        assert not folder.queue()
        files = {file.id for file in folder.files("")}
        shown = {record.body()["output_file_id"], record.body()["error_file_id"]} - {None}
        assert files == {batch.input_file_id, *shown}


def begun(folder) -> BatchRun:
    (queued,) = folder.queue()
    run = BatchRun(folder, queued, 4096)
    assert run.begin()
    return run


def full_disk(failures):
    """Fails at the calls with these numbers: a file has, or has not, its new content then."""
    numbers = itertools.count()

    def fsync(descriptor) -> None:
        if next(numbers) in failures:
            raise OSError(28, "No space left on device")

    return fsync


def run_to_its_end(folder, end, num_requests) -> None:
    run = BatchRun(folder, folder.queue()[0], 4096)
    try:
        if run.begin():
            if end == "completed":
                answer_next(run, [200] * num_requests)
            run.finish(end)
    except OSError:
        pass  # the disk is full
    finally:
        run.close()


def answer_next(run, statuses) -> None:
    for status, request in zip(statuses, run.next_requests(), strict=False):
        run.add_answer(request.custom_id, status, "id", b'{"text": "\xc3\xa9"}')
        run.add_answer(request.custom_id, 200, "again", b"{}")


def lose_ends(folder, batch, num_bytes: int) -> None:
    for file_id in (batch.output_id, batch.error_id):
        path = folder.content_path(key_of(""), file_id)
        path.write_bytes(path.read_bytes()[: max(0, path.stat().st_size - num_bytes)])


def test_a_batch_goes_on_with_a_smaller_limit_than_that_of_its_check(tmp_path):
    folder = BatchFolder(tmp_path, Clock())
    batch = add_batch(folder, ["a", "b"])
    run = begun(folder)
    answer_next(run, [200])
    run.close()
    run = BatchRun(folder, folder.queue()[0], 8)
    assert run.begin()
    assert [request.custom_id for request in run.next_requests()] == ["b"]
    run.finish("expired")
    run.close()
    assert folder.batch("", batch.id).status == "expired"
