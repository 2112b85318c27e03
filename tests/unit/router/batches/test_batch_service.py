"""Starting and stopping what runs batches."""

import asyncio
import threading

from router.batches import service as service_module
from router.batches.folder import BatchFolder
from router.batches.runner import Answer, BatchRunner
from router.batches.service import BatchService
from tests.support.clock import Clock


async def never_called(tenant, path, body, request_id) -> Answer:
    raise AssertionError


async def test_a_disk_that_does_not_answer_does_not_hold_the_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(service_module, "_STOP_TIMEOUT_S", 0.05)
    hangs, answers = threading.Event(), threading.Event()

    class HangingFolder(BatchFolder):
        def queue(self):
            hangs.set()
            answers.wait(30)
            return ()

    folder = HangingFolder(tmp_path / "batches", Clock())
    runner = BatchRunner(folder, never_called, lambda: 1, 4096, interval_s=0.02)
    service = BatchService(folder, runner)
    service.start()
    running = service._running
    try:
        await asyncio.to_thread(hangs.wait, 30)
        async with asyncio.timeout(20):
            await service.stop()
            await service.close()
        assert not answers.is_set()
    finally:
        answers.set()
        await asyncio.gather(running, return_exceptions=True)
