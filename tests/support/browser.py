"""A headless Chromium, driven by the DevTools protocol over pipes, which needs no library."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Browser", "Tab", "running_browser"]

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-background-networking", "--disable-extensions"),
    *("--disable-component-update", "--remote-debugging-pipe", "--hide-scrollbars"),
    "--window-size=1280,900",
)
# A device that another test adds or removes would end its requests with ERR_NETWORK_CHANGED.
_WITHOUT_DEVICES = (sys.executable, "-m", "tests.support.confinement")
_REPOSITORY = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 60.0
_MAX_MESSAGE_BYTES = 64 << 20


class Browser:
    """A running browser.

    Args:
        reader: gets its messages.
        writer: sends it commands.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.WriteTransport) -> None:
        self._reader, self._writer = reader, writer
        self._number = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._tabs: dict[str, Tab] = {}
        self._reading = asyncio.create_task(self._read())

    async def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Sends a command; returns its result."""
        self._number += 1
        command: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is not None:
            command["sessionId"] = session
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps(command).encode() + b"\0")
        message = await asyncio.wait_for(answer, _TIMEOUT_S)
        assert "error" not in message, (method, message)
        result: dict[str, Any] = message["result"]
        return result

    async def open(self, url: str) -> "Tab":
        """Opens a tab with storage of its own."""
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        target = await self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        tab = self._tabs[attached["sessionId"]] = Tab(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            await tab.call(f"{domain}.enable")
        await tab.go(url)
        return tab

    async def _read(self) -> None:
        while True:
            message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            if "id" in message:
                answer = self._answers.pop(message["id"])
                if not answer.done():
                    answer.set_result(message)
            elif message.get("sessionId") in self._tabs:
                self._tabs[message["sessionId"]].note(message["method"], message["params"])

    def close(self) -> None:
        self._reading.cancel()
        self._writer.close()


class Tab:
    """A tab.

    Attributes:
        problems: exceptions of scripts, and what the browser has blocked or not found.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.problems: list[str] = []

    def note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", str(details)))
        elif event == "Log.entryAdded" and params["entry"]["level"] == "error":
            entry = params["entry"]
            self.problems.append(f"{entry['text']} {entry.get('url', '')}")
        elif event == "Page.javascriptDialogOpening":
            self.problems.append(f"a dialogue: {params['message']}")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.call(method, self._session, **params)

    async def go(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def evaluate(self, script: str) -> Any:
        """The value of an expression, or what its promise brings."""
        result = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, (script, result["exceptionDetails"])
        return result["result"].get("value")

    async def until(self, condition: str) -> None:
        """Waits until an expression is true."""
        deadline = asyncio.get_running_loop().time() + _TIMEOUT_S
        while not await self.evaluate(f"Boolean({condition})"):
            shown = await self.evaluate("document.body.innerText.slice(0, 3000)")
            assert asyncio.get_running_loop().time() < deadline, (condition, shown, self.problems)
            await asyncio.sleep(0.02)

    async def write(self, selector: str, text: str) -> None:
        """Writes a text into a field, as a keyboard does."""
        field = f"document.querySelector({json.dumps(selector)})"
        assert await self.evaluate(f"{field}.focus(), document.activeElement === {field}")
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        """Presses a key."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32}[key]
        text = {"Enter": "\r", " ": " "}.get(key, "")
        fields = {"key": key, "windowsVirtualKeyCode": code, "text": text}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **fields)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    async def click(self, selector: str) -> None:
        await self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    async def text(self, selector: str) -> str:
        shown: str = await self.evaluate(
            f"document.querySelector({json.dumps(selector)}).innerText"
        )
        return shown

    async def resize(self, width: int, height: int) -> None:
        """Changes the size of the tab; returns when the page has it."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        await self.until(f"innerWidth === {width}")


@asynccontextmanager
async def running_browser(folder: Path) -> AsyncIterator[Browser]:
    """Runs a browser; skips the test if there is none.

    Args:
        folder: gets its profile.
    """
    command = next(filter(None, map(shutil.which, _NAMES)), None)
    if command is None:
        pytest.skip("there is no Chromium; apt-get install chromium")
    (from_here, to_here), (from_browser, to_browser) = os.pipe(), os.pipe()
    # It reads commands from 3 and writes messages to 4.
    script = f'exec "$@" 3<&{from_here} 4>&{to_browser}'
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", script, "chromium", *_WITHOUT_DEVICES),
        *(command, *_FLAGS, f"--user-data-dir={folder}"),
        cwd=_REPOSITORY,
        pass_fds=(from_here, to_browser),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    os.close(from_here)
    os.close(to_browser)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_MAX_MESSAGE_BYTES)
    reading, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(from_browser, "rb")
    )
    writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(to_here, "wb"))
    browser = Browser(reader, writer)
    try:
        yield browser
    finally:
        browser.close()
        reading.close()
        process.terminate()
        await asyncio.wait_for(process.wait(), _TIMEOUT_S)
