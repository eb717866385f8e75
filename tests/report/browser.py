"""Chromium over the W3C WebDriver protocol, in plain HTTP: no client library to install."""

import base64
import json
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-sync",
    "--force-device-scale-factor=1",
    "--hide-scrollbars",
    "--window-size=1280,900",
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {
    "Tab": "\ue004",
    "Enter": "\ue007",
    "Space": " ",
    "Escape": "\ue00c",
    "Home": "\ue011",
    "End": "\ue010",
    "ArrowLeft": "\ue012",
    "ArrowUp": "\ue013",
    "ArrowRight": "\ue014",
    "ArrowDown": "\ue015",
}


def find_programs() -> tuple[str, str] | None:
    """The browser and its driver, if both are installed."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


class Browser:
    """One headless Chromium with one window."""

    def __init__(self) -> None:
        programs = find_programs()
        assert programs is not None
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        self._driver = subprocess.Popen(
            [programs[1], "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            self._base = f"http://127.0.0.1:{self._port()}"
            options = {
                "binary": programs[0],
                "args": [*FLAGS, f"--user-data-dir={self._profile.name}"],
            }
            capabilities = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            answer = self._call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
            self._base += f"/session/{answer['sessionId']}"
        except BaseException:
            self.close()
            raise

    def _port(self) -> int:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if match := re.search(r"started successfully on port (\d+)", line):
                return int(match[1])
        raise RuntimeError("chromedriver did not start")

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, method=method)
        # No proxy between this process and its own driver.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None

    def open(self, page: Path) -> None:
        """Load a page from disk and wait until its script has run."""
        self.console()
        self._call("POST", "/url", {"url": page.resolve().as_uri()})
        self.settle()

    def settle(self) -> None:
        """Wait for pending work of the page: two frames after whatever was asked for."""
        self._call(
            "POST",
            "/execute/async",
            {
                "script": "const done = arguments[0];"
                "setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 60)",
                "args": [],
            },
        )

    def run(self, script: str, *args: Any) -> Any:
        """The value a script returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def click(self, selector: str) -> None:
        """Click an element as a user does, which fails if something covers it."""
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", f"/element/{found[ELEMENT]}/click", {})

    def press(self, *keys: str) -> None:
        """Press keys, by name or character, wherever the focus is."""
        actions = []
        for key in keys:
            value = KEYS.get(key, key)
            actions += [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]
        source = {"type": "key", "id": "keyboard", "actions": actions}
        self._call("POST", "/actions", {"actions": [source]})

    def hover(self, x: int, y: int) -> None:
        """Move the mouse to a point of the viewport."""
        move = {"type": "pointerMove", "x": x, "y": y, "duration": 0}
        source = {"type": "pointer", "id": "mouse", "actions": [move]}
        self._call("POST", "/actions", {"actions": [source]})

    def console(self) -> list[str]:
        """Warnings and errors since the last call: scripts, network, security policy."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]

    def devtools(self, command: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        body = {"cmd": command, "params": parameters}
        return self._call("POST", "/goog/cdp/execute", body)

    def resize(self, width: int, height: int = 900, *, phone: bool = False) -> None:
        """Give the page a viewport; windows cannot be as narrow as phones are."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        self.settle()

    def prefer(self, theme: str) -> None:
        """Set what the system prefers: light or dark."""
        features = [
            {"name": "prefers-color-scheme", "value": theme},
            # The driver clicks where an element is, not where smooth scrolling will bring it.
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.devtools("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Save the page as a picture, also what is below the window's edge."""
        taken = self.devtools("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))

    def close(self) -> None:
        """End the browser and the driver."""
        try:
            if "/session/" in getattr(self, "_base", ""):
                self._call("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait(10)
            if self._driver.stdout:
                self._driver.stdout.close()
            self._profile.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
