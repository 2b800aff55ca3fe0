"""Headless Chromium, driven over a pipe by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest


class Chromium:
    """One page of a headless browser. Requests to other hosts than this one fail."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("chromium") or shutil.which("chromium-browser")
        if program is None:
            pytest.skip("chromium is not installed (apt-get install chromium)")
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        def wire() -> None:  # the browser reads descriptor 3 and writes descriptor 4
            os.dup2(to_browser, 103)
            os.dup2(from_browser, 104)
            os.dup2(103, 3)
            os.dup2(104, 4)

        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            "--window-size=1280,1100", "about:blank",
        ]  # fmt: skip
        with (folder / "chromium.log").open("wb") as log:
            self._process = subprocess.Popen(
                [program, *flags],
                stdout=log,
                stderr=log,
                close_fds=False,
                preexec_fn=wire,
            )
        os.close(to_browser)
        os.close(from_browser)
        self._data = b""
        self._number = 0
        self._session = ""
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._data:
            data = os.read(self._in, 1 << 16)
            assert data, "chromium has ended"
            self._data += data
        message, _, self._data = self._data.partition(b"\0")
        found = json.loads(message)
        if found.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.problems.append(json.dumps(found["params"])[:400])
        return found

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Evaluate an expression in the page and return its value."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def prefer(self, scheme: str) -> None:
        """Ask pages for the "light" or the "dark" scheme."""
        wanted = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[wanted])

    def resize(self, width: int, height: int) -> None:
        """Give the page the size of a phone's screen."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": True}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def mouse(self, kind: str, x: float, y: float) -> None:
        """Send ``mouseMoved``, ``mousePressed`` or ``mouseReleased`` at a point of the window."""
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    def screenshot(self, path: Path) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        os.close(self._out)
        os.close(self._in)
