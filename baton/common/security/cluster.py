"""`ClusterSecurity`: the credentials that the processes of a cluster show each other.

The router and the workers of both tiers call each other with two kinds of credentials, alone or
together: a token, which all of them share, and certificates that a CA of the cluster signed. A
worker's port is closed to callers without them, health excepted.
"""

import ipaddress
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from typing_extensions import override

from baton.common.errors import ConfigurationError
from baton.common.file_access import reason_of
from baton.common.security.config import CertificateFiles, CredentialsConfig
from baton.common.security.tokens import bearer, carries_token, checked_token, watched_tokens

if TYPE_CHECKING:
    from baton.common.security.certificates import Certificates

__all__ = ["TOKEN_VARIABLE", "ClusterSecurity", "is_loopback"]

TOKEN_VARIABLE = "BATON_CLUSTER_TOKEN"  # noqa: S105 - a name, not a token
_AUTHORIZATION = "authorization"

Metadata = Iterable[tuple[str, str | bytes]]
AuthContext = Mapping[str, Sequence[bytes]]


class ClusterSecurity:
    """The credentials that a process shows to the others of its cluster and asks of them.

    Any thread may use it. Files are read again when they change. It is pickled as its arguments, so
    a process that receives it reads the files itself.

    Args:
        config: the token and the names.
        files: the certificates for calls between processes; None for calls without TLS.
        token: a token, such as that of the variable BATON_CLUSTER_TOKEN.

    Attributes:
        certificates: those for calls between processes; None without TLS.
        server_name: the name that every worker's certificate has; None for their addresses.

    Raises:
        ConfigurationError: a file cannot be read, or is bad; names the flag.
    """

    def __init__(
        self,
        config: CredentialsConfig | None = None,
        files: CertificateFiles | None = None,
        token: str | None = None,
    ) -> None:
        self._arguments = config, files, token
        config = config or CredentialsConfig()
        tokens = (checked_token(token, TOKEN_VARIABLE),) if token else ()
        self._read_tokens: Callable[[], tuple[str, ...]] = lambda: tokens
        if config.token_file is not None:
            path = config.token_file
            _make_token_file(Path(path))
            self._read_tokens = watched_tokens("--cluster-token-file", path)
        self._identities = frozenset(config.identities)
        self.server_name = config.server_name
        self.certificates = _open_certificates(files)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def without_token_file(self) -> "ClusterSecurity":
        """Returns the same with the present token instead of its file, for another machine."""
        config, files, _ = self._arguments
        if config is not None:
            config = replace(config, token_file=None)
        return ClusterSecurity(config, files, self.token)

    @classmethod
    def from_environment(
        cls, config: CredentialsConfig, files: CertificateFiles | None = None
    ) -> "ClusterSecurity":
        """The security that flags and the variable BATON_CLUSTER_TOKEN describe."""
        return cls(config, files, os.environ.get(TOKEN_VARIABLE))

    @property
    def token(self) -> str | None:
        """The token that this process sends; None without one."""
        return next(iter(self._read_tokens()), None)

    @property
    def has_token(self) -> bool:
        """Whether the cluster has a token."""
        return bool(self._read_tokens())

    def admits_header(self, header: str | bytes) -> bool:
        """Whether an authorization header carries the cluster's token."""
        return carries_token(header, self._read_tokens())

    @property
    def verifies_callers(self) -> bool:
        """Whether callers need a credential: a token, or a certificate that a CA signed."""
        return self.has_token or self._verifies_certificates

    @property
    def _verifies_certificates(self) -> bool:
        return self.certificates is not None and self.certificates.files.ca_certs is not None

    def guards(self, host: str) -> bool:
        """Whether no others can call a port: they need a credential, or cannot reach the address.

        Args:
            host: the address on which the port listens.
        """
        return self.verifies_callers or is_loopback(host)

    def check_host(self, flag: str, host: str) -> None:
        """Refuses an address to listen on that others can reach while they need no credential.

        Args:
            flag: what names the address in the error.
            host: the address.

        Raises:
            ConfigurationError: names the flag, and those of the credentials.
        """
        if not self.guards(host):
            raise ConfigurationError(
                f"{flag} is {host}, where other machines may call this process without a "
                "credential; set --cluster-token-file or BATON_CLUSTER_TOKEN, or --ssl-ca-certs "
                "with a certificate of its own"
            )

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Credentials of a port for other processes of the cluster; None for one without TLS.

        Raises:
            ConfigurationError: callers need a certificate, which they show over TLS alone, and
                there is none for this port; names the flags.
        """
        if self.certificates is None:
            return None
        files = self.certificates.files
        if files.certfile is None:
            raise ConfigurationError(
                f"{files.prefix}ca-certs is set; a worker that asks for certificates needs "
                f"{files.prefix}certfile and {files.prefix}keyfile, too"
            )
        return self.certificates.server_credentials(verifies_clients=self._verifies_certificates)

    @property
    def certificates_version(self) -> int:
        """Changes when the certificates do: a channel has those with which it was opened."""
        return 0 if self.certificates is None else self.certificates.version

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials of a channel to another process; None for one without TLS."""
        if not self._verifies_certificates or self.certificates is None:
            return None
        return self.certificates.channel_credentials()

    def channel_options(self, host: str | None = None) -> Sequence[tuple[str, str]]:
        """Options of a channel to another process.

        Args:
            host: the name by which the process is called, if its address is not that name.
        """
        name = self.server_name or host
        if name is None or not self._verifies_certificates:
            return ()
        return (("grpc.ssl_target_name_override", name),)

    def call_metadata(self) -> Sequence[tuple[str, str]]:
        """The metadata of a call to another process."""
        token = self.token
        return () if token is None else ((_AUTHORIZATION, bearer(token)),)

    def admits(self, metadata: Metadata, auth_context: AuthContext) -> bool:
        """Whether a caller belongs to the cluster: it has the token if there is one, and a
        certificate with an accepted name if those are verified.

        Args:
            metadata: of the call.
            auth_context: of the connection, as gRPC gives it.
        """
        has_token = self.carries_token(metadata) or not self.has_token
        return has_token and self._has_certificate(auth_context)

    def carries_token(self, metadata: Metadata) -> bool:
        """Whether a call's metadata carries the cluster's token."""
        return self.admits_header(
            next((value for name, value in metadata if name == _AUTHORIZATION), "")
        )

    def _has_certificate(self, auth_context: AuthContext) -> bool:
        if not self._verifies_certificates or self.certificates is None:
            return True
        pems = auth_context.get("x509_pem_cert", ())
        if not pems or any(self.certificates.is_revoked(pem) for pem in pems):
            return False
        if not self._identities:
            return True
        names = ("x509_subject_alternative_name", "x509_common_name")
        of_caller = {
            name.decode(errors="replace") for key in names for name in auth_context.get(key, ())
        }
        return not self._identities.isdisjoint(of_caller)


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from its own machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _open_certificates(files: CertificateFiles | None) -> "Certificates | None":
    if files is None or not files.paths:
        return None
    # Imported here: it needs the package cryptography, and a process without TLS does not.
    from baton.common.security.certificates import Certificates

    return Certificates(files)


def _make_token_file(path: Path) -> None:
    """Makes a file with a new token, unless there is one. Several processes may do so at once."""
    try:
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Not named by the process's id: in containers that share a volume, ids are the same.
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass  # another process was faster
        finally:
            Path(temporary).unlink()
    except OSError as error:
        raise ConfigurationError(
            f"--cluster-token-file {path}: it cannot be made: {reason_of(error)}"
        ) from None
