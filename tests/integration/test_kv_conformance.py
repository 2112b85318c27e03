"""Baton's own stores pass the public conformance suite, run as a third party runs it,
and stores that break the contract do not."""

import subprocess
import sys
import uuid
from pathlib import Path
from shutil import rmtree

import pytest

from tests.support.conformance_suite import (
    SUITE_DEADLINE_S,
    install_stores,
    run_failing_suites,
    start_suite,
)
from tests.support.redis_server import running_redis_server

pytestmark = pytest.mark.alone

_REPOSITORY = Path(__file__).parents[2]
_FAILING_TESTS = {
    "overwriting": "test_putting_an_existing_key_keeps_the_old_object",
    "torn": "test_threads_never_see_a_torn_or_changed_object",
    "counting": "test_stops_at_the_first_hole",
    "immortal": "test_what_expired_is_as_if_it_had_never_been",
    "untouched": "test_a_hit_touches",
    "peeking": "test_a_look_up_touches_all_that_it_counts",
    "reviving": "test_what_expired_is_as_if_it_had_never_been",
    "unbounded": "test_objects_keep_to_the_bound",
    "evicting": "test_a_put_evicts_nothing_that_is_leased",
    "forgetful": "test_a_touch_renews_the_lease",
    "hasty": "test_the_timeout_is_that_of_the_url",
    "careless": "test_an_unknown_option_is_an_error_that_names_it",
}


@pytest.fixture(scope="module")
def running_suites(request, tmp_path_factory):
    """Runs the suite on all requested stores of Baton at once, since it mostly waits for TTLs."""
    cases = [item for item in request.session.items if item.module is request.module]
    requested = {
        item.callspec.params["scheme"] for item in cases if "running_suites" in item.fixturenames
    }
    folder = tmp_path_factory.mktemp("conformance")
    shm_name = f"conformance-{uuid.uuid4().hex}"
    with running_redis_server() as redis_server:
        urls = {
            "memory": "memory://conformance",
            "shm": f"shm://{shm_name}",
            "file": f"file://{folder}/store",
            "redis": redis_server.url,
        }
        suites = {
            # What a store does as a connector is tested in test_connector_conformance.py.
            scheme: start_suite(url, folder / scheme, "-k", "not connector")
            for scheme, url in urls.items()
            if scheme in requested
        }
        yield suites
        for suite in suites.values():
            suite.kill()
            suite.communicate()
    rmtree(f"/dev/shm/baton-{shm_name}", ignore_errors=True)


@pytest.mark.parametrize(
    "scheme",
    [
        "memory",
        pytest.param("redis", marks=pytest.mark.slow),
        pytest.param("shm", marks=pytest.mark.slow),
        pytest.param("file", marks=pytest.mark.slow),
    ],
)
def test_our_stores_conform(running_suites, scheme):
    output, _ = running_suites[scheme].communicate(timeout=SUITE_DEADLINE_S)
    assert running_suites[scheme].returncode == 0, output
    assert " passed" in output


@pytest.fixture(scope="module")
def third_party_packages(tmp_path_factory):
    """A folder with an installed package that names its stores as entry points."""
    folder = tmp_path_factory.mktemp("site-packages")
    source = _REPOSITORY / "tests" / "support" / "nonconforming_stores.py"
    schemes = ["good", *_FAILING_TESTS]
    class_names = {scheme: f"{scheme.capitalize()}Store" for scheme in schemes}
    install_stores(folder, source.read_text(), class_names)
    return folder


@pytest.mark.slow
def test_the_guides_store_conforms(tmp_path):
    """The store that docs/connector-contract.md shows must work."""
    guide = (_REPOSITORY / "docs" / "connector-contract.md").read_text()
    source = guide.split("```python\n")[1].split("```")[0]
    install_stores(tmp_path, source, {"sqlite": "SqliteStore"})
    suite = start_suite(f"sqlite://{tmp_path}/kv.sqlite", tmp_path / "run", python_path=tmp_path)
    output, _ = suite.communicate(timeout=SUITE_DEADLINE_S)
    assert suite.returncode == 0, output


@pytest.mark.slow
def test_a_third_partys_store_is_found(tmp_path, third_party_packages):
    folder, packages = tmp_path / "run", third_party_packages
    suite = start_suite("good://x", folder, "-k", "test_prefix", python_path=packages)
    output, _ = suite.communicate(timeout=SUITE_DEADLINE_S)
    assert suite.returncode == 0, output


@pytest.mark.slow
@pytest.mark.timeout(3 * SUITE_DEADLINE_S)
def test_stores_that_break_the_contract_fail(tmp_path, third_party_packages):
    run_failing_suites(_FAILING_TESTS, tmp_path, third_party_packages)


@pytest.mark.slow
def test_the_suite_requires_a_url(tmp_path):
    command = [sys.executable, "-m", "pytest", "--pyargs", "kvstore.conformance.test_prefix"]
    command += [
        "-p",
        "kvstore.conformance.plugin",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:asyncio",
        "-x",
    ]
    run = subprocess.run(
        command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=SUITE_DEADLINE_S
    )
    assert run.returncode != 0
    assert "--kv-connector URL" in run.stdout + run.stderr
