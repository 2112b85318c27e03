"""`Certificates`: a process's certificate, its key and its CAs, read again when files change."""

import logging
import re
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from baton.common.errors import ConfigurationError
from baton.common.file_access import reason_of
from baton.common.security.config import CertificateFiles
from baton.common.security.watched_files import WatchedFiles

__all__ = ["Certificates"]

_LOGGER = logging.getLogger("baton.security")
_CRL = re.compile(rb"-----BEGIN X509 CRL-----.+?-----END X509 CRL-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The files' contents at one time.

    Attributes:
        chain: the process's certificate chain, PEM; None if it has none.
        key: its private key, PEM.
        cas: CAs, PEM.
        revoked: serial numbers, each with the name of the CA that revoked it, in DER.
        expires: when the process's certificate expires.
    """

    chain: bytes | None
    key: bytes | None
    cas: bytes | None
    revoked: frozenset[tuple[bytes, int]]
    expires: datetime | None


class Certificates:
    """Serves the current contents of certificate files. Any thread may use it.

    A process keeps its last good certificates while new files are unreadable or do not fit each
    other, which a warning reports: files that are replaced one after the other do not fit for a
    moment.

    Args:
        files: the paths.

    Raises:
        ConfigurationError: a file cannot be read or is not what its flag says; names the flag.
    """

    def __init__(self, files: CertificateFiles) -> None:
        self.files = files
        paths = [path for _, path in files.paths]
        self._watched = WatchedFiles(paths, partial(_load, files), "certificates")
        self._lock = threading.Lock()  # guards the three below
        self._context: ssl.SSLContext | None = None
        self._context_of: _Loaded | None = None
        self._failed: _Loaded | None = None

    @property
    def expires(self) -> datetime | None:
        """When the process's own certificate expires; None if it has none."""
        return self._watched.current().expires

    @property
    def version(self) -> int:
        """How often the files were read again with success; reads them if they have changed."""
        self._watched.current()
        return self._watched.version

    def server_credentials(self, *, verifies_clients: bool) -> grpc.ServerCredentials:
        """Credentials of a gRPC server, which read changed files at each new connection.

        Args:
            verifies_clients: whether clients need a certificate that a CA of the files signed.
        """
        served = self._watched.current()

        def changed_configuration() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            before, served = served, self._watched.current()
            return None if served is before else _grpc_configuration(served)

        return grpc.dynamic_ssl_server_credentials(
            _grpc_configuration(served),
            changed_configuration,  # type: ignore[arg-type]  # the stubs lack None, "no change"
            verifies_clients,
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a gRPC channel, with the files' present contents."""
        loaded = self._watched.current()
        return grpc.ssl_channel_credentials(loaded.cas, loaded.key, loaded.chain)

    def server_context(self, *, verify_mode: ssl.VerifyMode) -> ssl.SSLContext:
        """The context of a TLS server, which reads changed files at each new connection.

        Args:
            verify_mode: whether clients may or must have a certificate.

        Raises:
            ConfigurationError: OpenSSL does not accept the files, for example a key that is short.
        """
        loaded = self._watched.current()
        try:
            context = self._make_context(loaded, verify_mode)
        except (OSError, ValueError) as error:
            flags = ", ".join(flag for flag, _ in self.files.paths)
            raise ConfigurationError(f"{flags}: {error}") from None
        context.sni_callback = self._refresh_connection
        self._context, self._context_of = context, loaded
        return context

    def is_revoked(self, certificate_pem: bytes) -> bool:
        """Whether the CRL lists a certificate."""
        revoked = self._watched.current().revoked
        if not revoked:
            return False
        return _issuer_and_number(certificate_pem) in revoked

    # Internals.

    def _refresh_connection(self, connection: Any, server_name: Any, context: Any) -> None:
        """Called by OpenSSL for each new connection: gives it the current certificates."""
        loaded = self._watched.current()
        with self._lock:
            if loaded is not self._context_of:
                self._renew_context(loaded, context.verify_mode)
            current = self._context
        connection.context = current

    def _renew_context(self, loaded: _Loaded, verify_mode: ssl.VerifyMode) -> None:
        try:
            self._context = self._make_context(loaded, verify_mode)
            self._context_of = loaded
        except (OSError, ValueError) as error:
            # The files changed since they were checked, or OpenSSL wants a longer key. The next
            # connection tries again.
            if loaded is not self._failed:
                _LOGGER.warning("the last good certificates stay in use: %s", error)
            self._failed = loaded

    def _make_context(self, loaded: _Loaded, verify_mode: ssl.VerifyMode) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.verify_mode = verify_mode
        if verify_mode != ssl.CERT_NONE:
            # A resumed session would not verify the client's certificate again. In TLS 1.2 it can
            # be resumed without a ticket, too.
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.num_tickets = 0
        assert self.files.certfile is not None, "a server has a certificate"
        context.load_cert_chain(self.files.certfile, self.files.keyfile)
        if loaded.cas is not None:
            context.load_verify_locations(cadata=loaded.cas.decode())
        if self.files.crlfile is not None:
            context.load_verify_locations(self.files.crlfile)
            context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
        return context


def _grpc_configuration(loaded: _Loaded) -> grpc.ServerCertificateConfiguration:
    assert loaded.key is not None, "a server has a certificate"
    assert loaded.chain is not None, "a server has a certificate"
    return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.chain)], loaded.cas)


