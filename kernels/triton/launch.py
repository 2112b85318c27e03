"""Launch parameters of the Triton kernels, from checked-in tables per device: `launch_tables/`.

A table is a file whose `devices` are prefixes of device names. It holds, per kernel, rows of
parameters by problem size; a kernel that it omits uses those of `default.json`. Nothing is
tuned while requests are served.
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from baton.common.errors import ConfigurationError

__all__ = [
    "AttentionLaunch",
    "BlockLaunch",
    "DecodeAttentionLaunch",
    "ExpertLaunch",
    "FewRowLaunch",
    "LaunchTable",
    "Mechanisms",
    "RowLaunch",
    "Rows",
    "SearchLaunch",
    "TileLaunch",
    "launch_table",
    "load_launch_table",
    "replaced_launch_table",
]

TABLES_FOLDER = Path(__file__).parent / "launch_tables"
_DEFAULT = "default"
_DEVICES, _MECHANISMS = "devices", "mechanisms"
_POWERS_OF_TWO = frozenset({"block_m", "block_n", "block_k", "block_size", "num_warps"})
_MINIMA = {"block_m": 16, "block_n": 16, "block_k": 16, "shares_evenly": 0}  # of matrix products
_REGISTERS_OF_SM, _MAX_REGISTERS = 65_536, 255
_MAXIMA = {"num_warps": 32, "num_stages": 8, "shares_evenly": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLaunch:
    """Launch parameters of a kernel whose programs process a whole row each.

    Attributes:
        up_to: the largest problem size the parameters apply to; None for any.
        num_warps: warps of a program.
    """

    up_to: int | None = None
    num_warps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLaunch(RowLaunch):
    """Launch parameters of a kernel whose programs process a block of elements each.

    Attributes:
        block_size: elements of a program; for block copies, words of 4 bytes.
    """

    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLaunch(BlockLaunch):
    """Launch parameters of the search for thresholds in rows of logits.

    Attributes:
        num_passes: passes over whole rows, each of which leaves a sixteenth of the range; what
            then lies in it is gathered and searched apart. With 10 at most one value is left.
    """

    num_passes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLaunch(RowLaunch):
    """Launch parameters of attention over paged KV.

    Attributes:
        block_m: rows of a tile: query tokens times the heads of a group.
        block_n: cached tokens of a tile.
        num_stages: stages of Triton's pipeline. Loading block ids, which KV's addresses depend on,
            takes some of them: with 5 one tile of KV is prefetched, with 7 two, with 4 none.
    """

    block_m: int
    block_n: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAttentionLaunch(AttentionLaunch):
    """Launch parameters of attention that divides each context among programs.

    Attributes:
        min_tokens_per_split: the least cached tokens of a program.
        max_splits: the most programs for one context.
        programs_per_sm: programs that keep a streaming multiprocessor busy; with `shares_evenly`
            as many as its registers and shared memory have room for, so that none waits.
        shares_evenly: 1: all contexts are divided evenly among the programs, by a list of work
            that the device makes of their lengths; 0: each is divided among as many programs.
    """

    min_tokens_per_split: int
    max_splits: int
    programs_per_sm: int
    shares_evenly: int

    @property
    def max_registers(self) -> int | None:
        """The most registers of a thread with which so many programs have room; None for any."""
        registers = _REGISTERS_OF_SM // (32 * self.num_warps * self.programs_per_sm)
        return None if registers >= _MAX_REGISTERS else registers // 8 * 8


Launch = TypeVar("Launch", bound=RowLaunch)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileLaunch(RowLaunch):
    """Launch parameters of products whose programs compute a tile of the result each.

    Attributes:
        block_m: rows of a tile; of experts' layers all are of one expert.
        block_n: outputs of a tile.
        num_stages: stages of Triton's pipeline.
    """

    block_m: int
    block_n: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLaunch(TileLaunch):
    """Launch parameters of the experts' linear layers.

    Attributes:
        block_k: inputs of a step; the same for all sizes, so that sums do not depend on the batch.
            Quantized weights have a number of their own.
    """

    block_k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FewRowLaunch(RowLaunch):
    """Launch parameters of products of few rows of inputs and a dense weight.

    Attributes:
        block_n: outputs of a program.
        block_k: inputs of a step.
        num_stages: stages of Triton's pipeline.
    """

    block_n: int
    block_k: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanisms:
    """Ways to compute the same results faster, which the table of a device turns on.

    Attributes:
        dependent_launch: kernels begin before the ones in front of them have ended
            (`kernels.triton.dependent`).
        few_row_products: products of few rows are Triton's, joined with the operations around
            them (`kernels.triton.few_rows`); otherwise cuBLAS'.
    """

    dependent_launch: bool
    few_row_products: bool


@dataclass(frozen=True, slots=True)
class Rows(Generic[Launch]):
    """One kernel's parameters by ascending problem size; the last row applies to any size."""

    rows: tuple[Launch, ...]

    def for_size(self, size: int) -> Launch:
        """Returns the first row that applies to `size`."""
        return next(row for row in self.rows if row.up_to is None or size <= row.up_to)


