"""The measurements: each part yields items (what to run) and an item yields cells with their figures."""

import os
import time

import rig
from bench import Guest, Switch, Window, counters, difference, idle_guests, idle_possible, latencies, pair, receiver

POLICIES = ["event", "napi", "timer:1000", "timer:20000", "coalesce:50,32", "coalesce:50/pending",
            "spin", "adaptive", "adaptive:200"]  # fmt: skip
FEW = ["event", "timer:1000", "spin", "adaptive"]  # where the rest would say the same again
RATES = [0, 1_000, 10_000, 100_000, 1_000_000, None]
IDLE_PORTS = [1, 10, 100, 1000]
TAX_PORTS = [0, 10, 100, 1000]
BURSTS_MS = ["0.5", "1", "5", "20"]
AT_ONCE = "50 at once"
BURST_RATE = 100_000
QUIET_GUESTS, QUIET_RATE = 8, 200
JAIN_SIZES = [60, 300, 800, 1514]
NOWHERE = "02:00:00:00:0f:ff"  # the address behind the port that drops everything


class Item:
    """One thing to run: its part, what names it among the part's, and how."""

    def __init__(self, part, key, action, skip=None):
        self.part, self.key, self.action, self.skip = part, key, action, skip


def rate_name(rate):
    if rate is None:
        return "max"
    for size, letter in ((1_000_000, "M"), (1_000, "k")):
        if rate >= size:
            return f"{rate // size}{letter}"
    return str(rate)


# ---------------------------------------------------------------- load curve


def load(bench):
    """Frames from one guest to another at a rate: CPU, latency, loss, wake-ups, kicks and calls."""
    o = bench.rig.options
    rates = [RATES[0], RATES[1], RATES[3], RATES[5]] if bench.rig.quick else RATES
    for rate in rates:
        for policy in o.many:
            cell = {"policy": policy, "rate": rate_name(rate)}
            yield Item("load", cell, lambda cell=cell, policy=policy, rate=rate: [
                (cell, load_point(bench, policy, rate))])  # fmt: skip


def load_point(bench, policy, rate):
    switch = Switch(bench, policy, 2)
    try:
        if rate == 0:
            guests = [Guest(bench, switch.socket(i), "sink", i) for i in (0, 1)]
            switch.wait_up(2)
            time.sleep(WARM_IDLE_S)
            with Window(switch, guests) as window:
                time.sleep(bench.seconds)
            figures = window.figures | {"features": switch.features()}
        else:
            figures = pair(bench, switch, rate=rate)
        return figures | {"costs_ns": switch.costs_ns}
    finally:
        switch.stop()


WARM_IDLE_S = 0.5  # `timer` goes on for 0.1 s


# ---------------------------------------------------------------- idle


def idle(bench):
    """Connected guests that do nothing: wake-ups and CPU."""
    for count in [1, 10, 100] if bench.rig.quick else IDLE_PORTS:
        for policy in bench.rig.options.few:
            cell = {"policy": policy, "ports": count}
            skip = None if idle_possible(bench, count) else "a build whose gen has --mode idle"
            yield Item("idle", cell, lambda cell=cell: [(cell, idle_point(bench, cell["policy"], cell["ports"]))],
                       skip)  # fmt: skip


def idle_point(bench, policy, count):
    switch = Switch(bench, policy, count)
    try:
        idle_guests(bench, switch, 0, count)
        begun = time.monotonic()
        switch.wait_up(count, 60)
        connected_s = time.monotonic() - begun
        time.sleep(WARM_IDLE_S + count / 1000)
        # The guests are not looked at: they have no share in the switch's own figures.
        with Window(switch) as window:
            time.sleep(bench.rig.options.idle_seconds)
        memory = resident_kib(switch.process.pid)
        return window.figures | {"connected_s": connected_s, "resident_kib": memory, "counts_only": True}
    finally:
        switch.stop()


def resident_kib(pid):
    """Private memory of a process: its own, without what it shares with guests."""
    total = 0
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        for line in lines:
            if line.startswith("Private_"):
                total += int(line.split()[1])
    return total


# ---------------------------------------------------------------- the first frame after idle


def first(bench):
    """One frame after a silence, many times: how late it comes."""
    o = bench.rig.options
    # Policies that sleep are measured side by side, each with a switch of its own: they do nothing
    # nearly all the time. Those that poll have the machine for themselves.
    busy = [p for p in o.many if p.startswith(("spin", "timer"))]
    groups = [[p for p in o.many if p not in busy], *([p] for p in busy)]
    for group in filter(None, groups):
        yield Item("first", {"policies": group}, lambda group=group: first_group(bench, group))


