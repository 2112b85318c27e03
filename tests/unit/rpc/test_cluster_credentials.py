"""`ClusterSecurity`: the token, its file, and the names in certificates."""

import itertools
import os
import pickle
import stat
import subprocess
import sys
from types import SimpleNamespace

import pytest

from baton.common.errors import ConfigurationError, UnauthenticatedError
from baton.common.security.cluster import TOKEN_VARIABLE, ClusterSecurity
from baton.common.security.config import CredentialsConfig
from router.config.security import ClientTlsConfig, RouterSecurityConfig, WorkerTlsConfig
from rpc.server_access import authorize_cluster, cluster_access
from tests.support.certificates import Authority, write_files

TOKEN, OTHER, THIRD = "t" * 32, "u" * 32, "v" * 32
MAKE_TOKEN = """
import sys
from baton.common.security.cluster import ClusterSecurity
from baton.common.security.config import CredentialsConfig
sys.stdin.readline()
print(ClusterSecurity(CredentialsConfig(token_file=sys.argv[1])).token)
"""


@pytest.fixture(scope="module")
def authority():
    return Authority()


def with_file(path, *tokens):
    if tokens:
        path.write_text("\n".join(tokens) + "\n")
    return ClusterSecurity(CredentialsConfig(token_file=str(path)))


def admits(security, token, auth_context=None):
    metadata = () if token is None else [("authorization", f"Bearer {token}")]
    return security.admits(metadata, auth_context or {})


def test_without_credentials_all_are_admitted_and_nothing_is_sent():
    security = ClusterSecurity()
    assert not security.verifies_callers
    assert security.call_metadata() == ()
    assert security.channel_options("name") == ()
    assert (security.channel_credentials(), security.server_credentials()) == (None, None)
    assert admits(security, None)
    assert admits(security, TOKEN)


def test_another_process_that_receives_the_security_has_the_same_credentials(tmp_path):
    path = tmp_path / "token"
    for own in (ClusterSecurity(token=TOKEN), with_file(path, TOKEN)):
        assert TOKEN not in repr(own)
        received = pickle.loads(pickle.dumps(own))
        assert received.token == TOKEN
        assert admits(received, TOKEN)
        assert not admits(received, OTHER)


def test_the_token_alone_admits():
    security = ClusterSecurity(token=TOKEN)
    assert security.verifies_callers
    assert list(security.call_metadata()) == [("authorization", f"Bearer {TOKEN}")]
    assert admits(security, TOKEN)
    for wrong in (None, "", TOKEN[:-1], TOKEN + "t", OTHER, TOKEN.upper()):
        assert not admits(security, wrong)
    for header in (TOKEN, f"Basic {TOKEN}", f"bearer {TOKEN}", f"Bearer  {TOKEN}", b"\xff"):
        assert not security.admits([("authorization", header)], {})
    assert not security.admits([("other", f"Bearer {TOKEN}")], {})


def test_the_variable_holds_a_token(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert ClusterSecurity.from_environment(CredentialsConfig()).token == TOKEN
    monkeypatch.delenv(TOKEN_VARIABLE)
    assert ClusterSecurity.from_environment(CredentialsConfig()).token is None


def test_the_first_line_is_sent_and_each_line_is_accepted_at_once(tmp_path):
    path = tmp_path / "token"
    security = with_file(path, TOKEN)
    for lines in ((TOKEN, OTHER), (OTHER, TOKEN), (OTHER,), (THIRD, OTHER)):
        path.write_text("\n".join(lines))
        assert security.token == lines[0]
        for token in (TOKEN, OTHER, THIRD):
            assert admits(security, token) == (token in lines)


@pytest.mark.parametrize("spoil", ["remove", "empty", "short", "binary"])
def test_the_last_good_token_stays_while_its_file_is_bad(tmp_path, spoil, caplog):
    path = tmp_path / "token"
    security = with_file(path, TOKEN)
    if spoil == "remove":
        path.unlink()
    else:
        path.write_bytes({"empty": b"\n", "short": b"short", "binary": b"\xff\xfe" * 20}[spoil])
    assert admits(security, TOKEN)
    assert not admits(security, None)
    assert security.token == TOKEN
    assert len(caplog.records) == 1
    assert TOKEN not in caplog.text
    path.write_text(OTHER)
    assert security.token == OTHER
    assert not admits(security, TOKEN)


def test_a_missing_file_is_made_for_its_owner_alone(tmp_path):
    path = tmp_path / "run" / "token"
    token = with_file(path).token
    assert len(token) >= 40
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]
    assert with_file(path).token == token


def test_processes_that_make_the_file_at_once_agree_on_its_token(tmp_path):
    path = tmp_path / "token"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MAKE_TOKEN, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in processes:  # all have imported what they need, or do so now
        process.stdin.write("go\n")
        process.stdin.flush()
    tokens = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert tokens == {path.read_text().strip()}
    assert list(tmp_path.iterdir()) == [path]


def test_processes_with_one_id_make_the_file_at_once_as_containers_do(tmp_path, monkeypatch):
    path, others = tmp_path / "token", []
    link = os.link

    def link_late(source, target):
        monkeypatch.setattr(os, "link", link)
        others.append(with_file(path).token)
        link(source, target)

    monkeypatch.setattr(os, "link", link_late)
    assert with_file(path).token == others[0] == path.read_text().strip()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n \n", "it has no token"),
        (b"short\n", "a token needs 16 printable ASCII characters or more"),
        (TOKEN.encode() + b"\nshort\n", "a token needs 16 printable"),
        ("ü".encode() * 20, "a token needs 16 printable"),
        (b"\xff" * 20, "not a text"),
    ],
)
def test_a_bad_file_is_an_error_that_names_its_flag_and_no_token(tmp_path, content, message):
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"--cluster-token-file .*token: {message}") as e:
        with_file(path)
    assert TOKEN not in str(e.value)


