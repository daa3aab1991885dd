"""A switch with guests of `pvswitch gen`, and what is counted over a window of time."""

import json
import re
import signal
import socket
import time
from pathlib import Path

import rig

WARM_S = 0.3  # traffic before a window
TAIL_S = 0.2  # and after it


def mac(number):
    return f"02:00:00:00:{number >> 8:02x}:{number & 255:02x}"


class Bench:
    """What all runs share: the rig, the program, and who runs where."""

    def __init__(self, r):
        o = r.options
        self.rig = r
        self.switch_cpus = [int(cpu) for cpu in o.switch_cpus.split(",")]
        self.guest_cpus = [int(cpu) for cpu in o.guest_cpus.split(",")]
        self.sharing = len(self.guest_cpus) < 2
        self.guest_poll = o.guest_poll
        self.seconds = o.seconds
        self.call = o.call
        self.forward = o.forward


class Switch:
    """`pvswitch run` with so many vhost-user ports p0, p1, ... and perhaps a port that drops all."""

    def __init__(self, bench, policy, ports, workers=1, placement="balanced", forward=None, null=None):
        r = bench.rig
        self.bench = bench
        poll, _, call = policy.partition("+")
        self.folder = Path(r.socket_path(f"s{time.monotonic_ns() % 10**10}"))
        self.folder.mkdir()
        config = [f'forward = "{forward or bench.forward}"\n']
        if null is not None:
            config.append(f'[static]\n"{null}" = "null"\n[port.null]\nkind = "null"\n')
        for i in range(ports):
            config.append(f'[port.p{i}]\nkind = "vhost-user"\nsocket = "{self.socket(i)}"\n')
        (self.folder / "config.toml").write_text("\n".join(config))
        # Not under taskset: the switch measures at start what a wake-up from another CPU costs.
        cpus = ",".join(str(cpu) for cpu in (bench.switch_cpus * workers)[:workers])
        if workers > len(bench.switch_cpus):
            cpus = ",".join(str(cpu) for cpu in (bench.switch_cpus + bench.guest_cpus)[:workers])
        command = [r.pvswitch, "run", "--config", self.folder / "config.toml", "--poll", poll,
                   "--call", call or bench.call, "--workers", workers, "--placement", placement,
                   "--cpus", cpus, "--control", self.folder / "ctl", "--quiet"]  # fmt: skip
        self.process = r.start("switch", command, env={"RUST_LOG": "warn"})
        self.process.wait_socket(self.folder / "ctl")
        self._control = None
        self.costs_ns = self.ask("show").get("costs_ns")

    def socket(self, i):
        return str(self.folder / f"p{i}")

    def ask(self, what, **more):
        """One request on the control socket; no process is started for it, so that nobody is disturbed."""
        if self._control is None:
            control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            control.settimeout(10)
            control.connect(str(self.folder / "ctl"))
            self._control = control.makefile("rw")
            control.close()
        try:
            self._control.write(json.dumps({"cmd": what, **more}) + "\n")
            self._control.flush()
            answer = json.loads(self._control.readline())
        except (OSError, ValueError) as error:
            self.process.need_alive()
            raise rig.Failure(f"ctl {what}: {error}") from None
        if not answer.get("ok"):
            raise rig.Failure(f"ctl {what}: {answer.get('error')}")
        return answer

    def stats(self):
        return self.ask("stats")

    def wait_up(self, count, timeout_s=20):
        def up():
            self.process.need_alive()
            return sum(port["up"] for port in self.stats()["ports"] if port["name"] != "null") >= count

        rig.wait_for(f"{count} ports up", up, timeout_s, every_s=0.02)

    def features(self, port=0):
        return next(p for p in self.ask("show")["ports"] if p["name"] == f"p{port}").get("features", [])

    def stop(self):
        if self._control:
            self._control.close()
            self._control = None
        return self.process.stop()

    def error_words(self):
        return [line for line in self.process.log().splitlines() if re.search(r"ERROR|panicked", line)]


