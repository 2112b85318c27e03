"""TLS on the router's ports: who is let in, and certificates that are exchanged."""

import asyncio
import ssl
import time
from contextlib import asynccontextmanager
from datetime import timedelta

import httpx2
import pytest

from baton import AsyncClient, Client
from baton.cli.openai_endpoint import OpenAiEndpoint
from baton.common.errors import ConfigurationError, UnauthenticatedError, UnavailableError
from baton.common.security.client import ClientTls
from router.config.http import HttpConfig
from router.config.security import (
    PLAIN_CALLS,
    ClientTlsConfig,
    RouterSecurityConfig,
    WorkerTlsConfig,
)
from rpc.probe import check_health, wait_until_ready, wait_until_serving
from tests.support.certificates import Authority, write_files
from tests.support.fake_workers import MODEL, FakeDecode, running_workers
from tests.support.running_router import running_router, script_of

SCRIPT = script_of("The quick brown fox jumps over the lazy dog.")


@pytest.fixture(scope="module")
def authority():
    return Authority()


@pytest.fixture(scope="module")
def revoked(authority):
    return authority.issue("revoked")


@pytest.fixture(scope="module")
def clients(authority, revoked, tmp_path_factory):
    """How clients with different certificates call the router, by name."""
    folder = tmp_path_factory.mktemp("clients")
    leaves = {
        "good": authority.issue("good"),
        "missing": None,
        "expired": authority.issue("expired", expires_in=timedelta(days=-1)),
        "foreign": Authority().issue("foreign"),
        "revoked": revoked,
    }
    files = {
        name: write_files(folder / name, leaf, authority.certificate)
        for name, leaf in leaves.items()
    }
    return {
        name: ClientTls(
            ssl_ca_certs=one.ca_certs, ssl_certfile=one.certfile, ssl_keyfile=one.keyfile
        )
        for name, one in files.items()
    }


def tls_config(files, cert_reqs):
    return RouterSecurityConfig(
        clients=ClientTlsConfig(
            certfile=files.certfile,
            keyfile=files.keyfile,
            ca_certs=files.ca_certs,
            crlfile=files.crlfile,
            ssl_cert_reqs=cert_reqs,
        ),
        workers=WorkerTlsConfig(cluster_ssl_ca_certs=PLAIN_CALLS),
    )


@asynccontextmanager
async def running(folder, authority, cert_reqs="none", crl=None, **http):
    """Yields a router with TLS on both ports."""
    files = write_files(folder, authority.issue("router"), authority.certificate, crl)
    async with running_workers(worker := FakeDecode(SCRIPT)):
        security = tls_config(files, cert_reqs)
        config = HttpConfig(**http)
        async with running_router(worker, security=security, http=config) as router:
            yield router


async def http_answers(router, tls):
    """Whether the HTTP port answers a client."""
    url = f"https://{router.service.http.address}"
    try:
        async with httpx2.AsyncClient(base_url=url, verify=tls.http_context()) as client:
            return (await client.get("/ready")).status_code == 200
    except httpx2.TransportError:
        return False


async def grpc_answers(router, tls):
    """Whether a method of the gRPC port answers a client."""
    async with AsyncClient(router.server.address, model=MODEL, **tls.options) as client:
        try:
            return (await client.get_model(timeout_s=10)).name == MODEL
        except (UnavailableError, UnauthenticatedError):
            return False


@pytest.mark.parametrize(
    ("cert_reqs", "over_http", "over_grpc"),
    [
        ("required", {"good"}, {"good"}),
        ("optional", {"good", "missing"}, {"good", "missing", "expired", "foreign", "revoked"}),
        ("none", {"good", "missing", "expired", "foreign", "revoked"}, None),
    ],
)
async def test_certificates_decide_which_clients_get_answers(
    tmp_path, authority, revoked, clients, cert_reqs, over_http, over_grpc
):
    crl = authority.revoke(revoked)
    async with running(tmp_path, authority, cert_reqs, crl) as router:
        found = {name for name, tls in clients.items() if await http_answers(router, tls)}
        assert found == over_http
        found = {name for name, tls in clients.items() if await grpc_answers(router, tls)}
        assert found == (over_grpc or over_http)


async def test_plain_clients_get_no_answer_and_clients_refuse_foreign_routers(
    tmp_path, authority, clients
):
    stranger = write_files(tmp_path / "stranger", ca_certs=Authority().certificate)
    distrusting = ClientTls(ssl_ca_certs=stranger.ca_certs)
    async with running(tmp_path, authority) as router:
        assert not await http_answers(router, distrusting)
        assert not await grpc_answers(router, distrusting)
        assert not await grpc_answers(router, ClientTls())
        with pytest.raises(httpx2.TransportError):
            async with httpx2.AsyncClient(trust_env=False, verify=False) as client:
                await client.get(f"http://{router.service.http.address}/ready")
        assert await http_answers(router, clients["missing"])


