"""Who may call the router's ClusterService."""

from pathlib import Path

import pytest

from baton.common.errors import PermissionDeniedError, UnauthenticatedError
from baton.common.security.config import CredentialsConfig
from router.config.security import ClientTlsConfig, RouterSecurityConfig, WorkerTlsConfig
from router.config.tenants import TenantsConfig
from router.security import RouterSecurity
from router.tenants.tenant import OPEN_TENANT
from tests.support.certificates import Authority, write_files

REGISTRATION = "/baton.v1.RegistrationService/Announce"
OPERATORS, CLIENTS = "/baton.v1.ClusterService/GetTrace", "/baton.v1.GenerationService/Generate"


class Call:
    """A call with this metadata."""

    def __init__(self, *metadata, certificate=None):
        self._metadata = metadata
        self._certificate = certificate

    def invocation_metadata(self):
        return self._metadata

    def auth_context(self):
        return {} if self._certificate is None else {"x509_pem_cert": [self._certificate]}

    def add_done_callback(self, callback):
        pass


def authorize_of(host, token_file=None, **config):
    cluster = CredentialsConfig(token_file=token_file)
    security = RouterSecurity(RouterSecurityConfig(cluster=cluster, **config))
    return security.grpc_access(host).authorize


def client_tls(folder):
    """The flags of a router whose clients need certificates, and a client's certificate."""
    authority = Authority()
    client = authority.issue()
    files = write_files(folder, authority.issue(), authority.certificate)
    return ClientTlsConfig(
        certfile=files.certfile,
        keyfile=files.keyfile,
        ca_certs=files.ca_certs,
        ssl_cert_reqs="required",
    ), client.certificate


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_operators_show_the_clusters_token(tmp_path, host):
    path = tmp_path / "token"
    authorize = authorize_of(host, str(path))
    token = path.read_text().strip()
    authorize(OPERATORS, Call(("authorization", f"Bearer {token}")))
    for metadata in ((), (("authorization", "Bearer wrong"),)):
        with pytest.raises(UnauthenticatedError):
            authorize(OPERATORS, Call(*metadata))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_without_a_token_operators_must_be_on_the_same_machine(host):
    authorize_of(host)(OPERATORS, Call())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "router.example"])
def test_without_a_token_a_router_for_other_machines_answers_no_operator(host):
    with pytest.raises(PermissionDeniedError, match="--cluster-token-file"):
        authorize_of(host)(OPERATORS, Call())


def test_without_a_token_clients_with_keys_are_no_operators():
    config = TenantsConfig(api_key=("k" * 32,))
    with pytest.raises(PermissionDeniedError, match="--cluster-token-file"):
        authorize_of("127.0.0.1", tenants=config)(OPERATORS, Call())


def test_certificates_of_clients_are_not_those_of_operators(tmp_path):
    clients, certificate = client_tls(tmp_path / "clients")
    call = Call(certificate=certificate)
    other_ca = write_files(tmp_path / "workers", Authority().issue(), Authority().certificate)
    workers = WorkerTlsConfig(cluster_ssl_ca_certs=other_ca.ca_certs)
    with pytest.raises(PermissionDeniedError):
        authorize_of("127.0.0.1", clients=clients, workers=workers)(OPERATORS, call)
    token_file = tmp_path / "token"
    authorize = authorize_of("0.0.0.0", str(token_file), clients=clients, workers=workers)
    with pytest.raises(UnauthenticatedError):
        authorize(OPERATORS, call)
    header = ("authorization", f"Bearer {token_file.read_text().strip()}")
    authorize(OPERATORS, Call(header, certificate=certificate))


def test_one_ca_for_clients_and_workers_makes_operators_of_its_certificates(tmp_path):
    clients, certificate = client_tls(tmp_path)
    authorize = authorize_of("0.0.0.0", clients=clients)
    authorize(OPERATORS, Call(certificate=certificate))
    with pytest.raises(UnauthenticatedError):
        authorize(OPERATORS, Call())


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_clients_need_no_credential_of_operators(tmp_path, host):
    authorize = authorize_of(host, str(tmp_path / "token"))
    assert authorize(CLIENTS, Call()) is OPEN_TENANT


def test_workers_that_announce_themselves_need_what_operators_need(tmp_path):
    path = tmp_path / "token"
    authorize = authorize_of("0.0.0.0", str(path))
    authorize(REGISTRATION, Call(("authorization", f"Bearer {path.read_text().strip()}")))
    with pytest.raises(UnauthenticatedError):
        authorize(REGISTRATION, Call())
    with pytest.raises(PermissionDeniedError, match="no credential for operators and workers"):
        authorize_of("0.0.0.0")(REGISTRATION, Call())
    authorize_of("127.0.0.1")(REGISTRATION, Call())


def check_http(host, header=None, token_file=None, asked_host="127.0.0.1:8000", **config):
    cluster = CredentialsConfig(token_file=token_file)
    security = RouterSecurity(RouterSecurityConfig(cluster=cluster, **config))
    security.check_operator(host, header, asked_host)


def test_over_http_operators_show_the_clusters_token(tmp_path):
    path = str(tmp_path / "token")
    for header in (None, "", "Bearer", "Bearer wrong"):
        with pytest.raises(UnauthenticatedError):
            check_http("127.0.0.1", header, path)
    check_http("0.0.0.0", f"Bearer {Path(path).read_text().strip()}", path)


def test_over_http_without_a_token_operators_must_be_on_the_same_machine_without_keys(tmp_path):
    check_http("127.0.0.1")
    clients, _ = client_tls(tmp_path)
    for host, config in (
        ("0.0.0.0", {}),
        ("127.0.0.1", {"tenants": TenantsConfig(api_key=("k" * 32,))}),
        ("127.0.0.1", {"clients": clients}),
    ):
        with pytest.raises(PermissionDeniedError, match="--cluster-token-file"):
            check_http(host, f"Bearer {'k' * 32}", **config)


@pytest.mark.parametrize(
    "asked_host", ["localhost", "LOCALHOST:80", "127.0.0.1", "[::1]", "[::1]:80"]
)
def test_over_http_without_a_token_this_machine_is_asked_for_by_its_own_names(asked_host):
    check_http("127.0.0.1", asked_host=asked_host)


@pytest.mark.parametrize(
    "asked_host", ["", "evil.example:8000", "localhost.evil.example", "10.0.0.1"]
)
def test_pages_of_other_sites_and_clients_of_proxies_are_no_operators(asked_host, tmp_path):
    """Their names may lead here: by DNS rebinding, or by a proxy on this machine."""
    with pytest.raises(PermissionDeniedError, match="--cluster-token-file"):
        check_http("127.0.0.1", asked_host=asked_host)
    path = tmp_path / "token"
    with pytest.raises(UnauthenticatedError):
        check_http("127.0.0.1", None, str(path), asked_host)
    check_http("127.0.0.1", f"Bearer {path.read_text().strip()}", str(path), asked_host)
