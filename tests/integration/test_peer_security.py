"""KV peers: only processes of the cluster can call each other."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from baton.common.errors import ConfigurationError
from baton.common.security.cluster import ClusterSecurity
from baton.common.security.config import CertificateFiles, CredentialsConfig
from baton.v1 import kv_peer_pb2 as pb
from kvstore.peer.service import SERVICE_NAME
from tests.support.certificates import Authority, write_files
from tests.support.peer_process import LendingProcess
from tests.support.peer_rig import LAYOUT, TIMEOUT_S, PeerRig

TOKEN, OTHER_TOKEN = "t" * 32, "u" * 32
AUTHORITY, STRANGER = Authority(), Authority("stranger")
PATIENT = f"grpc://?timeout_s={TIMEOUT_S:g}"
"""The default is short for a busy machine."""
METHODS = sorted(pb.DESCRIPTOR.services_by_name["KvPeerService"].methods_by_name)

MakeRig = Callable[..., PeerRig]


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    rigs: list[PeerRig] = []

    def make(security: ClusterSecurity, url: str = PATIENT, **arguments: Any) -> PeerRig:
        rigs.append(PeerRig(url, security=security, **arguments))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.worker.close()


def empty_pool() -> torch.Tensor:
    return torch.zeros(64, *LAYOUT.block_shape)


def certificates(folder: Path, authority: Authority = AUTHORITY) -> CertificateFiles:
    return write_files(folder, authority.issue(), AUTHORITY.certificate)


def load(prefill: PeerRig, decode: PeerRig, number: int = 0) -> tuple[int, str]:
    """Moves four blocks that no earlier load moved."""
    lease_id = f"lease-{number}"
    prefill.publish(range(4), lease_id, first_key=4 * number)
    result = decode.load(prefill.handoff(4, lease_id, first_key=4 * number), range(4))
    prefill.end(lease_id)
    return result.num_blocks, result.error


@pytest.mark.parametrize("ways", ["token", "certificates", "token and certificates"])
def test_blocks_move_between_processes_of_a_cluster(make_rig, tmp_path, ways):
    token = TOKEN if "token" in ways else None
    files = [certificates(tmp_path / name) for name in ("prefill", "decode")]
    sides = [ClusterSecurity(None, own if "cert" in ways else None, token) for own in files]
    prefill, decode = make_rig(sides[0]), make_rig(sides[1], pool=empty_pool())
    assert load(prefill, decode) == (4, "")
    assert torch.equal(decode.pool[:4], prefill.pool[:4])


def test_blocks_move_from_another_process_with_certificates_and_a_token(make_rig, tmp_path):
    decode = make_rig(
        ClusterSecurity(None, certificates(tmp_path / "decode"), TOKEN), pool=empty_pool()
    )
    strange = ClusterSecurity(None, certificates(tmp_path / "stranger"), OTHER_TOKEN)
    stranger = make_rig(strange, "grpc://")
    files = certificates(tmp_path / "prefill")
    with LendingProcess(PATIENT, files=files, token=TOKEN) as prefill:
        prefill.ask("publish", range(4))
        handoff = prefill.ask("handoff", 4)
        assert stranger.load(handoff, range(4)).num_blocks == 0
        result = decode.load(handoff, range(4))
        assert (result.num_blocks, result.error) == (4, "")
        assert torch.equal(decode.pool[:4], prefill.pool[:4])


def channel_of(kind: str, endpoint: str) -> grpc.Channel:
    if kind == "plain text":
        return grpc.insecure_channel(endpoint)
    leaf = {
        "no certificate": None,
        "another authority": STRANGER.issue(),
    }.get(kind, AUTHORITY.issue())
    own = (leaf.key, leaf.certificate) if leaf is not None else (None, None)
    return grpc.secure_channel(endpoint, grpc.ssl_channel_credentials(AUTHORITY.certificate, *own))


def _drain(answer: Any) -> None:
    if hasattr(answer, "__iter__"):
        list(answer)


REFUSED = {
    "plain text": (),
    "no certificate": (("authorization", f"Bearer {TOKEN}"),),
    "another authority": (("authorization", f"Bearer {TOKEN}"),),
    "no token": (),
    "wrong token": (("authorization", f"Bearer {OTHER_TOKEN}"),),
    "bare token": (("authorization", TOKEN),),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_every_method_is_closed_to_others(make_rig, tmp_path, kind):
    rig = make_rig(ClusterSecurity(None, certificates(tmp_path / "own"), TOKEN))
    with channel_of(kind, rig.worker.address.endpoint) as channel:
        for name in METHODS:
            method = pb.DESCRIPTOR.services_by_name["KvPeerService"].methods_by_name[name]
            make = channel.unary_stream if method.server_streaming else channel.unary_unary
            call = make(f"/{SERVICE_NAME}/{name}")
            # Bytes that are no message: callers are refused before these are parsed.
            with pytest.raises(grpc.RpcError) as caught:
                _drain(call(b"\xff", timeout=5, metadata=REFUSED[kind]))
            handshake_fails = kind in ("plain text", "no certificate", "another authority")
            expected = "UNAVAILABLE" if handshake_fails else "UNAUTHENTICATED"
            assert caught.value.code().name == expected, name


def test_a_revoked_certificate_is_refused(make_rig, tmp_path):
    revoked = AUTHORITY.issue()
    files = write_files(
        tmp_path / "own", AUTHORITY.issue(), AUTHORITY.certificate, AUTHORITY.revoke(revoked)
    )
    prefill = make_rig(ClusterSecurity(None, files))
    reader = ClusterSecurity(None, write_files(tmp_path / "r", revoked, AUTHORITY.certificate))
    assert load(prefill, make_rig(reader, pool=empty_pool())) == (0, "missing")


def test_loads_with_a_wrong_token_fail_at_once_and_are_logged_once(make_rig, caplog):
    prefill, decode = (make_rig(ClusterSecurity(token=token)) for token in (TOKEN, OTHER_TOKEN))
    for number in range(3):
        num_blocks, error = load(prefill, decode, number)
        assert num_blocks == 0
        assert error
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len([text for text in warnings if "no valid credential" in text]) == 1


def test_tokens_and_certificates_are_changed_while_blocks_move(make_rig, tmp_path):
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    config = CredentialsConfig(token_file=str(token_file))
    folders = [tmp_path / name for name in ("prefill", "decode")]
    prefill, decode = (make_rig(ClusterSecurity(config, certificates(own))) for own in folders)
    successor = Authority("successor")
    both = AUTHORITY.certificate + successor.certificate

    def step(number: int) -> None:
        assert load(prefill, decode, number) == (4, "")

    step(0)
    for own in folders:  # both authorities are trusted, then both sides get new certificates
        write_files(own, AUTHORITY.issue(), both)
    token_file.write_text(f"{TOKEN}\n{OTHER_TOKEN}\n")
    step(1)
    token_file.write_text(f"{OTHER_TOKEN}\n{TOKEN}\n")
    for number, own in enumerate(folders, 2):
        write_files(own, successor.issue(), both)
        step(number)
    token_file.write_text(OTHER_TOKEN)
    for own in folders:
        write_files(own, successor.issue(), successor.certificate)
    step(4)
    stranger = make_rig(ClusterSecurity(token=TOKEN))
    assert load(prefill, stranger, 5)[0] == 0


def test_others_need_a_credential_where_they_can_reach_the_address():
    with pytest.raises(ConfigurationError, match="BATON_CLUSTER_TOKEN"):
        PeerRig("grpc://0.0.0.0")
    PeerRig("grpc://0.0.0.0", security=ClusterSecurity(token=TOKEN)).worker.close()
