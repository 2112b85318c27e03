"""A stand-in for the package `flashinfer`: the class that Baton uses, computed by plain torch.

Arguments have the names, order and defaults of flashinfer-python 0.6. It refuses what the real
class refuses or reads wrongly without a word: lengths that are not on the host or not int32, tables
that do not fit the lengths, types and shapes other than the planned ones, K and V of different
strides.
"""

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch

__all__ = ["FakeFlashInfer"]

_NO_WINDOW = 1 << 30


class FakeFlashInfer(ModuleType):
    """The module.

    Attributes:
        computes: whether numbers are read, and attention computed; otherwise only shapes, types
            and devices are checked.
        offset: added to each result.
        num_plans: calls of `plan` so far.
        runs: addresses of the keys of each call of `run` so far.
        page_strides: distances between the pages of these keys, in elements.
    """

    def __init__(self, *, computes: bool = True, offset: float = 0.0) -> None:
        super().__init__("flashinfer")
        self.computes, self.offset = computes, offset
        self.num_plans = 0
        self.runs: list[int] = []
        self.page_strides: list[int] = []
        self.BatchPrefillWithPagedKVCacheWrapper = self._make_wrapper

    def install(self, monkeypatch: Any) -> "FakeFlashInfer":
        """Makes `import flashinfer` find this module until the test ends."""
        monkeypatch.setitem(sys.modules, "flashinfer", self)
        return self

    def _make_wrapper(self, *args: Any, **kwargs: Any) -> "_Wrapper":
        return _Wrapper(self, *args, **kwargs)


class _Wrapper:
    """`BatchPrefillWithPagedKVCacheWrapper` without CUDA graphs and custom masks."""

    def __init__(
        self,
        module: FakeFlashInfer,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
    ) -> None:
        assert not use_cuda_graph
        assert kv_layout == "HND"
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.nbytes >= 128 << 20
        self._module, self._device = module, float_workspace_buffer.device
        self._is_planned = False

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        seq_lens: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
    ) -> None:
        on_host = [qo_indptr, paged_kv_indptr, paged_kv_last_page_len, seq_lens]
        assert all(tensor.device.type == "cpu" for tensor in on_host), "plan would wait"
        assert all(tensor.dtype == torch.int32 for tensor in (*on_host, paged_kv_indices))
        assert all(tensor.is_contiguous() for tensor in (*on_host, paged_kv_indices))
        assert paged_kv_indices.device == self._device
        assert causal
        assert num_qo_heads % num_kv_heads == 0
        assert max_token_per_sequence is not None
        self._page_size = page_size
        if self._module.computes:
            self._keep(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
            query_lens = [stop - start for start, stop in pairwise(self._query_starts)]
            assert max_token_per_sequence == max(query_lens)
            assert self._lens == seq_lens.tolist()
            lens = zip(self._lens, query_lens, strict=True)
            assert all(length >= query_len for length, query_len in lens)
        self._shape = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self._types = q_data_type, kv_data_type or q_data_type
        self._rule = sm_scale, window_left, logits_soft_cap
        self._is_planned = True
        self._module.num_plans += 1

    def _keep(
        self,
        query_starts: torch.Tensor,
        page_starts: torch.Tensor,
        pages: torch.Tensor,
        last_lens: torch.Tensor,
    ) -> None:
        """Keeps each sequence's tokens, pages and length."""
        self._query_starts = query_starts.tolist()
        counts = [stop - start for start, stop in pairwise(page_starts.tolist())]
        self._pages = pages.split(counts)
        lasts = zip(counts, last_lens.tolist(), strict=True)
        self._lens = [(n - 1) * self._page_size + last if n else 0 for n, last in lasts]

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        keys, values = paged_kv_cache
        num_heads, num_kv_heads, head_dim, page_size = self._shape
        assert self._is_planned
        assert isinstance(paged_kv_cache, tuple)
        assert (q.dtype, keys.dtype) == self._types == (q.dtype, values.dtype)
        assert q.shape[1:] == (num_heads, head_dim)
        assert not self._module.computes or len(q) == self._query_starts[-1]
        assert keys.shape[1:] == values.shape[1:] == (num_kv_heads, page_size, head_dim)
        assert keys.stride() == values.stride()
        assert keys.stride(3) == q.stride(2) == 1
        assert keys.device == values.device == q.device == self._device
        output = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        assert output.shape == q.shape
        assert output.dtype == q.dtype
        assert output.is_contiguous()
        self._module.page_strides.append(keys.stride(0))
        self._module.runs.append(keys.data_ptr() if self._module.computes else 0)
        if self._module.computes:
            for index, pages in enumerate(self._pages):
                rows = slice(*self._query_starts[index : index + 2])
                output[rows] = self._attend(q[rows], keys[pages], values[pages], self._lens[index])
            output += self._module.offset
        return output

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: int
    ) -> torch.Tensor:
        """Attends one sequence; `keys` and `values` are `[pages, heads, page_size, dim]`."""
        scale, window_left, soft_cap = self._rule
        group_size = self._shape[0] // self._shape[1]
        keys, values = (
            pages.transpose(1, 2).flatten(0, 1)[:length].double().repeat_interleave(group_size, 1)
            for pages in (keys, values)
        )
        scores = torch.einsum("qhd,khd->hqk", query.double(), keys)
        scores *= query.shape[2] ** -0.5 if scale is None else scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        positions = torch.arange(length - len(query), length).unsqueeze(1)
        distances = positions - torch.arange(length)
        window = _NO_WINDOW if window_left < 0 else window_left
        scores[:, (distances < 0) | (distances > window)] = -torch.inf
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(query.dtype)
