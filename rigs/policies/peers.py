"""The same load points through DPDK's testpmd (net_vhost, io) and OVS-DPDK (NORMAL), and ours beside them."""

import os
import shutil
import time
from pathlib import Path

import rig
from bench import TAIL_S, WARM_S, Guest, latencies, receiver
from parts import Item, load_point, rate_name

HUGEPAGES = 700
RATES = [0, 1_000, 10_000, 100_000, 1_000_000, None]
OVS_DPDK = "/usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk"
OVS_SCHEMA = "/usr/share/openvswitch/vswitch.ovsschema"


def peers(bench):
    """Other back-ends under the same guests and rates."""
    rates = [RATES[0], RATES[2], RATES[3], RATES[5]] if bench.rig.quick else RATES
    ends = [
        ("pvswitch adaptive, cross", lambda b: Ours(b, "adaptive", "cross"), None),
        ("testpmd io", TestPmd, missing(["dpdk-dev"], "dpdk-testpmd")),
        ("pvswitch adaptive, switch", lambda b: Ours(b, "adaptive", "switch"), None),
        ("OVS-DPDK", lambda b: Ovs(b, 0), missing(["openvswitch-switch-dpdk"], OVS_DPDK)),
        ("OVS-DPDK, pmd-maxsleep 500", lambda b: Ovs(b, 500), missing(["openvswitch-switch-dpdk"], OVS_DPDK)),
    ]
    for name, start, skip in ends:
        yield Item("peers", {"backend": name}, lambda name=name, start=start: all_rates(bench, name, start, rates),
                   skip)  # fmt: skip


def missing(packages, program):
    if not rig.is_root():
        return "root, for hugepages"
    return None if shutil.which(program) else f"packages {' '.join(packages)}: sudo apt-get install {' '.join(packages)}"


def all_rates(bench, name, start, rates):
    answers = []
    with bench.rig.scope():
        end = start(bench)
        for rate in rates:
            answers.append(({"backend": name, "rate": rate_name(rate)}, end.point(rate)))
    return answers


class Ours:
    def __init__(self, bench, policy, forward):
        self.bench = bench
        self.how = (policy, forward)

    def point(self, rate):
        policy, forward = self.how
        before, self.bench.forward = self.bench.forward, forward
        try:
            with self.bench.rig.scope():
                return load_point(self.bench, policy, rate)
        finally:
            self.bench.forward = before


class Foreign:
    """A back-end that says little about itself: its busy thread is found by name and watched by /proc."""

    def point(self, rate):
        bench, seconds = self.bench, self.bench.seconds
        with bench.rig.scope():
            sink = receiver(bench, self.sockets[1])
            time.sleep(0.5)
            sender = Guest(bench, self.sockets[0], "sink" if rate == 0 else "send", 0, peer=None if rate == 0 else 1,
                           rate=rate or None, duration=0.5 + WARM_S + seconds + TAIL_S)  # fmt: skip
            time.sleep(0.5 + WARM_S)
            before = self._look(sink, sender)
            time.sleep(seconds)
            after = self._look(sink, sender)
            span = after["time"] - before["time"]
            sent = sender.report(20)
            time.sleep(0.1)
            received = sink.end()
            known = after["own"] - before["own"] + (after["guests"] - before["guests"]) / 1e9
            figures = {
                "seconds": span,
                "others_percent": max(0, 100 * (after["busy"] - before["busy"] - known) / span),
                "worker_waited_percent": (after["waited"] - before["waited"]) / span / 1e7,
                "frames_per_s": received["received_frames"] / sent["duration_s"],
                "delivered_per_s": received["received_frames"] / sent["duration_s"],
                "cpu_percent": (after["cpu"] - before["cpu"]) / span / 1e7,
                "wakeups_per_s": (after["switches"] - before["switches"]) / span,
                "guests_cpu_percent": (after["guests"] - before["guests"]) / span / 1e7,
                "kicks_per_frame": (sent["kicks"] + received["kicks"]) / max(sent["sent_frames"], 1),
                "features": sent["features"],
            }
            if rate != 0:
                figures |= latencies(received)
                figures["sent"], figures["received"] = sent["sent_frames"], received["received_frames"]
                lost = sent["sent_frames"] - received["received_frames"]
                figures["loss_percent"] = 100 * lost / max(sent["sent_frames"], 1)
            return figures

    def _look(self, *guests):
        pid = self.process.pid
        threads = [t for t in rig.threads(pid) if rig.thread_name(pid, t).startswith(self.thread)]
        if not threads:
            raise rig.Failure(f"{self.process.name}: no thread {self.thread[0]}...")
        return {
            "time": time.monotonic(),
            "cpu": sum(rig.schedstat(pid, t)[0] for t in threads),
            "switches": sum(voluntary_switches(pid, t) for t in threads),
            "guests": sum(rig.cpu_ns(guest.process.pid) for guest in guests),
            "own": rig.cpu_ns(pid) / 1e9 + time.process_time(),
            "waited": sum(rig.schedstat(pid, t)[1] for t in threads),
            "busy": rig.machine_busy_s(),
        }


