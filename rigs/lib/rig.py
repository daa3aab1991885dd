"""What every rig needs: packages, processes, namespaces, measuring, and checks that print what they saw.

A rig is a program `rigs/NAME/run` that ends with `rig.main("NAME", __doc__, body)`. `body(rig)` is
called with a `Rig`; when it returns, fails or is interrupted, everything started through the `Rig` is
gone again: processes, namespaces, interfaces, temporary files.

Exit status: 0 passed, 1 failed, 2 misused, 77 skipped (the last line then says what is missing and how to get it).

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "lib"))
    import rig

    def body(r):
        rig.need_packages(["iperf3"])
        switch = r.start("pvswitch", [r.pvswitch, "run", "--port", "a=null"])
        switch.wait_line("ready", 10)
        r.check("switch is up", switch.alive())

    rig.main("example", __doc__, body)
"""

import argparse
import contextlib
import ctypes
import fcntl
import functools
import http.client
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
RIGS = ROOT / "rigs"
CACHE = RIGS / ".cache"  # fetched packages and built guest images; safe to delete
OUT = RIGS / "out"  # logs of the last run of each rig

SKIPPED = 77
PR_SET_PDEATHSIG = 1
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class Skip(Exception):
    """The rig cannot run here. The text says what is missing and how to get it."""


class Failure(Exception):
    """The rig cannot continue: a peer died, a time-out passed, a command failed."""


class NotBegun(Failure):
    """A test of iperf3 that did not begin: its server was not ready."""


# ---------------------------------------------------------------- packages


def is_root():
    return os.geteuid() == 0


def need_root(why):
    if not is_root():
        raise Skip(f"root, to {why}; run this rig as root (sudo {RIGS.relative_to(ROOT)}/run)")


def installed(package):
    answer = subprocess.run(
        ["dpkg-query", "-W", "-f", "${db:Status-Status}", package], capture_output=True, text=True
    )
    return answer.returncode == 0 and answer.stdout == "installed"


def need_packages(packages):
    """Installs the Debian packages that are missing, or skips the rig with the command that would."""
    if not shutil.which("dpkg-query"):
        raise Skip(f"a Debian system; this rig uses the packages {' '.join(packages)}")
    missing = [p for p in packages if not installed(p)]
    if not missing:
        return
    by_hand = f"packages {' '.join(missing)}; install them: sudo apt-get install {' '.join(missing)}"
    if not is_root() or not shutil.which("apt-get"):
        raise Skip(by_hand)
    print(f"installing {' '.join(missing)} ...", flush=True)
    install = [
        "apt-get", "install", "-y", "-q", "--no-install-recommends",
        "-o", "DPkg::Lock::Timeout=300", *missing,
    ]  # fmt: skip
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    for attempt in ("as is", "after an update of the package lists"):
        done = subprocess.run(install, env=environment, capture_output=True, text=True)
        if done.returncode == 0:
            return
        if attempt == "as is":
            subprocess.run(["apt-get", "update", "-q"], capture_output=True)
    raise Skip(f"{by_hand} (apt-get said: {last_line(done.stderr)})")


@contextlib.contextmanager
def cache(name):
    """The folder of that name for what is fetched and built once, held against other rigs until the block ends."""
    folder = CACHE / name
    folder.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def unpack_packages(packages, into):
    """Fetches packages and unpacks them below the folder `into`, without installing; returns the folder.

    No root needed. What was unpacked once is kept; delete `rigs/.cache` to fetch afresh.
    """
    into = Path(into)
    stamp = into / ".packages"
    wanted = "\n".join(sorted(packages))
    if stamp.exists() and stamp.read_text() == wanted:
        return into
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise Skip(f"apt-get and dpkg, to fetch the packages {' '.join(packages)}; use a Debian system")
    print(f"fetching {' '.join(packages)} ...", flush=True)
    shutil.rmtree(into, ignore_errors=True)
    debs = into / ".debs"
    debs.mkdir(parents=True)
    # As root apt-get would drop to a user that may not write here; it then works, but warns.
    fetch = ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", *packages]
    done = subprocess.run(fetch, cwd=debs, capture_output=True, text=True)
    if done.returncode != 0 and is_root():
        subprocess.run(["apt-get", "update", "-q"], capture_output=True)
        done = subprocess.run(fetch, cwd=debs, capture_output=True, text=True)
    if done.returncode != 0:
        raise Skip(
            f"packages {' '.join(packages)}; apt-get download said: {last_line(done.stderr)};"
            " run: sudo apt-get update"
        )
    for deb in sorted(debs.glob("*.deb")):
        run(["dpkg", "-x", str(deb), str(into)])
    shutil.rmtree(debs)
    stamp.write_text(wanted)
    return into


