"""Computes with the CPU kernels what torch can check: `python -m baton.doctor.self_test`.

A process of its own for `baton doctor`: a library that crashes ends this one.
"""

import sys

import torch

import kernels
from baton.errors import BatonError
from kernels import WeightUse

__all__ = ["main"]

_NUM_TOKENS, _NUM_ROWS, _NUM_COLUMNS = 3, 45, 70
"""No multiples of what kernels take at once."""
_DTYPES = (torch.float32, torch.bfloat16)


def main() -> int:
    """Exit status 0 and a line on stdout, or 1 and the reason on stderr."""
    try:
        kernels.set_num_threads(kernels.default_num_threads())
        wrong = [dtype for dtype in _DTYPES if not _is_right(dtype)]
    except BatonError as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    if wrong:
        sys.stderr.write(f"a matrix product in {' and '.join(map(str, wrong))} is wrong\n")
        return 1
    print(f"matrix products in {' and '.join(map(str, _DTYPES))} are right")
    return 0


def _is_right(dtype: torch.dtype) -> bool:
    """Whether a product of small integers, which both types hold, is the exact one."""
    random = torch.Generator().manual_seed(0)
    hidden, matrix = (
        torch.randint(-2, 3, (num_rows, _NUM_COLUMNS), generator=random).to(dtype)
        for num_rows in (_NUM_TOKENS, _NUM_ROWS)
    )
    weight = kernels.make_weight(
        _NUM_ROWS, _NUM_COLUMNS, dtype, torch.device("cpu"), WeightUse.LINEAR
    )
    weight.rows(0, _NUM_ROWS).copy_(matrix)
    product = kernels.linear(hidden, weight, out_dtype=torch.float32)
    return torch.equal(product, hidden.float() @ matrix.float().T)


if __name__ == "__main__":
    sys.exit(main())