@dataclass(frozen=True, slots=True)
class LaunchTable:
    """Launch parameters of one device.

    Attributes:
        decode_attention: by bytes of a query head. 8-bit K is widened to the query's type before
            products, so larger tiles of it would not fit the registers.
        prefill_attention: as `decode_attention`.
        row_norm: by elements of a row.
        pointwise: by elements of a row.
        row_maxima: by elements of a row.
        expert_linear: by mean rows of an expert.
        quantized_linear: by rows of inputs.
        few_row_linear: by outputs.
        rotate_and_write_kv: by elements of a head.
        block_copy: by words of a block.
        draw_thresholds: by elements of a row.
        draw_tokens: by elements of a row.
        token_logprobs: by elements of a row.
        mechanisms: what is turned on.
    """

    decode_attention: Rows[DecodeAttentionLaunch]
    prefill_attention: Rows[AttentionLaunch]
    row_norm: Rows[RowLaunch]
    pointwise: Rows[BlockLaunch]
    row_maxima: Rows[BlockLaunch]
    expert_linear: Rows[ExpertLaunch]
    quantized_linear: Rows[TileLaunch]
    few_row_linear: Rows[FewRowLaunch]
    rotate_and_write_kv: Rows[BlockLaunch]
    block_copy: Rows[BlockLaunch]
    draw_thresholds: Rows[SearchLaunch]
    draw_tokens: Rows[BlockLaunch]
    token_logprobs: Rows[BlockLaunch]
    mechanisms: Mechanisms


_KERNELS: Mapping[str, type[RowLaunch]] = {
    "decode_attention": DecodeAttentionLaunch,
    "prefill_attention": AttentionLaunch,
    "row_norm": RowLaunch,
    "pointwise": BlockLaunch,
    "row_maxima": BlockLaunch,
    "expert_linear": ExpertLaunch,
    "quantized_linear": TileLaunch,
    "few_row_linear": FewRowLaunch,
    "rotate_and_write_kv": BlockLaunch,
    "block_copy": BlockLaunch,
    "draw_thresholds": SearchLaunch,
    "draw_tokens": BlockLaunch,
    "token_logprobs": BlockLaunch,
}


def launch_table(device: torch.device) -> LaunchTable:
    """Returns the table of `device`, which is read once.

    Raises:
        ConfigurationError: a table cannot be used; names its file and key.
    """
    return _load_table(device.type, device.index)


@functools.cache
def _load_table(device_type: str, index: int | None) -> LaunchTable:
    name = torch.cuda.get_device_name(index) if device_type == "cuda" else device_type
    return load_launch_table(name)


@contextmanager
def replaced_launch_table(table: LaunchTable) -> Iterator[None]:
    """Makes all launches of this process use a table while the block runs, so that it can be
    measured.
    """
    names, load = globals(), _load_table
    names["_load_table"] = lambda device_type, index: table
    try:
        yield
    finally:
        names["_load_table"] = load


def load_launch_table(device_name: str, folder: Path = TABLES_FOLDER) -> LaunchTable:
    """Returns the table with the longest prefix of `device_name`, else the default table.

    Args:
        device_name: CUDA's name of the device, or "cpu" for Triton's interpreter.
        folder: that holds the tables.

    Raises:
        ConfigurationError: a table in `folder` cannot be used; names its file and key.
    """
    tables = {path.stem: _parse(path) for path in sorted(folder.glob("*.json"))}
    default = tables.get(_DEFAULT, _File((), {}, {}))
    _check_complete(folder / f"{_DEFAULT}.json", default)
    names = {prefix: table for table in tables.values() for prefix in table.devices}
    fitting = [prefix for prefix in names if device_name.startswith(prefix)]
    measured = names[max(fitting, key=len)] if fitting else default
    mechanisms = Mechanisms(**{**default.mechanisms, **measured.mechanisms})
    return LaunchTable(**{**default.kernels, **measured.kernels}, mechanisms=mechanisms)