def newer_kernel(release, at_least, into):
    """Unpacks below `into` the newest cloud kernel of another Debian release, of at least that version, without
    installing; from the mirror that this system has. Returns the folder. No root needed."""
    into = Path(into)
    stamp = into / ".packages"
    if stamp.exists():
        return into
    missing = f"a kernel of {'.'.join(map(str, at_least))} or later, from Debian's {release}"
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise Skip(f"{missing}; use a Debian system")
    targets = run(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Label: Debian"], check=False).stdout.split()
    if not targets:
        raise Skip(f"{missing}; this system has no mirror of Debian")
    print(f"fetching a kernel of {release} ...", flush=True)
    shutil.rmtree(into, ignore_errors=True)
    lists, debs = into / ".lists", into / ".debs"
    for folder in (lists / "partial", debs / "partial"):
        folder.mkdir(parents=True)
    source = into / "apt.list"
    source.write_text(f"deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {targets[0]} {release} main\n")
    options = ["APT::Sandbox::User=root", f"Dir::Etc::sourcelist={source}", "Dir::Etc::sourceparts=/dev/null",
               "Dir::Etc::preferencesparts=/dev/null", f"Dir::State::Lists={lists}", f"Dir::Cache={debs}"]  # fmt: skip
    words = [word for option in options for word in ("-o", option)]
    done = run(["apt-get", *words, "update", "-q"], check=False)
    known = run(["apt-cache", *words, "dumpavail"], check=False).stdout
    found = {}
    for block in known.split("\n\n"):
        version = re.search(r"^Package: linux-image-(\d+)\.(\d+)\.(\d+)\S*-cloud-amd64$", block, re.MULTILINE)
        size = re.search(r"^Size: (\d+)$", block, re.MULTILINE)
        # One of a few kilobytes only names others.
        if version and size and int(size[1]) > 1e6 and tuple(map(int, version.groups())) >= at_least:
            found[tuple(map(int, version.groups()))] = re.search(r"^Package: (\S+)$", block, re.MULTILINE)[1]
    if not found:
        raise Skip(f"{missing}; apt-get said: {last_line(done.stderr) or 'nothing'}")
    done = run(["apt-get", *words, "download", "-q", found[max(found)]], cwd=debs, check=False, timeout_s=600)
    for deb in debs.glob("*.deb"):
        run(["dpkg", "-x", deb, into])
        stamp.write_text(deb.name)
    shutil.rmtree(debs)
    shutil.rmtree(lists)
    if not stamp.exists():
        raise Skip(f"{missing}; apt-get said: {last_line(done.stderr)}")
    return into


def dependency(package, pattern):
    """The first dependency of a package whose name matches: the real kernel behind linux-image-amd64."""
    for attempt in ("as is", "after an update of the package lists"):
        listing = subprocess.run(["apt-cache", "depends", package], capture_output=True, text=True).stdout
        for name in re.findall(r"Depends: (\S+)", listing):
            if re.fullmatch(pattern, name):
                return name
        if attempt == "as is" and is_root():
            subprocess.run(["apt-get", "update", "-q"], capture_output=True)
    raise Skip(f"package lists that know {package}; run: sudo apt-get update")


def need_hugepages(count):
    """At least `count` hugepages of 2 MiB, and never fewer than there were: other rigs may run beside."""
    setting = Path("/proc/sys/vm/nr_hugepages")
    if not setting.exists():
        raise Skip("a kernel with hugepages (CONFIG_HUGETLBFS)")
    if (got := int(setting.read_text())) < count:
        need_root("reserve hugepages")
    for _ in range(5):
        if got >= count:
            return
        setting.write_text(str(count))
        got = int(setting.read_text())
        # Free memory may be in pieces, or be the page cache.
        for request in ("drop_caches", "compact_memory"):
            path = setting.parent / request
            if got < count and path.exists():
                path.write_text("1")
    if got < count:
        raise Skip(f"{count} hugepages, the kernel gave {got}; free memory or set vm.nr_hugepages at boot")


def reserve_hugepages(r, count):
    """The same until the rig ends."""
    setting = Path("/proc/sys/vm/nr_hugepages")
    if setting.exists():
        before = setting.read_text()
        r.undo(lambda: setting.write_text(before))
    need_hugepages(count)


def find_pvswitch(given):
    """The program under test: the path given, or the release build of this tree, built when absent."""
    if given:
        path = Path(given).resolve()
        if not os.access(path, os.X_OK):
            raise Failure(f"--pvswitch {given}: no such program; build it: cargo build --release -p pvswitch")
        return str(path)
    target = Path(os.environ.get("CARGO_TARGET_DIR", "target"))
    path = (ROOT / target).resolve() / "release" / "pvswitch"
    if not path.exists():
        if not shutil.which("cargo"):
            raise Skip(f"{path}; install the Rust toolchain (rustup.rs), or name a program: --pvswitch PATH")
        print("building pvswitch (cargo build --release -p pvswitch) ...", flush=True)
        done = subprocess.run(
            ["cargo", "build", "--release", "--bin", "pvswitch"], cwd=ROOT, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise Failure(f"cargo build --release failed:\n{done.stderr[-2000:]}")
    return str(path)


# ---------------------------------------------------------------- commands and processes


def last_line(text):
    lines = text.strip().splitlines()
    return lines[-1] if lines else "nothing"


def run(command, timeout_s=60, netns=None, check=True, **options):
    """Runs a command to its end and returns it with its output; a failure names the command and its last output."""
    command = in_netns(netns, [str(c) for c in command])
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, **options)
    except subprocess.TimeoutExpired:
        raise Failure(f"{shlex.join(command)}: no end after {timeout_s} s") from None
    except FileNotFoundError:
        raise Failure(f"{command[0]}: no such program; install it") from None
    if check and done.returncode != 0:
        words = last_line(done.stderr or done.stdout)
        raise Failure(f"{shlex.join(command)}: exit status {done.returncode}: {words}")
    return done


def in_netns(netns, command):
    return ["ip", "netns", "exec", netns, *command] if netns else command


def pinned(cpus, command):
    """The command on these CPUs only ("0", "0,1"); unpinned where the machine lacks one of them."""
    wanted = {int(c) for c in str(cpus).split(",")}
    if not wanted <= os.sched_getaffinity(0):
        return command
    return ["taskset", "-c", str(cpus), *command]


def has_interface(name, netns=None):
    return run(["ip", "link", "show", name], netns=netns, check=False).returncode == 0


def wait_interface(name, netns=None, timeout_s=30):
    """Waits until there is an interface of this name."""
    wait_for(f"interface {name}", lambda: has_interface(name, netns), timeout_s)


def wait_for(what, condition, timeout_s=30, every_s=0.05):
    """Waits until `condition()` is true and returns its value; a time-out says what was waited for."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise Failure(f"{what}: not within {timeout_s} s")
        time.sleep(every_s)


def wait_socket(path, timeout_s=20):
    """Waits until a Unix socket exists. Does not connect: a vhost-user back-end serves one peer only."""
    wait_for(f"socket {path}", lambda: os.path.exists(path), timeout_s)


def connect_when_listening(what, path, process, timeout_s=30):
    """A connection to the Unix socket of a process that was started. A socket file exists before its owner listens."""

    def attempt():
        process.need_alive()
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return None
        return connection

    return wait_for(what, attempt, timeout_s)


class Control(http.client.HTTPConnection):
    """A connection to the control socket of a switch, kept open: a request starts no process."""

    def __init__(self, path, timeout_s=20):
        super().__init__("localhost", timeout=timeout_s)
        self.path = str(path)

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)

    def get(self, path):
        self.request("GET", path)
        response = self.getresponse()
        reply = json.loads(response.read())
        if response.status != 200:
            raise Failure(f"{path}: {reply['detail']}")
        return reply


def wait_port(port, netns=None, timeout_s=20):
    """Waits until something listens on a TCP port, seen from outside: connecting would disturb it."""
    listening = ["ss", "-Hltn", f"sport = :{port}"]
    wait_for(f"TCP port {port}", lambda: run(listening, netns=netns, check=False).stdout.strip(), timeout_s)


def remove_stale_netns():
    """Removes the namespaces of rigs that were killed before they could clean up."""
    for line in run(["ip", "netns", "list"], check=False).stdout.splitlines():
        match = re.match(r"(pvs(\d+)-\S+)", line)
        if match and not os.path.exists(f"/proc/{match[2]}"):
            run(["ip", "netns", "del", match[1]], check=False)


class Process:
    """A running program with a log. Ends with the rig, even when the rig itself is killed."""

    def __init__(self, name, command, log_path, netns=None, stdin=None, env=None, cpus=None):
        self.name = name
        self.log_path = Path(log_path)
        command = [str(c) for c in command]
        if cpus is not None:
            command = pinned(cpus, command)
        command = in_netns(netns, command)
        with open(self.log_path, "ab") as log:
            log.write(f"# {shlex.join(command)}\n".encode())
            log.flush()
            self.log_start = log.tell()
            try:
                self.popen = subprocess.Popen(
                    command, stdin=stdin or subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    start_new_session=True, preexec_fn=die_with_parent,
                    env=dict(os.environ, **env) if env else None,
                )  # fmt: skip
            except FileNotFoundError:
                raise Failure(f"{name}: {command[0]}: no such program") from None

    @property
    def pid(self):
        return self.popen.pid

    def alive(self):
        return self.popen.poll() is None

    def log(self):
        """What the process has written so far."""
        with open(self.log_path, "rb") as log:
            log.seek(self.log_start)
            return log.read().decode(errors="replace")

    def wait_line(self, pattern, timeout_s=20):
        """Waits for a line matching the pattern in the log; returns the match."""

        def found():
            match = re.search(pattern, self.log(), re.MULTILINE)
            if not match and not self.alive():
                raise Failure(f"{self.name} ended ({self.popen.returncode}) before it wrote {pattern!r}:"
                              f" {last_line(self.log())} (whole log: {self.log_path})")  # fmt: skip
            return match

        return wait_for(f"{self.name}: line {pattern!r} in {self.log_path}", found, timeout_s)

    def wait_socket(self, path, timeout_s=20):
        """Waits until the process has made its Unix socket; says so at once if it ended instead."""

        def there():
            self.need_alive()
            return os.path.exists(path)

        wait_for(f"{self.name}: socket {path}", there, timeout_s)

    def need_alive(self):
        if not self.alive():
            raise Failure(f"{self.name} ended ({self.popen.returncode}): {last_line(self.log())}"
                          f" (whole log: {self.log_path})")  # fmt: skip

    def write(self, text):
        """Types a line into the process; it must have been started with stdin=subprocess.PIPE."""
        self.popen.stdin.write(text.encode())
        self.popen.stdin.flush()

    def kill(self):
        """SIGKILL, as a crash would be."""
        self._signal_group(signal.SIGKILL)
        self.popen.wait()

    def stop(self, timeout_s=10):
        """SIGTERM and its exit status; SIGKILL if it does not listen, and None."""
        if self.alive():
            self._signal_group(signal.SIGTERM)
            self.resume()
            try:
                self.popen.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
                return None
        return self.popen.returncode

    def pause(self):
        """Stops it where it is, until `resume`."""
        self._signal_group(signal.SIGSTOP)

    def resume(self):
        self._signal_group(signal.SIGCONT)

    def cpu_seconds(self):
        return cpu_seconds(self.pid)

    def _signal_group(self, number):
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass


def die_with_parent():
    """Runs in the child: the kernel ends it when the rig dies without a chance to clean up."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# ---------------------------------------------------------------- measuring


def cpu_seconds(pid):
    """User and system time of a process, all its threads, in seconds."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    fields = stat.rpartition(")")[2].split()  # the program's name may hold spaces and brackets
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def cpu_percent(pid, seconds):
    """Per cent of one core that a process used, over the next so many seconds."""
    used, begun = cpu_seconds(pid), time.monotonic()
    time.sleep(seconds)
    return 100 * (cpu_seconds(pid) - used) / (time.monotonic() - begun)


def cpu_ns(pid):
    """CPU time of a process, all its living threads, in ns: finer than the ticks of `cpu_seconds`."""
    return sum(schedstat(pid, thread)[0] for thread in threads(pid))


def threads(pid):
    try:
        return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []


def schedstat(pid, thread):
    """Time that a thread ran, and time that it was runnable without a CPU, in ns."""
    try:
        ran, waited = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[:2]
        return int(ran), int(waited)
    except (OSError, ValueError):
        return 0, 0


def machine_busy_s():
    """Seconds that all CPUs together were busy or taken away by the hypervisor, since the boot."""
    fields = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / CLOCK_TICKS


class Distance:
    """How far two CPUs are from each other, in ns for the round trip of a cache line (dpdk/distance.c).

    On a shared machine it changes within minutes, and every figure of two cores with it. It is reported beside
    figures; no run is left out for it, or distinguished (docs/design/0040-evidence.md).
    """

    def __init__(self, cpu_a, cpu_b):
        self.cpus = [str(cpu_a), str(cpu_b)]
        OUT.mkdir(parents=True, exist_ok=True)
        self.program = OUT / "distance"
        run(["cc", "-O2", "-pthread", "-o", self.program, RIGS / "dpdk" / "distance.c"])

    def now(self):
        return float(run([self.program, *self.cpus]).stdout)


def syscalls(pid, seconds):
    """System calls that the threads of a process made during the next seconds: {"thread: call": count}.

    Calls that merely began before and still wait (an idle epoll_wait) are not counted.
    """
    with tempfile.NamedTemporaryFile("r", suffix=".strace") as log:
        strace = subprocess.Popen(
            ["strace", "-f", "-ttt", "-o", log.name, "-p", str(pid)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        # strace attaches thread by thread and interrupts each one's waiting call, which the kernel
        # then restarts: wait until that has settled, and count from there.
        def missing():
            if strace.poll() is not None:
                raise Failure(f"strace -p {pid}: {last_line(strace.stderr.read())}")
            traced = {line.split()[0] for line in Path(log.name).read_text().splitlines() if line}
            # Listed each time: one that ends meanwhile never appears.
            return [f"{thread_name(pid, thread)} ({thread})" for thread in threads(pid) if str(thread) not in traced]

        try:
            wait_for(f"strace -p {pid}", lambda: not missing(), 60)
        except Failure as error:
            raise Failure(f"{error}: no call of {', '.join(missing()) or 'a thread that ended'}") from None
        time.sleep(1)
        begun = time.time()
        time.sleep(seconds)
        ended = time.time()
        strace.send_signal(signal.SIGINT)
        strace.wait(60)
        counts = {}
        for line in log:
            match = re.match(r"(\d+)\s+(\d+\.\d+) (?:<\.\.\. (\w+) resumed|(\w+)\()", line)
            if match and begun <= float(match[2]) <= ended:
                name = f"{thread_name(pid, match[1])}: {match[3] or match[4]}"
                counts[name] = counts.get(name, 0) + 1
        return counts


def thread_name(pid, thread):
    try:
        return Path(f"/proc/{pid}/task/{thread}/comm").read_text().strip()
    except OSError:
        return f"thread {thread}"


def read_iperf3(text):
    """The figures of `iperf3 -J`: bits_per_s as received, retransmits (TCP), lost and sent packets (UDP)."""
    start = text.find("{")
    if start < 0:
        raise Failure(f"iperf3 printed no JSON: {last_line(text)}")
    try:
        report, _ = json.JSONDecoder().raw_decode(text[start:])
    except json.JSONDecodeError as error:
        raise Failure(f"iperf3 printed broken JSON ({error})") from None
    if "error" in report:
        begun = report.get("start", {}).get("connected")
        raise (Failure if begun else NotBegun)(f"iperf3: {report['error']}")
    end = report["end"]
    if "sum_received" in end:
        received, sent = end["sum_received"], end["sum_sent"]
    else:  # UDP before iperf3 3.16: one sum, with the receiver's loss
        received = sent = end["sum"]
    bits_per_s = received["bits_per_second"]
    lost = received.get("lost_packets", 0)
    packets = received.get("packets", 0)
    if "sum" in end and packets:
        bits_per_s = end["sum"]["bits_per_second"] * (1 - lost / packets)
    return {
        "bits_per_s": bits_per_s,
        "retransmits": sent.get("retransmits", 0),
        "lost": lost,
        "packets": packets,
    }


def iperf3(address, *options, seconds=4, netns=None, port=5201, timeout_s=None):
    """Runs an iperf3 client against a server that listens already; without `seconds`, `options` say how much it sends."""
    length = ["-t", seconds] if seconds else []
    command = ["iperf3", "-J", "-c", address, "-p", port, *length, *options]

    def test():
        done = run(command, timeout_s=timeout_s or (seconds or 30) + 30, netns=netns, check=False)
        return read_iperf3(done.stdout or done.stderr)

    return once_begun(test)


def once_begun(test, timeout_s=60):
    """What `test` returns, which runs iperf3; again while that does not begin.

    An iperf3 server closes its listening socket after each test and opens it again: a client that comes
    between the two is refused or reset, on a busy machine for seconds.
    """
    end = time.monotonic() + timeout_s
    while True:
        try:
            return test()
        except NotBegun:
            if time.monotonic() > end:
                raise
            time.sleep(0.5)


def overruns(snmp):
    """Datagrams that found their socket full, in the text of /proc/net/snmp: a busy machine's loss, not the network's."""
    lines = [line.split() for line in snmp.splitlines()]
    names, values = [line for line in lines if line and line[0] == "Udp:"]
    return int(values[names.index("RcvbufErrors")])


def check_udp(r, words, address, *options, netns=None, receiver=None, devices, switch):
    """UDP at 100 Mbit/s: no datagram is lost but where a full queue counted it, because its reader had no CPU.

    `receiver` is the namespace of the receiving end, `devices` are pairs of a namespace and an interface on
    the way, `switch` is the program and its control socket.
    """

    def losses():
        snmp = run(["cat", "/proc/net/snmp"], netns=receiver).stdout
        file = "/sys/class/net/{}/statistics/tx_dropped"
        dropped = [run(["cat", file.format(device)], netns=where).stdout for where, device in devices]
        program, control = switch
        shown = json.loads(run([program, "ctl", "--control", control, "--json", "stats"]).stdout)
        queues = [queue for port in shown["ports"] for queue in port["egress"]]
        return {"in the receiver's socket": overruns(snmp), "in interfaces": sum(map(int, dropped)),
                "in the switch": sum(queue["lost_no_room"] + queue["lost_aged"] for queue in queues)}  # fmt: skip

    before = losses()
    result = iperf3(address, "-u", "-b", "100M", "-l", "1400", *options, seconds=2, netns=netns)
    lost = {place: count - before[place] for place, count in losses().items()}
    counted = ", ".join(f"{count} {place}" for place, count in lost.items() if count)
    r.check(f"{words} at 100 Mbit/s: none lost but where a full queue counted it",
            result["packets"] > 0 and result["lost"] <= sum(lost.values()),
            f"{iperf3_words(result)}; counted: {counted or 'none'}")  # fmt: skip


def iperf3_words(result):
    """One line for people."""
    words = f"{rate(result['bits_per_s'])}"
    if result["packets"]:
        return f"{words}, {result['lost']} of {result['packets']} datagrams lost"
    return f"{words}, {result['retransmits']} retransmissions"


def rate(bits_per_s):
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_s >= size:
            return f"{bits_per_s / size:.2f} {unit}"
    return f"{bits_per_s:.0f} bit/s"


PING_PACKAGE = "fping"


def ping(address, count, *, netns=None, size=56, every_ms=50, wait_s=5, source=None):
    """Sends echo requests and awaits the reply of each for `wait_s`; returns how many came, and a text for people.

    ping of iputils waits after its last request for two of the longest round trips only, so that on a busy
    machine it takes a reply that is on its way for a lost one.
    """
    command = ["fping", "-q", "-c", count, "-p", every_ms, "-t", wait_s * 1000, "-b", size]
    done = run([*command, *(["-S", source] if source else []), address], netns=netns, check=False)
    match = re.search(r"xmt/rcv/%loss = (\d+)/(\d+)/.*?(?:min/avg/max = (\S+))?$", done.stderr.strip())
    if not match:
        raise Failure(f"fping printed no summary: {last_line(done.stderr)}")
    return int(match[2]), f"{match[2]} of {match[1]}" + (f", min/avg/max {match[3]} ms" if match[3] else "")


def read_ping(text):
    """Sent and received of a ping, iputils or busybox."""
    match = re.search(r"(\d+) packets transmitted, (\d+) (?:packets )?received", text)
    if not match:
        raise Failure(f"ping printed no summary: {last_line(text)}")
    return int(match[1]), int(match[2])


def longest_ping_ms(text):
    """The longest round trip of a ping, iputils or busybox."""
    match = re.search(r"min/avg/max(?:/mdev)? = [\d.]+/[\d.]+/([\d.]+)", text)
    if not match:
        raise Failure(f"ping printed no round trips: {last_line(text)}")
    return float(match[1])


@functools.cache
def dev_build(name):
    """A program with debug assertions, as the tests use it; up to date.

    With all tests: alone, with its own features only, half of all dependencies would be built again.
    """
    run(["cargo", "test", "-q", "--workspace", "--no-run"], timeout_s=1800, cwd=ROOT)
    target = Path(os.environ.get("CARGO_TARGET_DIR", "target"))
    return (ROOT / target).resolve() / "debug" / name


def program_with_lab(r):
    """The program under test if the lab is beside it, otherwise one with debug assertions, and its lab."""
    if lab_beside(r.pvswitch).exists():
        return r.pvswitch
    dev_build("pvswitch-lab")
    return dev_build("pvswitch")


def lab_beside(pvswitch):
    return Path(pvswitch).with_name("pvswitch-lab")


def lab_with(r, guest, *options):
    """A small piece of the lab's study `fairness` with such guests: both ends are kernels with their own driver."""
    out = r.out / "lab"
    cell = ["--only", "guests=2", "--only", "direction=to-guest", "--only", "variant=shared"]
    words = ["--smallest", "--repeats", "1", "--seconds", "1", "--out", out, *cell, "--guest", guest, *options]
    done = run([program_with_lab(r), "lab", "run", "fairness", *words], timeout_s=120, check=False)
    (r.out / "lab.log").write_text(done.stderr)
    gbits = 0.0
    if done.returncode == 0:
        names, values = (line.split(",") for line in (out / "runs.csv").read_text().splitlines()[:2])
        gbits = float(values[names.index("throughput")])
    r.check(f"lab run --guest {guest}: a run with traffic", gbits > 0,
            f"{gbits:.2f} Gbit/s" if gbits else last_line(done.stderr))  # fmt: skip


def median_and_spread(values):
    """Median, smallest and largest."""
    return statistics.median(values), min(values), max(values)


def median_interval(values):
    """The 95 % interval of the percentile bootstrap of the median, exact, as the lab's `median_interval`, with which a
    test of the lab compares it; None of fewer than five values."""
    if len(values) < 5:
        return None
    least, below = None, 0.0
    for median, chance in sorted(resampled_medians(sorted(values))):
        below += chance
        if least is None and below > 0.025:
            least = median
        if below >= 0.975 - 1e-12:
            return least, median


def resampled_medians(values):
    """Every median that a resample of these sorted values can have, with its probability."""
    n, half = len(values), len(values) // 2

    def at_least(k, p):
        return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))

    # The middle draw is value i if more than half of the draws are at most that, and not all of these are less.
    if n % 2:
        return [(values[i], at_least(half + 1, (i + 1) / n) - at_least(half + 1, i / n)) for i in range(n)]
    # The two draws in the middle are values i and j: half of the draws are at most i, the others at least j.
    medians = []
    for i in range(n):
        same = at_least(half, (i + 1) / n) - at_least(half, i / n)
        for j in range(i + 1, n):
            ways = (i + 1) ** half - i**half, (n - j) ** half - (n - j - 1) ** half
            chance = math.comb(n, half) * ways[0] * ways[1] / n**n
            medians.append(((values[i] + values[j]) / 2, chance))
            same -= chance
        medians.append((values[i], max(same, 0.0)))
    return medians