def test_a_file_that_cannot_be_made_or_a_short_variable_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"--cluster-token-file .* it cannot be made: "):
        with_file(tmp_path / "file" / "token")
    with pytest.raises(ConfigurationError, match="it cannot be made: File name too long"):
        with_file(tmp_path / ("x" * 300))
    with pytest.raises(ConfigurationError, match="BATON_CLUSTER_TOKEN: a token needs 16") as e:
        ClusterSecurity(token="secret")
    assert "secret" not in str(e.value)


def context_of(leaf, *names):
    """What gRPC says of a connection's certificate."""
    return {
        "x509_pem_cert": [leaf.certificate],
        "x509_common_name": [names[0].encode()],
        "x509_subject_alternative_name": [name.encode() for name in names[1:]],
    }


def test_certificates_admit_by_any_name_unless_names_are_set(tmp_path, authority):
    leaf = authority.issue()
    files = write_files(tmp_path, leaf, authority.certificate)
    router = context_of(leaf, "router", "router.internal")
    stranger = context_of(leaf, "stranger", "stranger.internal")
    all_names = ClusterSecurity(files=files)
    assert all_names.verifies_callers
    assert admits(all_names, None, router)
    assert admits(all_names, None, stranger)
    assert not admits(all_names, None, {})
    for names in (("router",), ("router.internal",), ("x", "router")):
        some = ClusterSecurity(CredentialsConfig(identities=names), files)
        assert admits(some, None, router)
        assert not admits(some, None, stranger)
        assert not admits(some, None, {})


def test_with_both_the_token_and_the_certificate_are_needed(tmp_path, authority):
    leaf = authority.issue()
    files = write_files(tmp_path, leaf, authority.certificate)
    security = ClusterSecurity(files=files, token=TOKEN)
    for token, context in itertools.product((TOKEN, None), (context_of(leaf, "router"), {})):
        assert admits(security, token, context) == (token is not None and bool(context))


def test_a_revoked_certificate_is_not_admitted(tmp_path, authority):
    leaf, revoked = authority.issue(), authority.issue()
    crl = authority.revoke(revoked)
    security = ClusterSecurity(files=write_files(tmp_path, leaf, authority.certificate, crl))
    assert admits(security, None, context_of(leaf, "router"))
    assert not admits(security, None, context_of(revoked, "router"))


def test_a_certificate_without_cas_encrypts_and_verifies_no_caller(tmp_path, authority):
    security = ClusterSecurity(files=write_files(tmp_path, authority.issue()))
    assert security.server_credentials() is not None
    assert security.channel_credentials() is None
    assert not security.verifies_callers


def test_a_worker_that_asks_for_certificates_needs_one(tmp_path, authority):
    security = ClusterSecurity(files=write_files(tmp_path, ca_certs=authority.certificate))
    assert security.channel_credentials() is not None
    with pytest.raises(ConfigurationError, match=r"needs --ssl-certfile and --ssl-keyfile"):
        cluster_access(security, "127.0.0.1")


def test_the_error_does_not_say_what_was_wrong():
    context = SimpleNamespace(
        invocation_metadata=lambda: [("authorization", f"Bearer {OTHER}")], auth_context=dict
    )
    with pytest.raises(UnauthenticatedError) as error:
        authorize_cluster(ClusterSecurity(token=TOKEN))("/a/b", context)
    assert OTHER not in str(error.value)
    assert TOKEN not in str(error.value)


OWN = {"certfile": "c", "keyfile": "k", "ca_certs": "a", "crlfile": "r"}


@pytest.mark.parametrize(
    ("clients", "workers", "files"),
    [
        ({}, {}, None),
        ({"certfile": "c", "keyfile": "k"}, {}, None),
        (OWN, {}, ("c", "k", "a", "r")),
        (OWN, {"ca_certs": "none"}, None),
        (OWN, {"ca_certs": "A"}, ("c", "k", "A", None)),
        (OWN, {"crlfile": "R"}, ("c", "k", "a", "R")),
        (OWN, {"certfile": "C", "keyfile": "K"}, ("C", "K", "a", "r")),
        ({}, {"ca_certs": "A"}, (None, None, "A", None)),
        ({}, {"certfile": "C", "keyfile": "K", "ca_certs": "A"}, ("C", "K", "A", None)),
    ],
)
def test_certificates_towards_workers_are_those_towards_clients_unless_set(clients, workers, files):
    config = RouterSecurityConfig(
        clients=ClientTlsConfig(**clients),
        workers=WorkerTlsConfig(**{f"cluster_ssl_{name}": path for name, path in workers.items()}),
    )
    found = config.worker_files
    paths = found and (found.certfile, found.keyfile, found.ca_certs, found.crlfile)
    assert paths == files


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ({"certfile": "C"}, "--cluster-ssl-certfile is set and --cluster-ssl-keyfile is not"),
        ({"certfile": "C", "keyfile": "K"}, "--cluster-ssl-ca-certs is missing"),
        ({"crlfile": "R"}, "--cluster-ssl-ca-certs is missing"),
    ],
)
def test_files_towards_workers_belong_together(workers, message):
    if "crlfile" not in workers and len(workers) == 1:
        workers = {**workers, "ca_certs": "A"}
    tls = WorkerTlsConfig(**{f"cluster_ssl_{name}": path for name, path in workers.items()})
    with pytest.raises(ConfigurationError, match=message):
        RouterSecurityConfig(workers=tls)
