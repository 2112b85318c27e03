"""`Plan` of `baton bench transfer`: connectors, shapes of KV, numbers of blocks, prompts."""

import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Literal

from baton.common.errors import ConfigurationError
from kvstore.handoff import connector_name
from kvstore.layout import DTYPE_BYTES, KvLayout
from kvstore.registry import connector_capabilities
from kvstore.url import MULTI_SCHEME, scheme_of
from worker.processes.ports import free_port

__all__ = [
    "FULL",
    "SMOKE",
    "Plan",
    "PromptCase",
    "TransferBackend",
    "machine_backends",
    "named_backend",
]

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder there is private
_SPARE_SHARE = 8
"""A store may keep removed objects in one part in so many of its bound, for reuse."""
_MIN_BYTES = 256 << 20
"""Least bound of a store: it must hold what prompts leave there."""
_TIMEOUT = "timeout_s=30"
_REDIS_SERVER = "redis-server"
_REDIS_START_S = 20.0
_REDIS_STOP_S = 10.0
_POLL_S = 0.02
_BLOCK_SIZE = 16
_MODEL: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
)
"""A model so small that a CPU computes 16k tokens in seconds. A token's KV has 4 KiB."""


@dataclass(frozen=True, slots=True)
class TransferBackend:
    """A connector to measure.

    Attributes:
        name: its name in tables.
        url: the URL that opens it.
        is_shared: whether several processes can use it; otherwise one process has both ends.
        lends: whether a save moves nothing: readers read the blocks where they lie.
        raw: the library that is measured beside it, if there is one.
    """

    name: str
    url: str
    is_shared: bool
    lends: bool
    raw: Literal["", "redis", "nixl"] = ""


def named_backend(url: str) -> TransferBackend:
    """Returns the connector of a URL.

    Raises:
        ConfigurationError: the scheme is unknown, or its package is missing.
    """
    can, scheme = connector_capabilities(url), scheme_of(url)
    raw: dict[str, Literal["redis", "nixl"]] = {
        "redis": "redis",
        "rediss": "redis",
        "nixl": "nixl",
    }
    return TransferBackend(
        name=connector_name(url),
        url=url,
        is_shared=can.shared_between_processes,
        lends=can.lends_blocks and scheme != MULTI_SCHEME,
        raw=raw.get(scheme, ""),
    )


@contextmanager
def machine_backends(most_bytes: int) -> Iterator[tuple[list[TransferBackend], list[str]]]:
    """Opens what this machine's connectors need, such as a Redis server, and closes it at the end.

    Args:
        most_bytes: size of the largest save.

    Yields:
        The connectors, and why others cannot be measured.
    """
    max_bytes = max(_MIN_BYTES, (_SPARE_SHARE + 1) * most_bytes)
    options = f"max_bytes={max_bytes}&{_TIMEOUT}"
    missing: list[str] = []
    with ExitStack() as opened:
        urls = [f"memory://bench?max_bytes={2 * most_bytes}"]
        if os.access(_SHARED_MEMORY, os.W_OK):
            urls.append(f"shm://{opened.enter_context(_shared_folder())}?{options}")
        else:
            missing.append(f"shm: there is no {_SHARED_MEMORY}")
        folder = opened.enter_context(TemporaryDirectory(prefix="baton-bench-"))
        urls.append(f"file://{folder}?{options}")
        urls += _redis_urls(opened, missing)
        urls.append(f"grpc://?{_TIMEOUT}")
        urls += _nixl_urls(missing)
        members = [url for url in urls if scheme_of(url) in ("nixl", "redis")]
        if len(members) > 1:
            urls.append(f"{MULTI_SCHEME}://{','.join(reversed(members))}")
        yield [named_backend(url) for url in urls], missing


def _redis_urls(opened: ExitStack, missing: list[str]) -> Sequence[str]:
    executable = shutil.which(_REDIS_SERVER)
    if executable is None:
        missing.append(f"redis: {_REDIS_SERVER} is not on PATH")
        return ()
    return (f"{opened.enter_context(_running_redis(executable))}?{_TIMEOUT}",)


