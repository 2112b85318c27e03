"""Certificate authorities for tests, the certificates that they sign, and their CRLs."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from baton.common.security.config import CertificateFiles

__all__ = ["Authority", "Leaf", "write_files"]

_DAY = timedelta(days=1)
_PEM = serialization.Encoding.PEM


@dataclass(frozen=True, slots=True)
class Leaf:
    """A certificate that an authority signed, and its key.

    Attributes:
        certificate: PEM.
        key: PEM.
        serial_number: the number by which it is revoked.
    """

    certificate: bytes
    key: bytes
    serial_number: int


class Authority:
    """A certificate authority.

    Args:
        name: its common name.
    """

    def __init__(self, name: str = "test authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(name, _name(name), self._key.public_key(), 9 * _DAY)
        builder = builder.add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        builder = builder.add_extension(_AUTHORITY_USAGE, critical=True)
        self._certificate = builder.sign(self._key, hashes.SHA256())

    @property
    def certificate(self) -> bytes:
        """Its own certificate, PEM."""
        return self._certificate.public_bytes(_PEM)

    def issue(
        self,
        name: str = "test process",
        *,
        dns: Sequence[str] = ("localhost", "baton"),
        addresses: Sequence[str] = ("127.0.0.1",),
        expires_in: timedelta = 5 * _DAY,
    ) -> Leaf:
        """Signs a certificate for a new key.

        Args:
            name: its common name.
            dns: its DNS names.
            addresses: its IP addresses.
            expires_in: how long it is valid from now; negative for an expired one.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.DNSName(text) for text in dns]
        names += [x509.IPAddress(ipaddress.ip_address(text)) for text in addresses]
        builder = _builder(name, self._certificate.subject, key.public_key(), expires_in)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        own_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = builder.add_extension(own_id, critical=False).sign(self._key, hashes.SHA256())
        return Leaf(certificate.public_bytes(_PEM), _key_pem(key), certificate.serial_number)

    def revoke(self, *leaves: Leaf) -> bytes:
        """A list of revoked certificates, PEM."""
        now = datetime.now(UTC)
        builder = x509.CertificateRevocationListBuilder(
            issuer_name=self._certificate.subject, last_update=now - _DAY, next_update=now + _DAY
        )
        for leaf in leaves:
            revoked = x509.RevokedCertificateBuilder(leaf.serial_number, now - _DAY)
            builder = builder.add_revoked_certificate(revoked.build())
        return builder.sign(self._key, hashes.SHA256()).public_bytes(_PEM)


def write_files(
    folder: Path,
    leaf: Leaf | None = None,
    ca_certs: bytes | None = None,
    crl: bytes | None = None,
    *,
    prefix: str = "--ssl-",
) -> CertificateFiles:
    """Writes PEM files, which replace those of an earlier call.

    Args:
        folder: made if it does not exist.
        leaf: a process's own certificate and key.
        ca_certs: certificates of the authorities that it trusts.
        crl: the certificates that these have revoked.
        prefix: of the flags that name the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return CertificateFiles(
        certfile=_written(folder / "cert.pem", leaf and leaf.certificate),
        keyfile=_written(folder / "key.pem", leaf and leaf.key),
        ca_certs=_written(folder / "ca.pem", ca_certs),
        crlfile=_written(folder / "crl.pem", crl),
        prefix=prefix,
    )


_AUTHORITY_USAGE = x509.KeyUsage(
    digital_signature=True,
    key_cert_sign=True,
    crl_sign=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    encipher_only=False,
    decipher_only=False,
)


def _builder(
    name: str, issuer: x509.Name, key: ec.EllipticCurvePublicKey, expires_in: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    expires = now + expires_in
    return x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=_name(name),
        public_key=key,
        serial_number=x509.random_serial_number(),
        not_valid_before=min(now, expires) - _DAY,
        not_valid_after=expires,
    ).add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _written(path: Path, content: bytes | None) -> str | None:
    """Replaces a file in one piece; returns its path, or None without content."""
    if content is None:
        return None
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)
    return str(path)
