"""Baton's own stores pass the public conformance suite, run as a third party runs it,
and stores that break the contract do not."""

import os
import subprocess
import sys
import textwrap
import uuid
from pathlib import Path
from shutil import rmtree

import pytest

from tests.support.redis_server import running_redis_server

_REPOSITORY = Path(__file__).parents[2]
_DEADLINE_S = 110


def _start_suite(url, folder, *arguments, python_path=""):
    """Starts the suite in an empty folder, away from this repository's pytest settings."""
    folder.mkdir()
    # fmt: off
    command = [
        sys.executable, "-m", "pytest", "--pyargs", "kvstore.conformance", "--kv-connector", url,
        "-p", "no:cacheprovider", "-p", "no:asyncio", "-W", "error", "-q", *arguments,
    ]
    # fmt: on
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": python_path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def running_suites(tmp_path_factory):
    """The suite against all of Baton's stores at once: it mostly waits for TTLs."""
    folder = tmp_path_factory.mktemp("conformance")
    shm_name = f"conformance-{uuid.uuid4().hex}"
    with running_redis_server() as redis_server:
        urls = {
            "memory": "memory://conformance",
            "shm": f"shm://{shm_name}",
            "file": f"file://{folder}/store",
            "redis": redis_server.url,
        }
        suites = {scheme: _start_suite(url, folder / scheme) for scheme, url in urls.items()}
        yield suites
        for suite in suites.values():
            suite.kill()
            suite.communicate()
    rmtree(f"/dev/shm/baton-{shm_name}", ignore_errors=True)


@pytest.mark.parametrize("scheme", ["memory", "shm", "file", "redis"])
def test_our_stores_conform(running_suites, scheme):
    output, _ = running_suites[scheme].communicate(timeout=_DEADLINE_S)
    assert running_suites[scheme].returncode == 0, output
    assert " passed" in output


@pytest.fixture(scope="module")
def third_party_packages(tmp_path_factory):
    """A folder with an installed package that names its stores as entry points."""
    folder = tmp_path_factory.mktemp("site-packages")
    source = _REPOSITORY / "tests" / "support" / "nonconforming_stores.py"
    (folder / "third_party_stores.py").write_text(source.read_text())
    metadata = folder / "third_party_stores-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        textwrap.dedent("""\
            [baton.kv_stores]
            good = third_party_stores:GoodStore
            overwriting = third_party_stores:OverwritingStore
            torn = third_party_stores:TornStore
            counting = third_party_stores:CountingStore
            immortal = third_party_stores:ImmortalStore
            untouched = third_party_stores:UntouchedStore
            unbounded = third_party_stores:UnboundedStore
            careless = third_party_stores:CarelessStore
            """)
    )
    return folder


def test_a_third_partys_store_is_found(tmp_path, third_party_packages):
    folder, packages = tmp_path / "run", str(third_party_packages)
    suite = _start_suite("good://x", folder, "-k", "test_prefix", python_path=packages)
    output, _ = suite.communicate(timeout=_DEADLINE_S)
    assert suite.returncode == 0, output


_FAILING_TESTS = {
    "overwriting": "test_putting_an_existing_key_keeps_the_old_object",
    "torn": "test_threads_never_see_a_torn_or_changed_object",
    "counting": "test_stops_at_the_first_hole",
    "immortal": "test_what_expired_is_as_if_it_had_never_been",
    "untouched": "test_a_hit_touches",
    "unbounded": "test_objects_keep_to_the_bound",
    "careless": "test_an_unknown_option_is_an_error_that_names_it",
}


@pytest.fixture(scope="module")
def failing_suites(tmp_path_factory, third_party_packages):
    """For each store that breaks the contract, the test that must notice."""
    folder, packages = tmp_path_factory.mktemp("failing"), str(third_party_packages)
    suites = {
        scheme: _start_suite(
            f"{scheme}://x", folder / scheme, "-k", test, "-x", "--tb=no", python_path=packages
        )
        for scheme, test in _FAILING_TESTS.items()
    }
    yield suites
    for suite in suites.values():
        suite.kill()
        suite.communicate()


@pytest.mark.parametrize("scheme", _FAILING_TESTS)
def test_a_store_that_breaks_the_contract_fails(failing_suites, scheme):
    output, _ = failing_suites[scheme].communicate(timeout=_DEADLINE_S)
    assert failing_suites[scheme].returncode == 1, output
    assert f"::{_FAILING_TESTS[scheme]}" in output


def test_the_suite_asks_for_its_url(tmp_path):
    command = [sys.executable, "-m", "pytest", "--pyargs", "kvstore.conformance.test_prefix"]
    command += ["-p", "no:cacheprovider", "-p", "no:asyncio", "-x"]
    run = subprocess.run(
        command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=_DEADLINE_S
    )
    assert run.returncode != 0
    assert "needs --kv-connector URL" in run.stdout + run.stderr