def ratio_words(ratios):
    """The median of pairs, with its 95 % interval from five pairs on, else with the least and the greatest."""
    interval = median_interval(ratios)
    low, high = interval or (min(ratios), max(ratios))
    of = "" if interval else "range "
    return f"{statistics.median(ratios):.2f} ({of}{low:.2f}-{high:.2f})"


def new_folder(path):
    """A folder that results can be stored in; refused before anything is measured."""
    if os.path.exists(path) and (not os.path.isdir(path) or os.listdir(path)):
        raise argparse.ArgumentTypeError(f"{path} exists: name a new folder, or remove it")
    return path


def results_option(parser):
    parser.add_argument("--results", metavar="DIR", type=new_folder, help="store all runs as a folder of results of the lab (docs/results)")


class Runs:
    """Runs whose figures documents quote: each, in the order measured. `store` makes a folder of results of them.

    `axes` are names with values; values of the last are compared, the first is their base. `measures` are names
    with unit, which direction is better (more, less, neither), and what it is.
    """

    def __init__(self, about, axes, measures, seconds, switch_cpus, guest_cpus, packages=()):
        self.measured = {
            "seconds": seconds, "switch_cpus": switch_cpus, "guest_cpus": guest_cpus,
            "versions": {name: package_version(name) for name in packages},
            "facts": {"about": about, "measures": [
                {"name": name, "unit": unit, "better": better, "about": what}
                for name, (unit, better, what) in measures.items()]},
            "axes": [{"name": name, "values": [str(value) for value in values]} for name, values in axes.items()],
            "runs": [],
        }  # fmt: skip

    def add(self, cell, repeat, figures, distance_ns=0, others_percent=0, again=False):
        """One run of a cell, in this round; `again`: of the control, see `in_turn`."""
        cell = {name: str(value) for name, value in cell.items()}
        self.measured["runs"].append({"cell": cell, "repeat": repeat, "again": again, "distance_ns": distance_ns,
                                      "others_percent": others_percent, "figures": figures})  # fmt: skip

    def say_noise(self, r):
        """How far equals differ: the control over the same cell of its round, by the first measure."""
        measure = self.measured["facts"]["measures"][0]["name"]
        runs = {(run["repeat"], run["again"], *run["cell"].values()): run["figures"][measure] for run in self.measured["runs"]}
        again = {key: figure for key, figure in runs.items() if key[1]}
        first = {key: runs.get((key[0], False, *key[2:])) for key in again}
        ratios = [again[key] / first[key] for key in again if first[key]]
        if ratios:
            r.say(f"A/A, {' '.join(next(iter(again))[2:])} over itself, {measure}: {ratio_words(ratios)}, n {len(ratios)}")

    def store(self, r):
        """Into the folder that `--results` names, if it does."""
        command = shlex.join([f"rigs/{r.name}/run", *without(sys.argv[1:], "--results", "--pvswitch")])
        text = json.dumps({"rig": r.name, "command": command, "program": str(r.pvswitch), **self.measured})
        file = r.out / "measured.json"
        file.write_text(text)
        if r.options.results:
            lab = lab_beside(r.pvswitch)
            if not lab.exists():
                raise Failure(f"--results: no {lab}; build it: cargo build --release -p pvswitch-lab --bin pvswitch-lab")
            r.say(run([lab, "import", file, "--out", r.options.results]).stdout.strip())


