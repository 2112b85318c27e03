"""`ClientTls`: how a client verifies a server, and what it shows to it."""

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import grpc
from cryptography import x509

from baton.common.errors import ConfigurationError
from baton.common.flags.config_flags import flag
from baton.common.security.certificates import Certificates
from baton.common.security.config import CertificateFiles
from baton.common.security.tokens import bearer

__all__ = ["ClientTls", "TlsOptions", "key_metadata"]


class TlsOptions(TypedDict, total=False):
    """Keyword arguments of `ClientTls`, which documents them."""

    ssl_ca_certs: str | None
    ssl_certfile: str | None
    ssl_keyfile: str | None
    ssl_server_name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """The files by which a client calls a server with TLS; without any it calls in plain text.

    Attributes:
        is_pinned: trusts exactly the certificates of `ssl_ca_certs`, under any address.

    Raises:
        ConfigurationError: a file is missing; names the flag.
    """

    ssl_ca_certs: str | None = flag(
        None, "PEM file of the CAs that sign the server's certificate", metavar="FILE"
    )
    ssl_certfile: str | None = flag(
        None, "PEM file of this client's certificate, for servers that ask for one", metavar="FILE"
    )
    ssl_keyfile: str | None = flag(
        None, "PEM file of that certificate's private key", metavar="FILE"
    )
    ssl_server_name: str | None = flag(
        None,
        "name that the server's certificate has (default: the host of its address)",
        metavar="NAME",
    )
    is_pinned: bool = False

    def __post_init__(self) -> None:
        _ = self._files  # refuses half of a pair

    @classmethod
    def pinned(cls, certfile: str) -> "ClientTls":
        """Trusts one certificate alone, such as that of a server on this machine.

        Raises:
            ConfigurationError: it cannot be read.
        """
        try:
            certificate = x509.load_pem_x509_certificates(Path(certfile).read_bytes())[0]
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"--ssl-certfile {certfile}: {error}") from None
        name = next(iter(_names(certificate)), None)
        return cls(ssl_ca_certs=certfile, ssl_server_name=name, is_pinned=True)

    @property
    def options(self) -> TlsOptions:
        """The files, as keyword arguments of a client."""
        return {
            "ssl_ca_certs": self.ssl_ca_certs,
            "ssl_certfile": self.ssl_certfile,
            "ssl_keyfile": self.ssl_keyfile,
            "ssl_server_name": self.ssl_server_name,
        }

    @property
    def is_on(self) -> bool:
        """Whether calls have TLS."""
        return bool(self._files.paths)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials of a gRPC channel; None for plain text. Without CAs, gRPC's own are trusted.

        Raises:
            ConfigurationError: a file cannot be read, or is bad; names the flag.
        """
        return Certificates(self._files).channel_credentials() if self.is_on else None

    def channel_options(self) -> Sequence[tuple[str, Any]]:
        """Options of a gRPC channel."""
        if self.ssl_server_name is None or not self.is_on:
            return ()
        return (("grpc.ssl_target_name_override", self.ssl_server_name),)

    def http_context(self) -> ssl.SSLContext | None:
        """The context of an HTTPS client, for the host of its URL; None to leave all to the client.
        Without CAs, those of the system are trusted.

        Raises:
            ConfigurationError: a file cannot be read, or is bad; names the flags.
        """
        if not self.is_on:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ssl_ca_certs)
            if self.ssl_certfile is not None:
                context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
        except OSError as error:
            flags = ", ".join(f"{name} {path}" for name, path in self._files.paths)
            raise ConfigurationError(f"{flags}: {error}") from None
        if self.is_pinned:
            context.check_hostname = False
            context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
        return context

    @property
    def _files(self) -> CertificateFiles:
        return CertificateFiles(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)


def key_metadata(
    key: str | None, flag_name: str = "--api-key"
) -> tuple[tuple[str, str | bytes], ...]:
    """Returns the metadata of a call with a key; none without one.

    Raises:
        ConfigurationError: no header can hold the key.
    """
    if not key:
        return ()
    if not (key.isascii() and key.isprintable()):
        raise ConfigurationError("--api-key has characters that no header can hold")
    return (("authorization", bearer(key)),)


def _names(certificate: x509.Certificate) -> Sequence[str]:
    """The names and addresses of a certificate; a wildcard's star becomes a name."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    dns = [name.replace("*", "any") for name in names.get_values_for_type(x509.DNSName)]
    return [*dns, *map(str, names.get_values_for_type(x509.IPAddress))]
