#!/usr/bin/env python3
"""Adds a port to a running switch and removes it, watching events: python3 api.py CONTROL_SOCKET

The control socket speaks HTTP and JSON; the standard library is all that a client needs.
"""

import http.client
import json
import socket
import sys
from pathlib import Path


class Switch(http.client.HTTPConnection):
    """A connection to a control socket."""

    def __init__(self, path):
        super().__init__("localhost", timeout=15)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)

    def call(self, method, target, body=None):
        """Returns the reply; errors say what is wrong, where, and what to do."""
        headers = {"Content-Type": "application/json"} if body is not None else {}
        self.request(method, target, json.dumps(body) if body is not None else None, headers)
        response = self.getresponse()
        content = response.read()
        reply = json.loads(content) if content else None
        if response.status >= 400:
            raise RuntimeError(f"{response.status}: {reply['detail']} ({reply.get('field')}: {reply['remedy']})")
        return reply

    def events(self):
        """Returns an iterator over events; those since this call."""
        self.request("GET", "/v1/events")
        response = self.getresponse()
        lines = iter(response.readline, b"")
        return (json.loads(line[6:]) for line in lines if line.startswith(b"data: "))


def main(path):
    switch, watcher = Switch(path), Switch(path)
    events = watcher.events()
    status = switch.call("GET", "/v1/status")
    print(f"pvswitch {status['version']} with {len(status['ports'])} ports")
    guest = Path(path).absolute().with_name("guest.sock")
    port = {"kind": "vhost-user", "socket": str(guest), "queues": 2, "rate-in": "1Gbit"}
    switch.call("PUT", "/v1/ports/example", port)
    switch.call("PATCH", "/v1/ports/example", {"weight": 3})
    print("state:", switch.call("GET", "/v1/ports/example")["state"])
    try:
        switch.call("PATCH", "/v1/ports/example", {"weight": 1000})
    except RuntimeError as error:
        print("refused,", error)
    switch.call("DELETE", "/v1/ports/example")
    for event in events:
        print(event["seq"], event["event"], event.get("port", ""))
        if event["event"] == "port-removed" and event["port"] == "example":
            break


if __name__ == "__main__":
    main(*sys.argv[1:])
