"""A headless Chromium, controlled through its DevTools protocol."""

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
PHONE, DESKTOP = (390, 844), (1440, 900)


class Browser:
    """One tab; `events` are the page's requests, console lines and errors."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._last_id = socket, 0
        self.events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last_id += 1
        self._socket.send(json.dumps({"id": self._last_id, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=120))
            if message.get("id") == self._last_id:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def look(self, size: tuple[int, int], scheme: str = "light") -> None:
        """Set the window's size, and the colour scheme `light` or `dark`."""
        width, height = size
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=size == PHONE,
        )  # fmt: skip
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, page: Path) -> None:
        """Load the page, and wait until it is ready."""
        self.events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.wait_for("document.documentElement?.dataset.ready == 'yes'", 20)
        self.settle()

    def wait_for(self, condition: str, limit_s: float = 120) -> None:
        """Wait until the expression is true in the page."""
        deadline = time.monotonic() + limit_s
        while not self._holds(condition):
            assert time.monotonic() < deadline, (condition, self.errors())

    def _holds(self, condition: str) -> bool:
        try:
            return bool(self.run(f"!!({condition})"))
        except AssertionError as error:
            if "navigated" in str(error) or "context" in str(error):  # the page is being replaced by another
                return False
            raise

    def settle(self) -> None:
        """Wait for two frames, after which size observers have drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        """Evaluate an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def texts(self, selector: str, within: str = "document", kind: str = "textContent") -> list[str]:
        """Return the texts of all elements that match, in the element that the expression `within` gives."""
        found: list[str] = self.run(f"[...{within}.querySelectorAll({selector!r})].map(node => node.{kind})")
        return found

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)
        self.settle()

    def errors(self) -> list[Any]:
        """Return the page's exceptions, and its console lines of warnings and errors."""
        wrong: list[Any] = []
        for event in self.events:
            facts = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                wrong.append(facts["exceptionDetails"])
            elif event["method"] == "Log.entryAdded" and facts["entry"]["level"] != "info":
                wrong.append(facts["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled":
                wrong.append(facts["args"])
        return wrong

    def requests(self) -> list[str]:
        """Return all addresses that the page requested."""
        sent = [event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [facts["request"]["url"] for facts in sent]

    def screenshot(self, file: Path, whole_page: bool = False) -> None:
        image = self.call("Page.captureScreenshot", captureBeyondViewport=whole_page)
        file.write_bytes(base64.b64decode(image["data"]))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser with a profile of its own."""
    assert CHROMIUM is not None, "no Chromium here"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--hide-scrollbars", "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port = _port(process, Path(profile) / "DevToolsActivePort")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
                tab = next(target for target in json.load(answer) if target["type"] == "page")
            with connect(tab["webSocketDebuggerUrl"], max_size=None) as socket:
                yield Browser(socket)
        finally:
            process.terminate()
            process.wait(timeout=600)


def _port(process: "subprocess.Popen[bytes]", file: Path) -> int:
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert process.poll() is None, "Chromium ended"
        assert time.monotonic() < deadline, "Chromium did not start"
        time.sleep(0.05)
    return int(file.read_text().split()[0])
