"""`WatchedFiles`: when changed files are read again."""

import os

import pytest

from baton.common.errors import ConfigurationError
from baton.common.security import watched_files
from baton.common.security.watched_files import WatchedFiles


class Source:
    """Two files, and a reader that may fail."""

    def __init__(self, folder):
        self.files = [folder / name for name in "ab"]
        for file in self.files:
            file.write_text("0")
        self.error = None
        self.num_reads = 0

    def read(self):
        self.num_reads += 1
        if self.error is not None:
            raise self.error
        return "".join(file.read_text() for file in self.files)

    def watched(self):
        return WatchedFiles([str(file) for file in self.files], self.read, "letters")


@pytest.fixture
def source(tmp_path):
    return Source(tmp_path)


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(watched_files.time, "monotonic", lambda: now[0])
    return now


def test_a_change_of_any_file_is_read_once(source):
    watched = source.watched()
    for i, file in enumerate(source.files):
        file.write_text("10")
        content = watched.current()
        assert content == watched.current() == "10" * (i + 1) + "0" * (1 - i)
    assert source.num_reads == 3
    assert watched.version == 2


def test_a_change_of_rights_alone_is_a_change(source):
    watched = source.watched()
    os.utime(source.files[0], ns=(0, 0))
    watched.current()
    source.files[0].chmod(0o600)
    watched.current()
    assert source.num_reads == 3


@pytest.mark.parametrize("error", [ConfigurationError("bad"), OSError("bad"), ValueError("bad")])
def test_what_failed_is_read_again_after_a_second_or_a_change(source, clock, caplog, error):
    watched = source.watched()
    source.files[0].write_text("10")
    source.error = error
    assert watched.current() == watched.current() == "00"
    assert source.num_reads == 2
    assert caplog.text.count("the last good letters stay in use: bad") == 1
    clock[0] += 1
    assert watched.current() == "00"
    assert source.num_reads == 3
    assert caplog.text.count("stay in use") == 1
    source.files[1].write_text("10")
    assert watched.current() == "00"
    assert source.num_reads == 4
    source.error = None
    assert watched.current() == "00"
    clock[0] += 1
    assert watched.current() == "1010"
    assert watched.version == 1


def test_files_that_cannot_be_read_at_the_start_are_an_error(source):
    source.error = ConfigurationError("bad")
    with pytest.raises(ConfigurationError):
        source.watched()
