"""How the workers of one machine share its cores."""

import os

__all__ = ["threads_per_worker"]


def threads_per_worker(num_workers: int) -> int:
    """The CPU threads of each worker where none are asked for: its share of the cores."""
    return max(1, (os.cpu_count() or 1) // max(1, num_workers))
