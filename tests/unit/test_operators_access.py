"""Who may call the router's ClusterService."""

import pytest

from baton.errors import PermissionDeniedError, UnauthenticatedError
from baton.security.config import ClusterConfig
from router.security import RouterSecurity
from router.security_config import RouterSecurityConfig
from router.tenants.tenant import OPEN_TENANT

OPERATORS, CLIENTS = "/baton.v1.ClusterService/GetTrace", "/baton.v1.GenerationService/Generate"


class Call:
    """A call with this metadata."""

    def __init__(self, *metadata):
        self._metadata = metadata

    def invocation_metadata(self):
        return self._metadata

    def auth_context(self):
        return {}

    def add_done_callback(self, callback):
        pass


def authorize_of(host, token_file=None):
    config = RouterSecurityConfig(cluster=ClusterConfig(token_file=token_file))
    return RouterSecurity(config).grpc_access(host).authorize


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_operators_show_the_clusters_token(tmp_path, host):
    path = tmp_path / "token"
    authorize = authorize_of(host, str(path))
    token = path.read_text().strip()
    assert authorize(OPERATORS, Call(("authorization", f"Bearer {token}")))
    for metadata in ((), (("authorization", "Bearer wrong"),)):
        with pytest.raises(UnauthenticatedError):
            authorize(OPERATORS, Call(*metadata))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_without_a_token_operators_must_be_on_the_same_machine(host):
    assert authorize_of(host)(OPERATORS, Call())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "router.example"])
def test_without_a_token_a_router_for_other_machines_answers_no_operator(host):
    with pytest.raises(PermissionDeniedError, match="--cluster-token-file"):
        authorize_of(host)(OPERATORS, Call())


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_clients_need_no_credential_of_operators(tmp_path, host):
    authorize = authorize_of(host, str(tmp_path / "token"))
    assert authorize(CLIENTS, Call()) is OPEN_TENANT
