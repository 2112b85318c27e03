"""`Certificates`: files that change, do not fit, or are not what their flags say."""

import logging
import ssl
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from baton.common.errors import ConfigurationError
from baton.common.security.certificates import Certificates
from baton.common.security.config import CertificateFiles
from tests.support.certificates import Authority, write_files


@pytest.fixture(scope="module")
def authority():
    return Authority()


@pytest.fixture(scope="module")
def leaves(authority):
    return [authority.issue(f"leaf {i}", expires_in=timedelta(days=i + 1)) for i in range(2)]


def refresh(certificates):
    """Whether changed files are in use now."""
    before = certificates._watched.version
    return certificates.version != before


def days_left(certificates):
    return round((certificates.expires - datetime.now(UTC)) / timedelta(days=1))


def test_a_renewed_certificate_is_read_again(tmp_path, leaves):
    certificates = Certificates(write_files(tmp_path, leaves[0]))
    assert days_left(certificates) == 1
    assert not refresh(certificates)
    write_files(tmp_path, leaves[1])
    assert refresh(certificates)
    assert days_left(certificates) == 2
    assert not refresh(certificates)


def test_the_last_good_pair_stays_while_certificate_and_key_do_not_fit(tmp_path, leaves, caplog):
    certificates = Certificates(write_files(tmp_path, leaves[0]))
    (tmp_path / "cert.pem").write_bytes(leaves[1].certificate)
    assert not refresh(certificates)
    assert days_left(certificates) == 1
    assert "last good certificates stay in use: --ssl-keyfile is not the key" in caplog.text
    (tmp_path / "key.pem").write_bytes(leaves[1].key)
    assert refresh(certificates)
    assert days_left(certificates) == 2


@pytest.mark.parametrize("spoil", ["remove", "empty", "garbage"])
def test_the_last_good_files_stay_while_new_ones_are_unreadable(tmp_path, leaves, spoil, caplog):
    certificates = Certificates(write_files(tmp_path, leaves[0]))
    path = tmp_path / "cert.pem"
    if spoil == "remove":
        path.unlink()
    else:
        path.write_bytes(b"" if spoil == "empty" else b"-----BEGIN CERTIFICATE-----\n!\n")
    assert not refresh(certificates)
    assert not refresh(certificates)
    assert len(caplog.records) == 1  # one warning per change
    assert days_left(certificates) == 1
    write_files(tmp_path, leaves[1])
    assert refresh(certificates)


def test_revoked_certificates_are_known_and_the_list_is_read_again(tmp_path, authority, leaves):
    files = write_files(tmp_path, None, authority.certificate, authority.revoke(leaves[0]))
    certificates = Certificates(files)
    assert certificates.expires is None
    found = [certificates.is_revoked(leaf.certificate) for leaf in leaves]
    assert found == [True, False]
    (tmp_path / "crl.pem").write_bytes(authority.revoke(*leaves))
    assert all(certificates.is_revoked(leaf.certificate) for leaf in leaves)


def test_each_ca_has_a_list_of_its_own(tmp_path, authority, leaves):
    other = Authority("other")
    stranger = other.issue()
    lists = authority.revoke(leaves[0]) + b"\n" + other.revoke(stranger)
    both = authority.certificate + other.certificate
    certificates = Certificates(write_files(tmp_path, None, both, lists))
    assert certificates.is_revoked(stranger.certificate)
    assert certificates.is_revoked(leaves[0].certificate)
    assert not certificates.is_revoked(leaves[1].certificate)


def test_a_serial_number_is_revoked_for_its_own_ca_alone(tmp_path, authority, leaves, monkeypatch):
    other = Authority("other")
    number = leaves[0].serial_number
    monkeypatch.setattr("cryptography.x509.random_serial_number", lambda: number)
    twin = other.issue()
    assert twin.serial_number == number
    both = authority.certificate + other.certificate
    files = write_files(tmp_path, None, both, authority.revoke(leaves[0]))
    assert not Certificates(files).is_revoked(twin.certificate)


