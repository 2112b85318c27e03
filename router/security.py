"""`RouterSecurity`: the router's certificates and credentials, towards clients and workers."""

import ssl
from typing import Any

from baton.errors import PermissionDeniedError, UnauthenticatedError
from baton.security.certificates import Certificates
from baton.security.cluster import ClusterSecurity
from router.security_config import RouterSecurityConfig
from rpc.cluster_calls import authorize_cluster
from rpc.interceptors import Authorize
from rpc.server import ServerAccess

__all__ = ["RouterSecurity"]

_OPERATORS_SERVICE = "/baton.v1.ClusterService/"


class RouterSecurity:
    """The router's certificates and credentials, read from files and the environment.

    Args:
        config: the paths.

    Attributes:
        cluster: for calls to workers.
        certificates: for the router's own ports; None without TLS.

    Raises:
        ConfigurationError: a file cannot be read, or is bad; names the flag.
    """

    def __init__(self, config: RouterSecurityConfig) -> None:
        files = config.clients.files
        self.certificates = Certificates(files) if files.certfile is not None else None
        self.cluster = ClusterSecurity.from_environment(config.cluster, config.worker_files)
        self._verify_mode = config.clients.verify_mode

    def grpc_access(self, host: str, authorize: Authorize | None = None) -> ServerAccess:
        """How the gRPC port is encrypted, and who may call it.

        Args:
            host: the address on which it listens.
            authorize: finds out who calls as a client, of those whose certificate is not revoked.
        """
        authorize = _operators_apart(self.cluster, host, authorize)
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


def _operators_apart(cluster: ClusterSecurity, host: str, authorize: Authorize | None) -> Authorize:
    """Returns an `Authorize` that lets only operators, who have the cluster's credential, call
    ClusterService.
    """
    authorize_operator = authorize_cluster(cluster)

    def authorize_any(method: str, context: Any) -> object:
        if not method.startswith(_OPERATORS_SERVICE):
            return None if authorize is None else authorize(method, context)
        if not cluster.guards(host):
            raise PermissionDeniedError(
                "this router has no credential for operators: set --cluster-token-file, or listen "
                "on a loopback address"
            )
        return authorize_operator(method, context)

    return authorize_any


def _not_revoked(certificates: Certificates, authorize: Authorize | None) -> Authorize:
    """Returns an `Authorize` that refuses revoked certificates, which gRPC itself does not."""

    def authorize_if_not_revoked(method: str, context: Any) -> object:
        pems = context.auth_context().get("x509_pem_cert", ())
        if any(certificates.is_revoked(pem) for pem in pems):
            raise UnauthenticatedError("the certificate of the caller is revoked")
        return None if authorize is None else authorize(method, context)

    return authorize_if_not_revoked
