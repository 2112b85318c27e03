"""The redis store passes the conformance suite on every kind of deployment."""

from contextlib import contextmanager

import pytest

from tests.support.conformance_suite import SUITE_DEADLINE_S, start_suite
from tests.support.redis_deployments import make_certificate, running_cluster, running_sentinels
from tests.support.redis_server import free_port, running_redis_server

pytestmark = [pytest.mark.slow, pytest.mark.alone]


@contextmanager
def tls_and_password(folder):
    certificate, port = make_certificate(folder), free_port()
    with running_redis_server(*certificate.server_arguments(port), "--requirepass", "p@ss"):
        yield f"rediss://:p%40ss@127.0.0.1:{port}/3?ca_file={certificate.path}"


@contextmanager
def cluster(folder):
    with running_cluster(folder) as cluster:
        yield cluster.url


@contextmanager
def sentinels(folder):
    with running_sentinels(folder) as deployment:
        yield deployment.url


@pytest.mark.parametrize("deployment", [tls_and_password, cluster, sentinels])
def test_every_deployment_conforms(deployment, tmp_path):
    with deployment(tmp_path) as url:
        # test_connector_conformance.py runs the connector's tests on a plain server.
        suite = start_suite(url, tmp_path / "suite", "-k", "not test_connector")
        try:
            output, _ = suite.communicate(timeout=3 * SUITE_DEADLINE_S)  # a busy machine
        finally:
            suite.kill()
            suite.communicate()
    assert suite.returncode == 0, output
    assert " passed" in output
