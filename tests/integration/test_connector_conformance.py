"""Baton's own connectors pass the public conformance suite, run as a third party runs it,
and connectors that break the contract do not."""

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

pytestmark = [pytest.mark.timeout(3 * SUITE_DEADLINE_S), pytest.mark.alone]

_REPOSITORY = Path(__file__).parents[2]
_CONNECTOR_GROUP = "baton.kv_connectors"
_FAILING_TESTS = {
    "twofold": "test_one_engine_saves_and_loads",
    "leaky": "test_what_lies_behind_a_tail_stays_where_it_is",
    "boastful": "test_a_prefix_is_good_where_the_rest_is_missing",
    "gappy": "test_only_an_unbroken_prefix_counts",
    "silent": "test_the_engine_is_woken_for_each_result",
    "late": "test_a_cancelled_load_ends_once_and_writes_nothing_afterwards",
    "eager": "test_what_is_lent_is_given_back_when_its_lease_is_ended",
    "hasty": "test_a_lease_that_was_not_offered_does_not_run_out",
    "restless": "test_a_lease_that_has_ended_does_not_begin_again",
    "generous": "test_nothing_is_read_after_the_end_of_a_lease",
    "shapeless": "test_blocks_of_another_shape_are_refused",
    "swapped": "test_blocks_arrive_as_they_were_and_nothing_else_changes",
    "forgetful": "test_a_lease_that_is_kept_lasts_until_it_is_dropped",
    "lasting": "test_a_closed_publisher_costs_a_bounded_time",
    "careless": "test_an_unknown_option_is_an_error_that_names_it",
    "modest": "test_what_is_lent_is_declared",
}


def _check(suite):
    try:
        output, _ = suite.communicate(timeout=2 * SUITE_DEADLINE_S)
    finally:
        suite.kill()
    assert suite.returncode == 0, output
    assert " passed" in output
    return output


@pytest.mark.parametrize(
    "url",
    [
        "memory://connectors",
        pytest.param("grpc://", marks=pytest.mark.slow),
        pytest.param("nixl://", marks=pytest.mark.slow),
        pytest.param("faulty+memory://faultless?faults=", marks=pytest.mark.slow),
        pytest.param("multi://grpc://,memory://several", marks=pytest.mark.slow),
        pytest.param("multi://faulty+grpc://?faults=fail_load:1,file://{}", marks=pytest.mark.slow),
    ],
)
def test_our_connectors_conform(url, tmp_path):
    _check(start_suite(url.format(tmp_path), tmp_path / "run", "-k", "connector"))


@pytest.mark.slow
def test_our_stores_conform_as_connectors(tmp_path):
    name = f"connectors-{uuid.uuid4().hex}"
    with running_redis_server() as redis_server:
        urls = (f"shm://{name}", f"file://{tmp_path}/store", redis_server.url)
        suites = [
            start_suite(url, tmp_path / str(index), "-k", "connector")
            for index, url in enumerate(urls)
        ]
        try:
            for suite in suites:
                _check(suite)
        finally:
            for suite in suites:
                suite.kill()
            rmtree(f"/dev/shm/baton-{name}", ignore_errors=True)


@pytest.fixture(scope="module")
def third_party_packages(tmp_path_factory):
    """A folder with an installed package that names its connectors as entry points."""
    folder = tmp_path_factory.mktemp("site-packages")
    source = _REPOSITORY / "tests" / "support" / "nonconforming_connectors.py"
    names = {each: f"{each.capitalize()}Connector" for each in ["good", *_FAILING_TESTS]}
    install_stores(folder, source.read_text(), names, _CONNECTOR_GROUP)
    return folder


@pytest.mark.slow
def test_a_third_partys_connector_conforms(tmp_path, third_party_packages):
    suite = start_suite("good://", tmp_path / "run", python_path=third_party_packages)
    output = _check(suite)
    assert "test_prefix" not in output, "a connector is not a store"


@pytest.mark.slow
def test_connectors_that_break_the_contract_fail(tmp_path, third_party_packages):
    run_failing_suites(_FAILING_TESTS, tmp_path, third_party_packages)


@pytest.mark.slow
def test_the_guides_connector_conforms(tmp_path):
    """The connector that docs/connector-contract.md shows must work."""
    guide = (_REPOSITORY / "docs" / "connector-contract.md").read_text()
    source = guide.split("```python\n")[2].split("```")[0]
    install_stores(tmp_path, source, {"mailbox": "MailboxConnector"}, _CONNECTOR_GROUP)
    _check(start_suite(f"mailbox://{tmp_path}/box", tmp_path / "run", python_path=tmp_path))