@dataclass(frozen=True, slots=True)
class _File:
    """The contents of one file: prefixes of device names, rows per kernel, and mechanisms."""

    devices: Sequence[str]
    kernels: Mapping[str, Rows[Any]]
    mechanisms: Mapping[str, bool]


def _check_complete(path: Path, default: _File) -> None:
    missing = sorted(set(_KERNELS) - set(default.kernels))
    names = [field.name for field in fields(Mechanisms)]
    missing += [f"{_MECHANISMS}.{name}" for name in names if name not in default.mechanisms]
    if missing:
        raise _bad(path, missing[0], "is missing")


def _parse(path: Path) -> _File:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} is not an object of kernels")
    devices = content.pop(_DEVICES, [])
    if not isinstance(devices, list) or not all(isinstance(name, str) for name in devices):
        raise _bad(path, _DEVICES, f"is {devices!r}: it must be a list of names")
    mechanisms = _mechanisms(path, content.pop(_MECHANISMS, {}))
    unknown = sorted(set(content) - set(_KERNELS))
    if unknown:
        raise _bad(path, unknown[0], f"is unknown: it must be one of {', '.join(_KERNELS)}")
    kernels = {kernel: _rows(path, kernel, rows) for kernel, rows in content.items()}
    return _File(devices, kernels, mechanisms)


def _mechanisms(path: Path, entry: object) -> Mapping[str, bool]:
    if not isinstance(entry, dict):
        raise _bad(path, _MECHANISMS, f"is {entry!r}: it must be an object")
    known = [field.name for field in fields(Mechanisms)]
    for name, value in entry.items():
        key = f"{_MECHANISMS}.{name}"
        if name not in known:
            raise _bad(path, key, f"is unknown: it must be one of {', '.join(known)}")
        if not isinstance(value, bool):
            raise _bad(path, key, f"is {value!r}: it must be true or false")
    return entry


def _rows(path: Path, kernel: str, entries: object) -> Rows[Any]:
    if not isinstance(entries, list) or not entries:
        raise _bad(path, kernel, "must be a list of rows")
    rows = tuple(
        _row(path, f"{kernel}[{index}]", _KERNELS[kernel], entry)
        for index, entry in enumerate(entries)
    )
    bounds = [row.up_to for row in rows[:-1] if row.up_to is not None]
    is_whole = rows[-1].up_to is None and len(bounds) == len(rows) - 1
    if not is_whole or bounds != sorted(set(bounds)):
        raise _bad(path, f"{kernel}.up_to", "must rise, and the last row must have none")
    return Rows(rows)


def _row(path: Path, key: str, launch: type[RowLaunch], entry: object) -> RowLaunch:
    if not isinstance(entry, dict):
        raise _bad(path, key, f"is {entry!r}: it must be an object")
    known = [field.name for field in fields(launch)]
    for name in known:
        if name not in entry and name != "up_to":
            raise _bad(path, f"{key}.{name}", "is missing")
    for name, value in entry.items():
        if name not in known:
            raise _bad(path, f"{key}.{name}", f"is unknown: it must be one of {', '.join(known)}")
        _check_number(path, f"{key}.{name}", name, value)
    return launch(**entry)


def _check_number(path: Path, key: str, name: str, value: object) -> None:
    low, high = _MINIMA.get(name, 1), _MAXIMA.get(name, 1 << 20)
    if type(value) is not int or not low <= value <= high:  # refuses bools
        raise _bad(path, key, f"is {value!r}: it must be a whole number of {low} to {high}")
    if name in _POWERS_OF_TWO and value & (value - 1):
        raise _bad(path, key, f"is {value!r}: it must be a power of two")


def _bad(path: Path, key: str, problem: str) -> ConfigurationError:
    return ConfigurationError(f"{path}: {key} {problem}")
