"""`open_batches`: the batches of an application, whose requests call its endpoints."""

from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI

from baton.common.errors import ConfigurationError
from router.batches.folder import BatchFolder
from router.batches.runner import BatchRunner
from router.batches.service import BatchService
from router.config.http import HttpConfig
from router.http.app import build_local_app
from router.http.local_calls import LocalCalls
from router.tenants.tenants import Tenants

__all__ = ["open_batches"]


def open_batches(
    app: FastAPI, config: HttpConfig, tenants: Tenants, read_limit: Callable[[], int]
) -> BatchService:
    """Returns the files and batches of an application, which has endpoints for them.

    Args:
        app: the application.
        config: names the folder.
        tenants: the clients.
        read_limit: returns how many requests of batches may run at once.

    Raises:
        ConfigurationError: the folder cannot be made; names the flag.
    """
    assert config.batch_folder is not None
    try:
        folder = BatchFolder(Path(config.batch_folder))
    except OSError as error:
        message = f"--batch-folder {config.batch_folder}: {error.strerror}"
        raise ConfigurationError(message) from None
    call = LocalCalls(build_local_app(app.state.context), tenants)
    runner = BatchRunner(folder, call, read_limit, config.max_request_bytes)
    service = BatchService(folder, runner)
    app.state.context.batches = service
    return service