def in_turn(items, number, control=None):
    """Each item of a round, with whether it is the control (A/A): the same as an item, once more at the other end of
    the round. All of it backwards in every second round: a drift of the machine affects all alike."""
    turns = [(item, False) for item in items] + [(item, True) for item in items if item == control]
    return turns[:: -1 if number % 2 else 1]


def without(words, *options):
    """A command line without these options, each of which has a value."""
    left, words = [], iter(words)
    for word in words:
        if word in options:
            next(words, None)
        elif not word.startswith(tuple(f"{option}=" for option in options)):
            left.append(word)
    return left


def package_version(package):
    return run(["dpkg-query", "-W", "-f", "${Version}", package], check=False).stdout or "unknown"


# ---------------------------------------------------------------- the rig itself


class Rig:
    """One run of one rig: what it checked, and what has to be taken away afterwards."""

    def __init__(self, name, options):
        self.name = name
        self.options = options
        self.quick = options.quick
        self.out = OUT / name
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir(parents=True)
        # Sockets live in a short path: sun_path holds 107 bytes, and a checkout may lie deep.
        self.tmp = Path(tempfile.mkdtemp(prefix=f"pvswitch-{name}-"))
        self.failed = []
        self.passed = 0
        self._undo = []
        self._pvswitch = None

    @property
    def pvswitch(self):
        if self._pvswitch is None:
            self._pvswitch = find_pvswitch(self.options.pvswitch)
        return self._pvswitch

    def say(self, text):
        print(text, flush=True)

    def check(self, name, ok, detail=""):
        """Records and prints one result; returns whether it passed, so that a rig may continue or not."""
        print(f"{'ok  ' if ok else 'FAIL'}  {name}{f': {detail}' if detail != '' else ''}", flush=True)
        if ok:
            self.passed += 1
        else:
            self.failed.append(name)
        return bool(ok)

    def attempt(self, name, action):
        """Runs a group of checks; a time-out or dead peer in it fails the group, not the whole rig."""
        try:
            return action()
        except Failure as error:
            self.check(name, False, str(error))
            return None

    def undo(self, action):
        """Calls `action()` at the end, in reverse order, whatever happens."""
        self._undo.append(action)

    @contextlib.contextmanager
    def scope(self):
        """`with r.scope():` takes away what was started inside it when the block ends."""
        outside, self._undo = self._undo, []
        try:
            yield
        finally:
            inside, self._undo = self._undo, outside
            self._take_away(inside)

    def start(self, name, command, **options):
        """Starts a program whose log is rigs/out/RIG/NAME.log; it ends with the rig."""
        process = Process(name, command, self.out / f"{name}.log", **options)
        self.undo(process.stop)
        return process

    def netns(self, name):
        """A fresh network namespace with its loopback up; returns its real name, unique to this run."""
        need_root("make network namespaces")
        remove_stale_netns()
        real = f"pvs{os.getpid()}-{name}"
        run(["ip", "netns", "add", real])
        self.undo(lambda: run(["ip", "netns", "del", real], check=False))
        run(["ip", "link", "set", "lo", "up"], netns=real)
        # IPv6 sends by itself (neighbour discovery), and an idle guest must send nothing.
        for scope in ("all", "default"):
            run(["sysctl", "-qw", f"net.ipv6.conf.{scope}.disable_ipv6=1"], netns=real, check=False)
        return real

    def link(self, name):
        """Removes this interface at the end, if it is still there then."""
        self.undo(lambda: run(["ip", "link", "del", name], check=False))
        return name

    def socket_path(self, name):
        return str(self.tmp / name)

    def close(self):
        self._take_away(self._undo)
        shutil.rmtree(self.tmp, ignore_errors=True)

    @staticmethod
    def _take_away(actions):
        while actions:
            action = actions.pop()
            try:
                action()
            except Exception as error:  # clean up the rest all the same
                print(f"while cleaning up: {error}", file=sys.stderr)