async def test_the_packages_own_clients_reach_a_router_with_tls(tmp_path, authority, clients):
    tls = clients["good"]
    async with running(tmp_path, authority, "required") as router:
        address = router.server.address

        def complete():
            with Client(address, model=MODEL, **tls.options) as client:
                texts = [client.generate([5, 6], {"max_tokens": 4}, timeout_s=20).text]
                texts += ["".join(c.text for c in client.stream([5, 6], {"max_tokens": 4}))]
            url = f"https://{router.service.http.address}"
            with OpenAiEndpoint(url, tls=tls) as endpoint:
                body = {"prompt": [5, 6], "max_tokens": 4}
                events = endpoint.stream("/completions", body)
                return [*texts, "".join(event["choices"][0]["text"] for event in events)]

        text, *others = await asyncio.to_thread(complete)
        assert text
        assert others == [text, text]
        await wait_until_serving(address, 30, lambda: tls)
        assert await check_health(address) == "UNAVAILABLE"
        await wait_until_ready(router.service.http.address, 10, tls)


async def test_a_pinned_certificate_is_trusted_under_any_address(tmp_path, authority):
    leaf = authority.issue("router", dns=["*.example.com"], addresses=[])
    files = write_files(tmp_path / "router", leaf)
    other = write_files(tmp_path / "other", authority.issue("other"))
    async with running_workers(worker := FakeDecode(SCRIPT)):
        security = tls_config(files, "none")
        async with running_router(worker, security=security, http=HttpConfig()) as router:
            pinned, wrong = ClientTls.pinned(files.certfile), ClientTls.pinned(other.certfile)
            await wait_until_serving(router.server.address, 30, lambda: pinned)
            assert await http_answers(router, pinned)
            assert await check_health(router.server.address, tls=wrong) == "UNAVAILABLE"
            assert not await http_answers(router, wrong)


async def shown_by_http(router, authority):
    """The certificate that the HTTP port shows to a new connection, as PEM."""
    context = ssl.create_default_context(cadata=authority.certificate.decode())
    host, _, port = router.service.http.address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return ssl.DER_cert_to_PEM_cert(der).encode()


async def test_new_certificates_are_shown_without_a_restart(tmp_path, authority, caplog):
    async with running(tmp_path, authority) as router:
        first = (tmp_path / "cert.pem").read_bytes()
        trusting = ClientTls(ssl_ca_certs=str(tmp_path / "ca.pem"))
        url = f"https://{router.service.http.address}"
        async with httpx2.AsyncClient(base_url=url, verify=trusting.http_context()) as client:
            assert (await client.get("/ready")).status_code == 200
            second = authority.issue("router")
            (tmp_path / "cert.pem").write_bytes(second.certificate)
            assert await shown_by_http(router, authority) == first  # the key does not fit yet
            assert "the last good certificates stay in use: --ssl-keyfile" in caplog.text
            (tmp_path / "key.pem").write_bytes(second.key)
            assert await shown_by_http(router, authority) == second.certificate
            assert await grpc_answers(router, ClientTls.pinned(str(tmp_path / "cert.pem")))
            (tmp_path / "cert.pem").unlink()
            assert await shown_by_http(router, authority) == second.certificate
            assert (await client.get("/ready")).status_code == 200


@pytest.mark.parametrize("port", ["http", "grpc"])
async def test_a_client_that_is_revoked_later_is_refused(
    tmp_path, authority, revoked, clients, port
):
    answers = {"http": http_answers, "grpc": grpc_answers}[port]
    crl = authority.revoke(authority.issue("another"))
    async with running(tmp_path, authority, "required", crl) as router:
        assert await answers(router, clients["revoked"])
        (tmp_path / "crl.pem").write_bytes(authority.revoke(revoked))
        assert not await answers(router, clients["revoked"])
        assert await answers(router, clients["good"])


async def test_a_client_that_does_not_finish_the_handshake_is_cut_off(tmp_path, authority):
    async with running(tmp_path, authority, header_timeout_s=0.2) as router:
        host, _, port = router.service.http.address.rpartition(":")
        start = time.monotonic()
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        assert time.monotonic() - start >= 0.2
        writer.close()


def test_files_that_openssl_refuses_are_an_error_that_names_the_flag(tmp_path, authority):
    files = write_files(tmp_path, authority.issue(), authority.certificate)
    with pytest.raises(ConfigurationError, match=r"--ssl-cert-reqs is required; .* --ssl-ca-certs"):
        RouterSecurityConfig(
            clients=ClientTlsConfig(
                certfile=files.certfile, keyfile=files.keyfile, ssl_cert_reqs="required"
            )
        )
    with pytest.raises(ConfigurationError, match="--ssl-certfile is set and --ssl-keyfile is not"):
        ClientTlsConfig(certfile=files.certfile)
    with pytest.raises(ConfigurationError, match=r"--ssl-certfile .*nothing\.pem"):
        ClientTls.pinned(str(tmp_path / "nothing.pem"))
