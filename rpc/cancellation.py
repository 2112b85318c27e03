"""`is_task_cancelled`: distinguishes a task that was cancelled from a call of it that was."""

import asyncio

__all__ = ["is_task_cancelled"]


def is_task_cancelled() -> bool:
    """Returns whether the present task was cancelled, and not only a call that it waits for.

    grpc.aio raises `CancelledError` for both: a call is cancelled with its channel, too.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