def test_an_expired_certificate_is_reported(tmp_path, authority, caplog):
    old = authority.issue(expires_in=timedelta(days=-1))
    assert Certificates(write_files(tmp_path, old)).expires < datetime.now(UTC)
    assert "the certificate of --ssl-certfile expired on" in caplog.text


def test_no_key_is_logged(tmp_path, leaves, caplog):
    caplog.set_level(logging.DEBUG)
    certificates = Certificates(write_files(tmp_path, leaves[0]))
    write_files(tmp_path, leaves[1])
    refresh(certificates)
    assert "certificates read again" in caplog.text
    assert "PRIVATE" not in caplog.text


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"certfile": "a"}, "--x-certfile is set and --x-keyfile is not"),
        ({"keyfile": "a"}, "--x-keyfile is set and --x-certfile is not"),
        ({"crlfile": "a"}, "--x-crlfile needs --x-ca-certs"),
    ],
)
def test_half_of_what_belongs_together_is_refused(given, message):
    with pytest.raises(ConfigurationError, match=message):
        CertificateFiles(**given, prefix="--x-")


def test_the_flags_of_a_process_are_checked_as_well():
    with pytest.raises(ConfigurationError, match="--ssl-keyfile is not"):
        CertificateFiles(certfile="a")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cert.pem", None, "--x-certfile .*cert.pem: No such file"),
        ("cert.pem", b"text", "--x-certfile: not a PEM file of that kind"),
        ("key.pem", None, "--x-keyfile .*key.pem: No such file"),
        ("key.pem", b"text", "--x-keyfile: not a PEM file of that kind"),
        ("ca.pem", b"text", "--x-ca-certs: not a PEM file of that kind"),
        ("crl.pem", b"text", "--x-crlfile: not a PEM file of that kind"),
    ],
)
def test_errors_name_the_flag(tmp_path, authority, leaves, name, content, message):
    crl = authority.revoke(leaves[1])
    files = write_files(tmp_path, leaves[0], authority.certificate, crl, prefix="--x-")
    path = tmp_path / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=message):
        Certificates(files)


def test_files_of_others_are_refused(tmp_path, authority, leaves):
    mixed = write_files(tmp_path, leaves[0])
    (tmp_path / "key.pem").write_bytes(leaves[1].key)
    with pytest.raises(ConfigurationError, match="--ssl-keyfile is not the key of the certificate"):
        Certificates(mixed)
    foreign = Authority().revoke(leaves[0])
    files = write_files(tmp_path, leaves[0], authority.certificate, foreign)
    with pytest.raises(ConfigurationError, match="--ssl-crlfile is signed by no CA of --ssl-ca-"):
        Certificates(files)


def test_a_tls_server_keeps_its_context_when_files_change_as_they_are_read(
    tmp_path, leaves, monkeypatch, caplog
):
    certificates = Certificates(write_files(tmp_path, leaves[0]))
    context = certificates.server_context(verify_mode=ssl.CERT_NONE)
    write_files(tmp_path, leaves[1])
    assert refresh(certificates)
    (tmp_path / "cert.pem").write_bytes(leaves[0].certificate)  # does not fit the key
    # As if that had happened after the files were checked.
    watched = certificates._watched
    monkeypatch.setattr(watched, "_read_stamps", lambda: watched._stamps)
    connection = SimpleNamespace()
    for _ in range(3):
        context.sni_callback(connection, None, context)
        assert connection.context is context
    assert caplog.text.count("last good certificates stay in use") == 1
    (tmp_path / "cert.pem").write_bytes(leaves[1].certificate)
    context.sni_callback(connection, None, context)
    assert connection.context is not context


def test_clients_with_certificates_speak_tls_that_cannot_resume_without_them(tmp_path, leaves):
    files = write_files(tmp_path, leaves[0], leaves[0].certificate)
    for mode, least in ((ssl.CERT_NONE, "TLSv1_2"), (ssl.CERT_REQUIRED, "TLSv1_3")):
        context = Certificates(files).server_context(verify_mode=mode)
        assert context.minimum_version.name == least