def _load(files: CertificateFiles) -> _Loaded:
    texts = {flag.removeprefix(files.prefix): _read(flag, path) for flag, path in files.paths}
    chain, key, cas = texts.get("certfile"), texts.get("keyfile"), texts.get("ca-certs")
    expires = None
    if chain is not None and key is not None:
        expires = _check_pair(files, chain, key)
    authorities = _parse(f"{files.prefix}ca-certs", x509.load_pem_x509_certificates, cas)
    revoked = _revoked(files, texts.get("crlfile"), authorities or ())
    return _Loaded(chain, key, cas, revoked, expires)


def _check_pair(files: CertificateFiles, chain: bytes, key: bytes) -> datetime:
    """Checks that key and certificate belong together; returns when the latter expires."""
    certificates = _parse(f"{files.prefix}certfile", x509.load_pem_x509_certificates, chain)
    own_key = _parse(
        f"{files.prefix}keyfile", lambda pem: load_pem_private_key(pem, password=None), key
    )
    certificate = certificates[0]
    if certificate.public_key() != own_key.public_key():
        raise ConfigurationError(
            f"{files.prefix}keyfile is not the key of the certificate of {files.prefix}certfile"
        )
    expires: datetime = certificate.not_valid_after_utc
    if expires < datetime.now(UTC):
        _LOGGER.warning("the certificate of %scertfile expired on %s", files.prefix, expires)
    return expires


def _revoked(
    files: CertificateFiles, crl: bytes | None, authorities: Sequence[x509.Certificate]
) -> frozenset[tuple[bytes, int]]:
    flag = f"{files.prefix}crlfile"
    revoked: set[tuple[bytes, int]] = set()
    for revocations in _parse(flag, _load_crls, crl) or ():
        signers = [
            authority for authority in authorities if authority.subject == revocations.issuer
        ]
        if not any(revocations.is_signature_valid(authority.public_key()) for authority in signers):
            raise ConfigurationError(f"{flag} is signed by no CA of {files.prefix}ca-certs")
        issuer = revocations.issuer.public_bytes()
        revoked.update((issuer, entry.serial_number) for entry in revocations)
    return frozenset(revoked)


@lru_cache(maxsize=1024)
def _issuer_and_number(certificate_pem: bytes) -> tuple[bytes, int]:
    certificate = x509.load_pem_x509_certificate(certificate_pem)
    return certificate.issuer.public_bytes(), certificate.serial_number


def _load_crls(pem: bytes) -> Sequence[x509.CertificateRevocationList]:
    """Parses a file of one CRL per CA."""
    lists = [x509.load_pem_x509_crl(part) for part in _CRL.findall(pem)]
    if not lists:
        raise ValueError("it has no CRL")
    return lists


def _read(flag: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{flag} {path}: {reason_of(error)}") from None


def _parse(flag: str, parse: Any, pem: bytes | None) -> Any:
    """Returns a file's content, parsed by `parse`; None for None."""
    if pem is None:
        return None
    try:
        return parse(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigurationError(f"{flag}: not a PEM file of that kind: {error}") from None
