"""`RouterSecurity`: the router's certificates and credentials, towards clients and workers."""

import ssl
from collections.abc import Sequence
from typing import Any

from baton.common.errors import PermissionDeniedError, UnauthenticatedError
from baton.common.security.certificates import Certificates
from baton.common.security.cluster import ClusterSecurity, is_loopback
from router.config.security import RouterSecurityConfig
from router.processes.counts import Accounts
from router.tenants.tenant import CountRefusal, Tenant, count_nothing
from router.tenants.tenants import Tenants, credentials_of
from rpc.interceptors import Authorize
from rpc.server_access import ServerAccess, authorize_cluster

__all__ = ["RouterSecurity", "authorize_tenants"]

_CLUSTER_SERVICES = ("/baton.v1.ClusterService/", "/baton.v1.RegistrationService/")
"""Services for operators, and for workers that announce themselves."""
_NO_CREDENTIAL = "the call lacks a valid credential of this cluster"
_NO_OPERATORS = (
    "this router has no credential for operators and workers: set --cluster-token-file, or "
    "listen on a loopback address without keys for clients"
)


class RouterSecurity:
    """The router's certificates and credentials, read from files and the environment.

    Args:
        config: the paths.
        count_refusal: called with each call of a client that is refused.
        accounts: where the clients' use of their limits is counted; None for this process.

    Attributes:
        cluster: for calls to workers.
        tenants: the clients.
        certificates: for the router's own ports; None without TLS.

    Raises:
        ConfigurationError: a file cannot be read, or is bad; names the flag.
    """

    def __init__(
        self,
        config: RouterSecurityConfig,
        count_refusal: CountRefusal = count_nothing,
        accounts: Accounts | None = None,
    ) -> None:
        files = config.clients
        self.certificates = Certificates(files) if files.certfile is not None else None
        self.cluster = ClusterSecurity.from_environment(config.cluster, config.worker_files)
        self.tenants = Tenants(config.tenants, count_refusal=count_refusal, accounts=accounts)
        self._verify_mode = config.clients.verify_mode
        cas = {None if one is None else one.ca_certs for one in (files, config.worker_files)}
        self._is_one_ca = len(cas) == 1 and cas != {None}

    def grpc_access(self, host: str) -> ServerAccess:
        """How the gRPC port is encrypted, and who may call it.

        Args:
            host: the address on which it listens.
        """
        is_required = self._verify_mode == ssl.CERT_REQUIRED
        authorize = _operators_apart(
            self._authorize_operator(host, verifies_certificates=is_required),
            authorize_tenants(self.tenants),
        )
        return self._access(authorize)

    def proxy_access(self) -> ServerAccess:
        """The same for a port on which proxies ask: they show no credential but a certificate, if
        the router wants one of its clients.
        """
        return self._access(_authorize_all)

    def _access(self, authorize: Authorize) -> ServerAccess:
        if self.certificates is None:
            return ServerAccess(authorize=authorize)
        is_required = self._verify_mode == ssl.CERT_REQUIRED
        return ServerAccess(
            authorize=_not_revoked(self.certificates, authorize) if is_required else authorize,
            credentials=self.certificates.server_credentials(verifies_clients=is_required),
        )

    def http_context(self) -> ssl.SSLContext | None:
        """The TLS context of the HTTP port; None for plain text."""
        if self.certificates is None:
            return None
        return self.certificates.server_context(verify_mode=self._verify_mode)

    def check_operator(self, host: str, header: str | None, asked_host: str) -> None:
        """Admits a caller of the HTTP port to what operators see. It has the cluster's token; if
        there is none, it is on the same machine, where clients need no credential either. A
        certificate does not make an operator here: requests over HTTP do not tell its names.

        Without a token it must ask for a loopback address by name: a page of another site whose
        name leads to this machine (DNS rebinding), and a proxy's client, ask for another name.

        Args:
            host: the address on which the port listens.
            header: the authorization header.
            asked_host: the header Host.

        Raises:
            UnauthenticatedError: the header lacks the token.
            PermissionDeniedError: there is no token, and others can reach the port.
        """
        if self.cluster.has_token:
            if not self.cluster.admits_header(header or ""):
                raise UnauthenticatedError(_NO_CREDENTIAL)
        elif not self._is_open(host) or not is_loopback(_without_port(asked_host)):
            raise PermissionDeniedError(_NO_OPERATORS)

    def _is_open(self, host: str) -> bool:
        """Whether a port can be called from its own machine alone, where nobody needs a credential.

        Args:
            host: the address on which it listens.
        """
        is_required = self._verify_mode == ssl.CERT_REQUIRED
        return is_loopback(host) and self.tenants.is_open and not is_required

    def _authorize_operator(self, host: str, *, verifies_certificates: bool) -> Authorize:
        """Returns an `Authorize` for `_CLUSTER_SERVICES`. Callers have the cluster's token. Without
        one, they have a certificate of the cluster, which the port distinguishes from a client's if
        both have the same CA; or they are on the same machine, where clients need no key either.
        """
        if self.cluster.has_token:
            return _authorize_token(self.cluster)
        if verifies_certificates and self._is_one_ca:
            return authorize_cluster(self.cluster)
        if self._is_open(host):
            return _authorize_all
        return _refuse_all


def _without_port(host: str) -> str:
    """Returns the name or the address in a header Host."""
    name, _, port = host.lower().rpartition(":")
    return (name if name and port.isdigit() else host.lower()).strip("[]")


def _operators_apart(authorize_operator: Authorize, authorize: Authorize) -> Authorize:
    """Returns an `Authorize` that asks callers of `_CLUSTER_SERVICES` for another credential."""

    def authorize_any(method: str, context: Any) -> object:
        is_operator = method.startswith(_CLUSTER_SERVICES)
        return (authorize_operator if is_operator else authorize)(method, context)

    return authorize_any


def _authorize_token(cluster: ClusterSecurity) -> Authorize:
    def authorize(method: str, context: Any) -> None:
        if not cluster.carries_token(context.invocation_metadata() or ()):
            raise UnauthenticatedError(_NO_CREDENTIAL)

    return authorize


def _authorize_all(method: str, context: Any) -> None:
    pass


def _refuse_all(method: str, context: Any) -> None:
    raise PermissionDeniedError(_NO_OPERATORS)


def authorize_tenants(tenants: Tenants) -> Authorize:
    """Returns an `Authorize` that finds a call's tenant, for which the call counts as running."""

    def authorize(method: str, context: Any) -> Tenant:
        tenant = tenants.find(_credentials_of(context))
        running = tenant.running()
        running.__enter__()
        context.add_done_callback(lambda _: running.__exit__(None, None, None))
        return tenant

    return authorize


def _credentials_of(context: Any) -> Sequence[str]:
    """The credentials in a call's metadata."""
    given: dict[str, str] = {}
    for name, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            given.setdefault(name, value)
    return credentials_of(given.get("authorization"), given.get("x-api-key"))


def _not_revoked(certificates: Certificates, authorize: Authorize) -> Authorize:
    """Returns an `Authorize` that refuses revoked certificates, which gRPC itself does not."""

    def authorize_if_not_revoked(method: str, context: Any) -> object:
        pems = context.auth_context().get("x509_pem_cert", ())
        if any(certificates.is_revoked(pem) for pem in pems):
            raise UnauthenticatedError("the certificate of the caller is revoked")
        return authorize(method, context)

    return authorize_if_not_revoked