class Guest:
    """`pvswitch gen` at one port; on the guests' CPUs."""

    def __init__(self, bench, connect, mode, number, peer=None, idle_class=False, first=False, **options):
        command = [bench.rig.pvswitch, "gen", "--connect", f"vhost-user:{connect}", "--mode", mode, "--json"]
        if mode != "idle":
            command += ["--poll", bench.guest_poll, "--mac", mac(number)]
            if peer is not None:
                command += ["--peer", peer if isinstance(peer, str) else mac(peer)]
        for name, value in options.items():
            if value is not None:
                command += [f"--{name.replace('_', '-')}", value]
        if idle_class:  # runs when no other guest on its CPU wants to
            command = ["chrt", "--idle", "0", *command]
        if first:
            command = ["chrt", "--rr", "1", *command]
        cpus = ",".join(map(str, bench.guest_cpus))
        self.process = bench.rig.start(f"guest{number}", command, cpus=cpus)

    def report(self, timeout_s=20):
        """What it counted, once it has come to its end."""
        rig.wait_for(f"{self.process.name}: end", lambda: not self.process.alive(), timeout_s, every_s=0.02)
        return self._parse()

    def end(self):
        """Asks it to end; what it counted."""
        self.process._signal_group(signal.SIGTERM)
        return self.report()

    def _parse(self):
        for line in reversed(self.process.log().splitlines()):
            if line.startswith("{"):
                return json.loads(line)
        raise rig.Failure(f"{self.process.name}: no report: {rig.last_line(self.process.log())}")


def counters(stats, side):
    """Sum over all queues of all ports of each number."""
    total = {}
    for port in stats["ports"]:
        for queue in port[side]:
            for name, value in queue.items():
                if isinstance(value, int):
                    total[name] = total.get(name, 0) + value
    return total


def workers(stats):
    names = ("cpu_ns", "sleeps", "naps", "rounds")
    return {name: sum(worker[name] for worker in stats["workers"]) for name in names}


def difference(after, before):
    return {name: after[name] - before.get(name, 0) for name in after}


class Window:
    """Counts between two moments: `with Window(switch, guests) as w: sleep` and then `w.figures`."""

    def __init__(self, switch, guests=()):
        self.switch = switch
        self.guests = list(guests)

    def _look(self):
        pid = self.switch.process.pid
        stats = self.switch.stats()
        return {
            "time": time.monotonic(),
            "stats": stats,
            "waited": sum(rig.schedstat(pid, worker["tid"])[1] for worker in stats["workers"]),
            "switch": rig.cpu_ns(pid),
            "guests": sum(rig.cpu_ns(guest.process.pid) for guest in self.guests),
            "own": time.process_time(),
            "busy": rig.machine_busy_s(),
        }

    def __enter__(self):
        self.before = self._look()
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.after = self._look()
            self.figures = self._figures()

    def _figures(self):
        a, b = self.before, self.after
        span = (b["stats"]["uptime_ns"] - a["stats"]["uptime_ns"]) / 1e9
        wall = b["time"] - a["time"]
        worker = difference(workers(b["stats"]), workers(a["stats"]))
        ingress = difference(counters(b["stats"], "ingress"), counters(a["stats"], "ingress"))
        egress = difference(counters(b["stats"], "egress"), counters(a["stats"], "egress"))
        frames = ingress["frames"]
        known = (b["switch"] - a["switch"] + b["guests"] - a["guests"]) / 1e9 + b["own"] - a["own"]
        figures = {
            "seconds": span,
            "frames_per_s": frames / span,
            "delivered_per_s": egress["frames"] / span,
            "cpu_percent": worker["cpu_ns"] / span / 1e7,
            "switch_cpu_percent": (b["switch"] - a["switch"]) / wall / 1e7,
            "guests_cpu_percent": (b["guests"] - a["guests"]) / wall / 1e7,
            "worker_sleeps": worker["sleeps"],
            "worker_naps": worker["naps"],
            "wakeups_per_s": (worker["sleeps"] + worker["naps"]) / span,
            "rounds_per_s": worker["rounds"] / span,
            "worker_waited_percent": (b["waited"] - a["waited"]) / wall / 1e7,
            "others_percent": max(0, 100 * (b["busy"] - a["busy"] - known) / wall),
        }
        if frames:
            figures |= {
                "ns_per_frame": worker["cpu_ns"] / frames,
                "frames_per_cpu_s": frames / max(worker["cpu_ns"], 1) * 1e9,
                "burst_frames": frames / max(ingress.get("bursts", 0), 1),
                "kicks_seen_per_frame": (ingress["kicks"] + egress["kicks"]) / frames,
                "calls_per_frame": (ingress["calls"] + egress["calls"]) / frames,
            }
        return figures