def main(name, doc, body, arguments=None, misuse=None):
    """Parses the options, runs `body(rig)`, cleans up, and exits with 0, 1, 2 or 77.

    `arguments(parser)` may add options; they arrive as `rig.options`. `misuse(options)` says what of them
    does not go together, if anything; nothing is then done, and the last run's files stay.
    """
    parser = argparse.ArgumentParser(prog=f"rigs/{name}/run", description=doc.strip().splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the short form, as CI runs it")
    parser.add_argument("--pvswitch", metavar="PATH", help="the program under test (default: this tree's release build)")
    if arguments:
        arguments(parser)
    options = parser.parse_args()
    if why := misuse and misuse(options):
        parser.error(why)
    # A signal becomes an exception, so that the one clean-up path serves all ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    begun = time.monotonic()
    rig = Rig(name, options)
    try:
        body(rig)
    except Skip as missing:
        rig.close()
        print(f"SKIP: {missing}", flush=True)
        sys.exit(SKIPPED)
    except Failure as error:
        rig.check("run to the end", False, str(error))
    finally:
        rig.close()
    seconds = time.monotonic() - begun
    if not rig.passed and not rig.failed:
        rig.check("any check at all", False, "the rig checked nothing")
    verdict = f"{name}: {rig.passed} passed, {len(rig.failed)} failed, {seconds:.0f} s; logs in rigs/out/{name}"
    print(verdict, flush=True)
    sys.exit(1 if rig.failed else 0)
