"""Weights on a CPU as a file that the processes of one machine map.

    weights-KEY        all weights in the memory order of the kernels, then a digest of them
    weights-KEY.lock   locked by the process that writes the file

A process writes the file once, straight from the checkpoint, and gives it its name when it is
whole. Every process then maps it copy-on-write: none can change the weights of another. The digest
is computed again by each process that maps the file, so that a damaged file is replaced.
"""

import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import xxhash
from torch import nn

from baton.common.version import __version__
from engine.models.linear import PackedModule
from kernels.library.variants import fingerprint_sources
from kvstore.store import StoreUnavailableError
from kvstore.stores.files import FileLock, os_errors_as_unavailable

__all__ = ["share_weights"]

_ALIGNMENT = 64
_DIGEST_BYTES = 16
_MAX_WAIT_S = 600.0
_MAX_FREE_FRACTION = 2
"""The file takes at most the free bytes of its file system divided by this."""

# A weight's path, kind, tensors, and the function that replaces its tensors; see `_Slot`.
_Memory = tuple[str, str, Sequence[torch.Tensor], Callable[[Sequence[torch.Tensor]], None]]

_logger = logging.getLogger("baton.engine")


def share_weights(
    model: nn.Module, folder: Path, fingerprint: bytes, fill: Callable[[], None]
) -> bool:
    """Fills a model's weights through a file in a folder; returns whether they are shared.

    If the file cannot be made, for example for lack of room, the weights are filled in memory
    of this process alone, and a line is logged.

    Args:
        model: its weights are allocated on the CPU, and not filled.
        folder: for the file; trusted as the checkpoint is.
        fingerprint: digest of the checkpoint.
        fill: fills the weights of the model.
    """
    slots = list(_slots(model))
    path = folder / f"weights-{_key(slots, fingerprint)}"
    try:
        with _locked(path):
            return _map_file(path, slots) or _write_file(path, slots, fill)
    except StoreUnavailableError as error:
        _logger.warning("weights are not shared: %s", error)
        fill()
        return False


@dataclass(frozen=True, slots=True)
class _Slot:
    """The place in the file of a weight, which may have several tensors.

    Attributes:
        path: name of the weight in the model.
        kind: a text that differs for weights with different orders of their memory.
        private: the weight's memory before the file is used.
        offsets: of its tensors in the file.
        put: makes tensors of the same types and shapes the weight's memory.
    """

    path: str
    kind: str
    private: Sequence[torch.Tensor]
    offsets: Sequence[int]
    put: Callable[[Sequence[torch.Tensor]], None]

    @property
    def end(self) -> int:
        return self.offsets[-1] + self.private[-1].nbytes

    def views_in(self, pages: mmap.mmap) -> list[torch.Tensor]:
        return [
            torch.frombuffer(pages, dtype=like.dtype, count=like.numel(), offset=offset).view(
                like.shape
            )
            for like, offset in zip(self.private, self.offsets, strict=True)
        ]


def _slots(model: nn.Module) -> Iterator[_Slot]:
    end = 0
    for path, kind, tensors, put in _memory_of(model):
        offsets = []
        for tensor in tensors:
            offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
            end = offsets[-1] + tensor.nbytes
        yield _Slot(path, kind, tensors, offsets, put)


def _memory_of(model: nn.Module) -> Iterator[_Memory]:
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            put = partial(_put_parameter, module, name)
            yield f"{path}.{name}", f"parameter {parameter.dtype}", [parameter.data], put
        if isinstance(module, PackedModule):
            weight = module.weight
            yield f"{path}.weight", weight.describe(), weight.tensors(), partial(_put, module)


def _put_parameter(module: nn.Module, name: str, tensors: Sequence[torch.Tensor]) -> None:
    (tensor,) = tensors
    setattr(module, name, nn.Parameter(tensor, requires_grad=False))


def _put(module: PackedModule, tensors: Sequence[torch.Tensor]) -> None:
    module.weight = module.weight.with_tensors(tensors)


def _key(slots: Sequence[_Slot], fingerprint: bytes) -> str:
    """Digest of all that the bytes of the file depend on."""
    kinds = [(slot.path, slot.kind, slot.offsets) for slot in slots]
    code = f"{__version__} {fingerprint_sources()} {kinds}"
    return xxhash.xxh3_128_hexdigest(fingerprint + code.encode())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits for the process that writes the file now, if there is one.

    Raises:
        StoreUnavailableError: the lock cannot be made, or was not free for too long.
    """
    with os_errors_as_unavailable():
        lock = FileLock(path.with_suffix(".lock"), _MAX_WAIT_S)
    with closing(lock), ExitStack() as held:
        try:
            held.enter_context(lock.locked(deadline_s=0))
        except StoreUnavailableError:
            _logger.info("waiting for the process that writes the weights")
            held.enter_context(lock.locked())
        yield


def _map_file(path: Path, slots: Sequence[_Slot]) -> bool:
    """Makes the file's content the weights; returns False if there is no whole file."""
    num_bytes = slots[-1].end
    pages = _map_pages(path, num_bytes + _DIGEST_BYTES)
    if pages is None:
        return False
    content = memoryview(pages)
    if xxhash.xxh3_128_digest(content[:num_bytes]) != content[num_bytes:]:
        _logger.warning("%s is damaged, and is written again", path)
        return False
    _use(slots, pages)
    return True


def _map_pages(path: Path, num_bytes: int) -> mmap.mmap | None:
    """Maps a file copy-on-write; returns None if there is none of that size."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != num_bytes:
                return None
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError:
        return None


def _write_file(path: Path, slots: Sequence[_Slot], fill: Callable[[], None]) -> bool:
    """Fills the weights in a new file, and makes them this process's weights; returns whether that
    file could be kept.

    Raises:
        StoreUnavailableError: the file cannot be made; nothing was filled.
    """
    num_bytes = slots[-1].end
    draft = path.with_suffix(".draft")
    try:
        with os_errors_as_unavailable():
            pages = _new_pages(draft, num_bytes + _DIGEST_BYTES)
        _use(slots, pages)
        fill()
        content = memoryview(pages)
        content[num_bytes:] = xxhash.xxh3_128_digest(content[:num_bytes])
        try:
            pages.flush()  # a file with this name is whole, also after the machine has crashed
            draft.replace(path)
        except OSError as error:
            _logger.warning("weights are not shared: %s", error)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
    written = _map_pages(path, num_bytes + _DIGEST_BYTES)
    if written is not None:
        _use(slots, written)
        return True
    for slot in slots:  # these pages could be changed by this process
        slot.put([view.clone() for view in slot.views_in(pages)])
    return False


def _new_pages(draft: Path, num_bytes: int) -> mmap.mmap:
    """Maps a new file of zeros, whose room is reserved.

    Raises:
        OSError: it cannot be made, or there is too little room.
    """
    draft.unlink(missing_ok=True)  # of a process that was killed
    status = os.statvfs(draft.parent)
    if num_bytes * _MAX_FREE_FRACTION > status.f_bavail * status.f_frsize:
        raise OSError(f"{draft.parent} has too little room for {num_bytes >> 20} MiB")
    with open(draft, "w+b", opener=_open_private) as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        return mmap.mmap(file.fileno(), 0)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _use(slots: Sequence[_Slot], pages: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the file system has no large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    for slot in slots:
        slot.put(slot.views_in(pages))