def voluntary_switches(pid, thread):
    for line in Path(f"/proc/{pid}/task/{thread}/status").read_text().splitlines():
        if line.startswith("voluntary_ctxt_switches"):
            return int(line.split()[1])
    return 0


class TestPmd(Foreign):
    thread = ("lcore-worker", "rte-worker")

    def __init__(self, bench):
        need_hugepages(bench)
        r = self.rig = bench.rig
        self.bench = bench
        back, main = bench.switch_cpus[0], bench.guest_cpus[0]
        self.sockets = [r.socket_path(f"t{n}") for n in (0, 1)]
        vdevs = []
        for n, socket in enumerate(self.sockets):
            vdevs += ["--vdev", f"net_vhost{n},iface={socket}"]
        # Its output kept open, so that it does not end at the end of its input.
        command = ["stdbuf", "-oL", "dpdk-testpmd", "-l", f"{main},{back}", "--main-lcore", main, "--in-memory", "--no-pci",
                   "--file-prefix", f"policies{os.getpid()}", *vdevs, "--", "--forward-mode=io", "--auto-start",
                   "--nb-cores=1", "--total-num-mbufs=16384"]  # fmt: skip
        self.process = r.start("testpmd", command, stdin=-1)
        for socket in self.sockets:
            self.process.wait_socket(socket)
        self.process.wait_line("Press enter to exit", 30)


class Ovs(Foreign):
    thread = ("pmd-",)

    def __init__(self, bench, maxsleep_us):
        need_hugepages(bench)
        r = self.rig = bench.rig
        self.bench = bench
        folder = Path(r.socket_path(f"ovs{time.monotonic_ns() % 10**9}"))
        folder.mkdir()
        database, remote = folder / "conf.db", f"unix:{folder}/db.sock"
        env = {"OVS_RUNDIR": str(folder), "OVS_LOGDIR": str(folder), "OVS_DBDIR": str(folder)}
        rig.run(["ovsdb-tool", "create", database, OVS_SCHEMA])
        server = r.start("ovsdb", ["ovsdb-server", database, f"--remote=p{remote}", f"--unixctl={folder}/db.ctl"],
                         env=env)  # fmt: skip
        server.wait_socket(folder / "db.sock")
        mask = 1 << bench.switch_cpus[0]
        settings = ["dpdk-init=true", f"dpdk-lcore-mask={1 << bench.guest_cpus[0]:#x}", f"pmd-cpu-mask={mask:#x}",
                    "dpdk-socket-mem=512", f"dpdk-extra=--in-memory --no-pci --file-prefix=ovs{os.getpid()}"]  # fmt: skip
        if maxsleep_us:
            settings.append(f"pmd-maxsleep={maxsleep_us}")
        self.ctl = ["ovs-vsctl", f"--db={remote}", "--timeout=30"]
        # A value with "=" in it needs quotes of its own.
        quoted = [f'other_config:{s.partition("=")[0]}="{s.partition("=")[2]}"' for s in settings]
        rig.run([*self.ctl, "--no-wait", "init"])
        rig.run([*self.ctl, "--no-wait", "set", "Open_vSwitch", ".", *quoted])
        self.process = r.start("ovs", [OVS_DPDK, remote, f"--unixctl={folder}/ovs.ctl", f"--log-file={folder}/log"],
                               env=env)  # fmt: skip
        add = ["add-br", "br0", "--", "set", "bridge", "br0", "datapath_type=netdev"]
        for n in (0, 1):
            add += ["--", "add-port", "br0", f"v{n}", "--", "set", "interface", f"v{n}", "type=dpdkvhostuser"]
        rig.run([*self.ctl, *add], timeout_s=60)
        self.sockets = [str(folder / f"v{n}") for n in (0, 1)]
        for socket in self.sockets:
            self.process.wait_socket(socket)


def need_hugepages(bench):
    setting = Path("/proc/sys/vm/nr_hugepages")
    before = setting.read_text()
    rig.need_hugepages(HUGEPAGES)
    bench.rig.undo(lambda: setting.write_text(before))
