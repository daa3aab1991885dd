"""A page in headless Chromium, driven over its debugging pipe: no package besides the browser."""

import base64
import json
import os
import select
import subprocess
import tempfile
import time
from pathlib import Path

OPTIONS = [
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # as root there is none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
]

# Every visible text, its colour, and the nearest background behind it.
CONTRAST = """
(() => {
  const parse = text => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const back = parse(getComputedStyle(node).backgroundColor);
      if (back[3] > 0) return back;
    }
    return [255, 255, 255, 1];
  };
  const worst = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const [node, text] = [walker.currentNode.parentElement, walker.currentNode.textContent.trim()];
    if (!text || ["SCRIPT", "STYLE", "NOSCRIPT", "OPTION"].includes(node.tagName) || !node.getClientRects().length) continue;
    const style = getComputedStyle(node);
    const colour = parse(node instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [light(colour), light(behind(node))].sort((a, b) => b - a);
    worst.push([(a + .05) / (b + .05), text.slice(0, 40)]);
  }
  return worst.sort((a, b) => a[0] - b[0])[0];
})()
"""


class Browser:
    """One page. `messages` has its console's errors and exceptions, `requests` all its addresses."""

    def __init__(self, program="chromium"):
        self.messages, self.requests = [], []
        self._replies, self._number, self._text = {}, 0, b""
        self._profile = tempfile.TemporaryDirectory(prefix="pvswitch-browser-", ignore_cleanup_errors=True)
        to_read, self._to = os.pipe()
        self._from, from_write = os.pipe()

        def descriptors():
            # Copies first: 3 and 4 may be among these.
            ours = os.dup(to_read), os.dup(from_write)
            os.dup2(ours[0], 3)
            os.dup2(ours[1], 4)

        command = [program, *OPTIONS, f"--user-data-dir={self._profile.name}", "about:blank"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, preexec_fn=descriptors, close_fds=False, **quiet)
        os.close(to_read)
        os.close(from_write)
        self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ["Page", "Runtime", "Network", "Log"]:
            self.call(f"{domain}.enable")

    def call(self, method, timeout_s=30, **params):
        self._number += 1
        number, message = self._number, {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        self._pump(lambda: number in self._replies, timeout_s, method)
        reply = self._replies.pop(number)
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']['message']}")
        return reply["result"]

    def _pump(self, done, timeout_s, what):
        end = time.monotonic() + timeout_s
        while not done():
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._from], [], [], left)[0]:
                raise RuntimeError(f"the browser did not answer within {timeout_s} s: {what}")
            data = os.read(self._from, 1 << 16)
            if not data:
                raise RuntimeError("the browser ended")
            *messages, self._text = (self._text + data).split(b"\0")
            for message in map(json.loads, messages):
                self._take(message)

    def _take(self, message):
        if "id" in message:
            self._replies[message["id"]] = message
            return
        method, params = message["method"], message["params"]
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.messages.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.messages.append(params["entry"]["text"])

    def open(self, url):
        self.call("Page.navigate", url=url)

    def size(self, width, height, dark=False, phone=False):
        """Size of the window, and what the user prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def value(self, expression):
        """Value of an expression of JavaScript."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in reply:
            raise RuntimeError(f"{expression}: {reply['exceptionDetails']['text']}")
        return reply["result"].get("value")

    def wait(self, expression, timeout_s=20):
        """Waits until an expression is true; returns its value."""
        end = time.monotonic() + timeout_s
        while not (value := self.value(expression)):
            if time.monotonic() > end:
                raise RuntimeError(f"the page did not come to: {expression}")
            time.sleep(0.1)
        return value

    def contrast(self):
        """The least contrast of a visible text to its background, and the text."""
        return self.value(CONTRAST)

    def picture(self, path):
        """Saves the whole page as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        Path(path).write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()
