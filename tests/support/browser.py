"""A headless Chromium that tests look at pages with, by the DevTools protocol."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Tab:
    """A page. problems: what it wrote to the console as an error, threw, or could not load."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.problems: list[str] = []
        self._loaded = False
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, path: Path) -> None:
        """A file, until it is loaded."""
        self.problems.clear()
        self._loaded = False
        self._call("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + 60
        while not self._loaded:
            assert time.monotonic() < end, f"{path} was not loaded in a minute"
            self._receive()

    def size(self, width: int, height: int) -> None:
        """The window, in pixels."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript, as JSON has it."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str, *, shift: bool = False) -> None:
        """A key, by the name that events have."""
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        codes = {"Tab": 9, "Enter": 13, "Escape": 27}
        given = {"key": key, "modifiers": 8 * shift, "windowsVirtualKeyCode": codes.get(key, 0), **text}
        self._call("Input.dispatchKeyEvent", type="keyDown", **given)
        self._call("Input.dispatchKeyEvent", type="keyUp", **given)

    def click(self, x: float, y: float) -> None:
        """The left button, at a place of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def _call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._socket.recv(timeout=60))
        params = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.exceptionThrown":
                self.problems.append(str(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Runtime.consoleAPICalled" if params["type"] == "error":
                self.problems.append(str(params["args"]))
        return message


@contextmanager
def tab(folder: Path) -> Iterator[Tab]:
    """A browser of its own. folder: for its files. No sandbox: tests of containers run as root."""
    from websockets.sync.client import connect

    assert PROGRAM is not None
    log = folder / "browser.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [PROGRAM, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
             "--disable-dev-shm-usage", "--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=errors,
        )  # fmt: skip
    try:
        file, end = folder / "profile" / "DevToolsActivePort", time.monotonic() + 60
        while not (file.exists() and len(file.read_text().split()) == 2):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        port = file.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=60) as answer:
            pages = [page for page in json.loads(answer.read()) if page["type"] == "page"]
        with connect(pages[0]["webSocketDebuggerUrl"], max_size=None, proxy=None) as socket:
            yield Tab(socket)
    finally:
        process.terminate()
        process.wait(30)
