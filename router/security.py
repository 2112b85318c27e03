"""`RouterSecurity`: the router's certificates and credentials, towards clients and workers."""

import ssl
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from baton.errors import PermissionDeniedError, UnauthenticatedError
from baton.security.certificates import Certificates
from baton.security.cluster import ClusterSecurity
from router.security_config import RouterSecurityConfig
from router.tenants.tenant import CountRefusal, Tenant, count_nothing
from router.tenants.tenants import Tenants, credentials_of
from rpc.cluster_calls import authorize_cluster
from rpc.interceptors import Authorize
from rpc.server import ServerAccess

__all__ = ["RouterSecurity", "authorize_tenants"]

_OPERATORS_SERVICE = "/baton.v1.ClusterService/"


class RouterSecurity:
    """The router's certificates and credentials, read from files and the environment.

    Args:
        config: the paths.
        count_refusal: called with each call of a client that is refused.

    Attributes:
        cluster: for calls to workers.
        tenants: the clients.
        certificates: for the router's own ports; None without TLS.

    Raises:
        ConfigurationError: a file cannot be read, or is bad; names the flag.
    """

    def __init__(
        self, config: RouterSecurityConfig, count_refusal: CountRefusal = count_nothing
    ) -> None:
        files = config.clients.files
        self.certificates = Certificates(files) if files.certfile is not None else None
        self.cluster = ClusterSecurity.from_environment(config.cluster, config.worker_files)
        self.tenants = Tenants(config.tenants, count_refusal=count_refusal)
        self._verify_mode = config.clients.verify_mode

    def grpc_access(self, host: str) -> ServerAccess:
        """How the gRPC port is encrypted, and who may call it.

        Args:
            host: the address on which it listens.
        """
        authorize = _operators_apart(self.cluster, host, authorize_tenants(self.tenants))
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


def _operators_apart(cluster: ClusterSecurity, host: str, authorize: Authorize) -> Authorize:
    """Returns an `Authorize` that lets operators, who have the cluster's credential, and no others
    call ClusterService.
    """
    authorize_operator = authorize_cluster(cluster)

    def authorize_any(method: str, context: Any) -> object:
        if not method.startswith(_OPERATORS_SERVICE):
            return authorize(method, context)
        if not cluster.guards(host):
            raise PermissionDeniedError(
                "this router has no credential for operators: set --cluster-token-file, or listen "
                "on a loopback address"
            )
        return authorize_operator(method, context)

    return authorize_any


def authorize_tenants(tenants: Tenants) -> Authorize:
    """Returns an `Authorize` that finds a call's tenant, for which the call counts as running."""

    def authorize(method: str, context: Any) -> Tenant:
        tenant = tenants.find(_credentials_of(context))
        running = ExitStack()
        running.enter_context(tenant.running())
        context.add_done_callback(lambda _: running.close())
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