def _nixl_urls(missing: list[str]) -> Sequence[str]:
    from kvstore.peer.nixl.library import load_nixl

    try:
        load_nixl()
    except ConfigurationError as error:
        missing.append(f"nixl: {error}")
        return ()
    return (f"nixl://?{_TIMEOUT}",)


@contextmanager
def _shared_folder() -> Iterator[str]:
    """Yields the name of a new `shm://` store, and removes the store at the end."""
    name = f"bench-{uuid.uuid4().hex[:12]}"
    try:
        yield name
    finally:
        shutil.rmtree(_SHARED_MEMORY / f"baton-{name}", ignore_errors=True)


@contextmanager
def _running_redis(executable: str) -> Iterator[str]:
    """Runs a Redis server without persistence on a free port; yields its URL.

    Raises:
        RuntimeError: the server does not start.
    """
    port = free_port("127.0.0.1")
    command = [executable, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    process = subprocess.Popen(
        [*command, "--appendonly", "no", "--loglevel", "warning"], stdout=subprocess.DEVNULL
    )
    try:
        _await_listening(process, port)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        try:
            process.wait(_REDIS_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_listening(process: subprocess.Popen[bytes], port: int) -> None:
    give_up_at = time.monotonic() + _REDIS_START_S
    while process.poll() is None and time.monotonic() < give_up_at:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(_POLL_S)
        else:
            return
    raise RuntimeError(f"{_REDIS_SERVER} does not start")


@dataclass(frozen=True, slots=True)
class PromptCase:
    """Prompts of one length. Each has new tokens."""

    num_tokens: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        shapes: the shapes of the blocks to move, by the model that has them.
        rounds: for each number of blocks, how many rounds count. One more round precedes them.
        least_cold_bytes: least size of the buffers between which memory is copied; 0 for a size
            that no cache holds.
        prompts: the prompts for two tiers.
        whole_prompt_tokens: the longest prompt that the undivided engine answers too.
        model: config.json of the model that answers the prompts.
        chunk_tokens: most prompt tokens of a step.
    """

    shapes: Mapping[str, KvLayout]
    rounds: Mapping[int, int]
    least_cold_bytes: int
    prompts: tuple[PromptCase, ...]
    whole_prompt_tokens: int
    model: Mapping[str, Any]
    chunk_tokens: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Size of a token's keys and values over all layers of the model."""
        num_features = self.model["num_key_value_heads"] * self.model["head_dim"]
        dtype_bytes = DTYPE_BYTES[self.model["dtype"]]
        return int(2 * self.model["num_hidden_layers"] * num_features * dtype_bytes)


def _layout(num_layers: int, num_kv_heads: int, head_dim: int) -> KvLayout:
    return KvLayout(num_layers, num_kv_heads, _BLOCK_SIZE, head_dim, "bfloat16")


FULL = Plan(
    shapes=MappingProxyType(
        {
            "qwen2-0.5b": _layout(24, 2, 64),
            "llama-3.2-1b": _layout(16, 8, 64),
            "llama-3-8b": _layout(32, 8, 128),
        }
    ),
    rounds=MappingProxyType({1: 20, 16: 10, 256: 4}),
    least_cold_bytes=0,
    prompts=(PromptCase(1024, 5), PromptCase(4096, 3), PromptCase(16_384, 1)),
    whole_prompt_tokens=4096,
    model=_MODEL,
    chunk_tokens=256,
)
SMOKE = Plan(
    shapes=MappingProxyType({"tiny": _layout(2, 2, 16)}),
    rounds=MappingProxyType({1: 1, 3: 1}),
    least_cold_bytes=1 << 20,
    prompts=(PromptCase(96, 1),),
    whole_prompt_tokens=96,
    model=MappingProxyType(
        dict(_MODEL) | {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64}
    ),
    chunk_tokens=32,
)
