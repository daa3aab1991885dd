"""Virtual machines that are driven command by command: the agent inside them, and its caller."""

import lzma
import re
import struct
import time

import rig

# The agent, in a busybox shell, once fd 3 is open for both ways: reads "ID SECONDS COMMAND", runs
# it, replies with its output between two marks.
SHELL = r"""
echo "READY" >&3
while read -r id seconds command <&3; do
    timeout "$seconds" sh -c "$command" > /tmp/.answer 2>&1 < /dev/null
    status=$?
    { echo "BEGIN $id"; cat /tmp/.answer; echo "END $id $status"; } >&3
done
"""

# A second of an emulated machine that counts instructions takes up to so many of ours on a busy host.
SECOND_MAX_S = 6


def plain_kernel(path):
    """The ELF image inside a vmlinuz: unpacking it under emulation takes longer than the whole boot.

    Setup sectors at 0x1f1, offset and length of the payload at 0x248 (Linux x86 boot protocol).
    """
    packed = path.read_bytes()
    offset, length = struct.unpack_from("<II", packed, 0x248)
    payload = packed[(packed[0x1F1] + 1) * 512 + offset :][:length]
    if not payload.startswith(b"\xfd7zXZ"):
        return packed  # packed in another way: it boots as well, only more slowly
    return lzma.LZMADecompressor().decompress(payload)


class Agent:
    """The agent of one machine, behind a Unix socket that `process` listens on."""

    def __init__(self, r, name, path, process):
        self.name, self.process = name, process
        self._unread = b""
        self._commands = 0
        self._socket = rig.connect_when_listening(f"agent socket of {name}", path, process)
        r.undo(self._socket.close)

    def close(self):
        """For another agent at the same socket: it serves one at a time."""
        self._socket.close()

    def wait_ready(self, timeout_s=60):
        """Waits until the machine has booted, also after a reboot."""
        self._read_until(b"READY\n", timeout_s)
        return self

    def run(self, command, timeout_s=20):
        """Runs a shell command there; returns its exit status and output."""
        self._commands += 1
        number = self._commands
        self._socket.sendall(f"{number} {timeout_s} {command}\n".encode())
        # The agent's own time-out ends the command; ours comes later, for a machine that hangs.
        limit_s = SECOND_MAX_S * timeout_s + 10
        self._read_until(f"BEGIN {number}\n".encode(), limit_s, command)
        output = self._read_until(f"END {number} ".encode(), limit_s, command)
        status = self._read_until(b"\n", 5)
        return int(status), output.decode(errors="replace")

    def must(self, command, timeout_s=20):
        """The same for a command that has to succeed; returns its output."""
        status, output = self.run(command, timeout_s)
        if status != 0:
            raise rig.Failure(f"{self.name}: {command}: exit status {status}: {rig.last_line(output)}")
        return output

    def send(self, command):
        """Sends a command and does not wait for its reply. A busy machine may take seconds to start it."""
        self._socket.sendall(f"0 20 {command}\n".encode())

    def _read_until(self, mark, timeout_s, command=""):
        deadline = time.monotonic() + timeout_s
        while mark not in self._unread:
            self.process.need_alive()
            left = deadline - time.monotonic()
            if left <= 0:
                raise rig.Failure(
                    f"{self.name}: {command}: no {mark.decode().strip()!r} within {timeout_s} s;"
                    f" its last output: {rig.last_line(self._unread.decode(errors='replace'))!r}"
                )
            self._socket.settimeout(min(left, 1))
            try:
                self._unread += self._socket.recv(65536)
            except TimeoutError:
                continue
        before, _, self._unread = self._unread.partition(mark)
        return before


class Stream:
    """One TCP connection of iperf3 between two machines, until `stop`: what happens meanwhile must not end it.

    How long a gap may last nobody can say: a sender's retransmission timer doubles with each attempt.
    """

    GAP_MAX_S = 90  # a sender whose attempts were all lost tries again after 51 s, and after 102 s

    def __init__(self, sender, address, what, options=""):
        self.sender, self.what = sender, what
        sender.must(f"iperf3 -f m -i 1 --forceflush -c {address} -t 600 {options} > /tmp/tcp 2>&1 & echo $! > /run/tcp")
        self.wait(2)

    def rates(self):
        """Mbit/s in each second so far."""
        text = self.sender.must("cat /tmp/tcp")
        if "error" in text:
            raise rig.Failure(f"{self.what}: {rig.last_line(text)}")
        return [float(rate) for rate in re.findall(r" ([0-9.]+) Mbits/sec", text)]

    def wait(self, least):
        """Waits for `least` seconds more, the last two of them with traffic."""
        begun = len(self.rates())

        def continues():
            after = self.rates()[begun:]
            return len(after) >= least and min(after[-2:]) > 0

        rig.wait_for(f"{self.what}: TCP", continues, SECOND_MAX_S * self.GAP_MAX_S, 0.5)

    def stop(self):
        """Ends it; returns its Mbit/s in each second, in words."""
        rates = self.rates()
        self.sender.must("p=$(cat /run/tcp); kill -INT $p; while kill -0 $p; do sleep 0.1; done")
        return "Mbit/s each second: " + " ".join(f"{rate:.0f}" for rate in rates)