def first_group(bench, group):
    o = bench.rig.options
    gap_s, samples = (0.2, 10) if bench.rig.quick else (o.gap, o.samples)
    switches = [Switch(bench, policy, 2) for policy in group]
    sinks, senders, answers = [], [], []
    try:
        for switch in switches:
            sinks.append(receiver(bench, switch.socket(1)))
            switch.wait_up(1)
        for n, switch in enumerate(switches):
            senders.append(Guest(bench, switch.socket(0), "send", 0, peer=1, rate=1 / gap_s,
                                 duration=gap_s * (samples - 0.5)))  # fmt: skip
            time.sleep(gap_s / len(group) if n else 0)
        for policy, switch, sink, sender in zip(group, switches, sinks, senders):
            sent = sender.report(gap_s * samples + 20)
            final = counters(switch.stats(), "ingress")
            received = sink.end()
            figures = latencies(received) | {
                "sent": sent["sent_frames"],
                "received": received["received_frames"],
                "gap_s": gap_s,
                "switch_first_frame_ns": final.get("first_frame_ns", 0) / max(final.get("first_frames", 0), 1),
                "costs_ns": switch.costs_ns,
            }
            answers.append(({"policy": policy}, figures))
        return answers
    finally:
        for switch in switches:
            switch.stop()


# ---------------------------------------------------------------- bursts


def bursts(bench):
    """Traffic that comes and goes about as fast as a policy can follow; and frames that come all at once."""
    for name in [AT_ONCE, "5"] if bench.rig.quick else [AT_ONCE, *BURSTS_MS]:
        options = burst_options(name)
        able = bench.gen_knows("--on-off") and bench.gen_takes(*options)
        skip = None if able else f"a build whose gen takes {' '.join(options)}"
        for policy in bench.rig.options.many:
            cell = {"policy": policy, "on_off_ms": name}
            yield Item("bursts", cell, lambda cell=cell: [(cell, burst_point(bench, cell))], skip)


def burst_options(name):
    """All at once: the frames of 0.5 ms at the rate, every millisecond."""
    if name == AT_ONCE:
        return ("--burst", f"{BURST_RATE // 2000},1000")
    return ("--rate", str(BURST_RATE), "--on-off", f"{name},{name}")


def burst_point(bench, cell):
    switch = Switch(bench, cell["policy"], 2)
    try:
        names = dict(zip(*[iter(word.lstrip("-").replace("-", "_") for word in burst_options(cell["on_off_ms"]))] * 2))
        return pair(bench, switch, **names)
    finally:
        switch.stop()


# ---------------------------------------------------------------- noisy neighbour


def neighbour(bench):
    """Guests that ask and wait, with and without one that floods; and how equal floods share a worker."""
    for policy in bench.rig.options.few:
        for flood in (False, True):
            cell = {"policy": policy, "what": "with a flooder" if flood else "alone"}
            yield Item("neighbour", cell, lambda cell=cell, policy=policy, flood=flood: [
                (cell, neighbour_point(bench, policy, flood))])  # fmt: skip
    for policy in bench.rig.options.few:
        cell = {"policy": policy, "what": "shares"}
        yield Item("neighbour", cell, lambda cell=cell, policy=policy: [(cell, shares(bench, policy))])


def neighbour_point(bench, policy, flood):
    """Some ask one that echoes; the flooder's frames go nowhere, so that all it costs is the switch's."""
    count, seconds = QUIET_GUESTS, bench.seconds
    switch = Switch(bench, policy, count + 2, forward="switch", null=NOWHERE)
    try:
        first = bench.sharing and rig.is_root()
        echo = Guest(bench, switch.socket(0), "echo", 0, first=first)
        switch.wait_up(1)
        duration = 2 * WARM_IDLE_S + seconds + 0.2
        quiet = [Guest(bench, switch.socket(1 + i), "rr", 1 + i, peer=0, rate=QUIET_RATE, duration=duration,
                       first=first) for i in range(count)]  # fmt: skip
        flooders = []
        if flood:
            flooders.append(Guest(bench, switch.socket(count + 1), "send", count + 1, peer=NOWHERE,
                                  duration=duration, idle_class=True))  # fmt: skip
        switch.wait_up(1 + count + len(flooders))
        time.sleep(WARM_IDLE_S)
        with Window(switch, [echo, *quiet, *flooders]) as window:
            time.sleep(seconds)
        reports = [guest.report() for guest in quiet]
        figures = window.figures
        figures["answers_per_s"] = sum(r["received_pps"] for r in reports)
        figures["lost"] = sum(r["lost_frames"] for r in reports)
        for name in ("latency_ns_p50", "latency_ns_p99", "latency_ns_p999"):
            each = sorted(r[name] for r in reports)
            figures[name] = each[len(each) // 2]
            figures[name + "_worst"] = each[-1]
        if flood:
            figures["flood_per_s"] = flooders[0].report()["sent_pps"]
        return figures
    finally:
        switch.stop()


def shares(bench, policy):
    """Equal floods of frames of different sizes to nowhere, at a worker that has half a core.

    Our guests cost more CPU than the switch, so a worker with a core for itself would never be short.
    """
    switch = Switch(bench, policy, len(JAIN_SIZES), forward="switch", null=NOWHERE)
    hogs = []
    try:
        guests = [Guest(bench, switch.socket(i), "send", i, peer=NOWHERE, size=size)
                  for i, size in enumerate(JAIN_SIZES)]  # fmt: skip
        switch.wait_up(len(JAIN_SIZES))
        cpu = bench.switch_cpus[0]
        hogs.append(bench.rig.start("hog", ["sh", "-c", "while :; do :; done"], cpus=cpu))
        time.sleep(WARM_IDLE_S)
        with Window(switch, [*guests, hog_of(hogs[0])]) as window:
            time.sleep(bench.seconds)
        figures = window.figures | {"shares_cpu": True}
        for name in ("frames", "bytes", "served_ns"):
            each = []
            for i in range(len(JAIN_SIZES)):
                a, b = (port_ingress(look["stats"], f"p{i}") for look in (window.before, window.after))
                each.append(difference(b, a).get(name, 0))
            figures[f"jain_{name}"] = jain(each)
            figures[f"each_{name}"] = each
        return figures
    finally:
        for hog in hogs:
            hog.kill()
        switch.stop()


class hog_of:  # what Window wants of a guest
    def __init__(self, process):
        self.process = process


def port_ingress(stats, name):
    return counters({"ports": [port for port in stats["ports"] if port["name"] == name]}, "ingress")


def jain(values):
    """Jain's index: 1 when all are equal, 1/n when one has it all."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 0


# ---------------------------------------------------------------- the tax of idle neighbours


def tax(bench):
    """One busy pair beside ports that are idle."""
    for count in [0, 10, 100] if bench.rig.quick else TAX_PORTS:
        for policy in bench.rig.options.few:
            cell = {"policy": policy, "ports": count}
            skip = None if idle_possible(bench, count) else "a build whose gen has --mode idle"
            yield Item("tax", cell, lambda cell=cell: [(cell, tax_point(bench, cell["policy"], cell["ports"]))],
                       skip)  # fmt: skip


def tax_point(bench, policy, count):
    switch = Switch(bench, policy, 2 + count, forward="switch")
    try:
        idlers = idle_guests(bench, switch, 2, count)
        switch.wait_up(count, 60)
        return pair(bench, switch, more_guests=idlers)
    finally:
        switch.stop()


# ---------------------------------------------------------------- workers and placement


def scaling(bench):
    """One worker and more, even and skewed load, each placement; frames go nowhere."""
    policy = "adaptive" if "adaptive" in bench.rig.options.few else bench.rig.options.few[0]
    pools = [(1, "single"), (2, "single"), (2, "group"), (2, "per-port"), (2, "balanced")]
    pools += [(n, placement) for n in (4, 8) if n <= len(bench.switch_cpus) for placement in ("per-port", "balanced")]
    for skew in (False, True):
        for workers, placement in pools:
            cell = {"policy": policy, "load": "skewed" if skew else "even", "workers": workers,
                    "placement": placement}  # fmt: skip
            yield Item("workers", cell, lambda cell=cell: [(cell, workers_point(bench, cell))])


def workers_point(bench, cell):
    most = max(2, len(bench.switch_cpus))
    ports = 4 if most == 2 else len(bench.guest_cpus)
    switch = Switch(bench, cell["policy"], ports, workers=cell["workers"], placement=cell["placement"],
                    forward="switch", null=NOWHERE)  # fmt: skip
    try:
        # Skewed: those flood that placement by number puts on one worker.
        skewed = cell["load"] == "skewed"
        rates = [10_000 if skewed and i % most else None for i in range(ports)]
        floating = sorted(set(bench.switch_cpus + bench.guest_cpus))
        pinned, bench.guest_cpus = bench.guest_cpus, floating if len(os.sched_getaffinity(0)) < 6 else bench.guest_cpus
        try:
            guests = [Guest(bench, switch.socket(i), "send", i, peer=NOWHERE, rate=rate, size=60)
                      for i, rate in enumerate(rates)]  # fmt: skip
        finally:
            bench.guest_cpus = pinned
        switch.wait_up(ports)
        time.sleep(WARM_IDLE_S)
        with Window(switch, guests) as window:
            time.sleep(bench.seconds)
        figures = window.figures | {"shares_cpu": floating != pinned}
        a, b = window.before["stats"]["workers"], window.after["stats"]["workers"]
        figures["each_worker_percent"] = [
            (y["cpu_ns"] - x["cpu_ns"]) / figures["seconds"] / 1e7 for x, y in zip(a, b)]  # fmt: skip
        figures["moves"] = sum(y.get("moves", 0) - x.get("moves", 0) for x, y in zip(a, b))
        return figures
    finally:
        switch.stop()


PARTS = {"load": load, "idle": idle, "first": first, "bursts": bursts, "neighbour": neighbour, "tax": tax,
         "workers": scaling}  # fmt: skip
