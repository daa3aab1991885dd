"""The original study of polling (seed 000) with guests that pay for events: smart poll on and off.

A guest of each kind, PV and PVH, receives from dom0 by `pvswitch nic`, through real event channels. Xen counts the
CPU time of each domain: by instructions, of 8 ns, or of 1 with `--clock fast`, so that more frames fall to each tick
of the timer. What a real processor spends on leaving and entering a PVH guest is not in it: an emulator has neither.
"""

import rig
from machine import Guest

# Seed 000 received UDP and TCP with these sizes; rates that the emulated machine keeps up with.
TRAFFIC = {"UDP-1472": "-u -b 100M -l 1472", "UDP-50": "-u -b 4M -l 50", "TCP": "-b 200M"}
MEASURES = {
    "guest_s_per_gbit": ("s", "less", "CPU time of the guest for each gigabit"),
    "dom0_s_per_gbit": ("s", "less", "CPU time of dom0 for each gigabit"),
    "events_per_frame": ("", "less", "events to the guest for each frame"),
    "bits_per_s": ("bit/s", "more", "payload, as received"),
    "lost": ("", "less", "datagrams lost"),
}
GUEST_IP = "10.0.0.4"


class Receiver:
    """A guest with a port of its own; its NIC program starts and ends with each run."""

    def __init__(self, lab, kind, ctl, start_nic, stop_nic):
        self.lab, self.kind, self.ctl = lab, kind, ctl
        self.start_nic, self.stop_nic = start_nic, stop_nic
        self.guest = Guest(lab.dom0, "d", GUEST_IP, kind=kind, netfront=False, vif=None).create().wait_ready(600)
        lab.dom0.must(f"{ctl} add-port d=xen:{self.guest.domid()}/0,queues=1,smart-poll=on", timeout_s=30)
        lab.dom0.must(f"xl network-attach d mac={self.guest.mac} script=/bin/true", timeout_s=60)

    def close(self):
        self.lab.dom0.run(f"{self.ctl} del-port d", timeout_s=60)
        self.guest.destroy()

    def times(self):
        """CPU seconds of the guest and of dom0."""
        lines = self.lab.dom0.must("xl list", timeout_s=40).splitlines()
        found = {line.split()[0]: float(line.split()[-1]) for line in lines[1:]}
        return found["d"], found["Domain-0"]

    def measure(self, smart_poll, port_stats, iperf3):
        """CPU seconds for each gigabit of guest and dom0, and events for each frame, by traffic."""
        self.start_nic(self.guest, f"--connect xen:0,static=on{',smart-poll=on' if smart_poll else ''}")
        self.guest.must("iperf3 -s -D")
        results = {}
        for name, options in TRAFFIC.items():
            before, counted = self.times(), port_stats(self.lab, "d")["egress"][0]
            result = iperf3(self.lab, self.lab.dom0, self.guest, f"-t {self.lab.seconds} {options}")
            after, counted_after = self.times(), port_stats(self.lab, "d")["egress"][0]
            frames, calls = (counted_after[key] - counted[key] for key in ("frames", "calls"))
            gbit = result["bits_per_s"] * self.lab.seconds / 1e9
            results[name] = {
                "guest_s_per_gbit": (after[0] - before[0]) / gbit,
                "dom0_s_per_gbit": (after[1] - before[1]) / gbit,
                "events_per_frame": calls / max(frames, 1),
                "frames": frames, "lost": result["lost"], "bits_per_s": result["bits_per_s"],
            }  # fmt: skip
        self.guest.must("killall iperf3")
        self.stop_nic(self.lab, self.guest)
        return results


def compare(lab, ctl, start_nic, stop_nic, port_stats, iperf3, rounds):
    """Pairs of on and off, for each kind of guest and traffic; returns all runs."""
    runs = []
    for kind in ("pv", "pvh"):
        receiver = Receiver(lab, kind, ctl, start_nic, stop_nic)
        try:
            for turn in range(rounds):
                for smart_poll in (True, False) if turn % 2 else (False, True):
                    results = receiver.measure(smart_poll, port_stats, iperf3)
                    runs += [{"guest": kind, "smart_poll": "on" if smart_poll else "off", "traffic": name, "round": turn, **result}
                             for name, result in results.items()]  # fmt: skip
        finally:
            receiver.close()
        say(lab, kind, [run for run in runs if run["guest"] == kind])
    return runs


def say(lab, kind, runs):
    """One line for each traffic; judged are events only: the timer takes their place."""
    for name in TRAFFIC:
        off, on = ([run for run in runs if run["traffic"] == name and run["smart_poll"] == way] for way in ("off", "on"))
        words = []
        for key, who in (("guest_s_per_gbit", "guest's CPU"), ("dom0_s_per_gbit", "dom0's CPU"), ("bits_per_s", "throughput")):
            ratios = [after[key] / before[key] for before, after in zip(off, on, strict=True)]
            words.append(f"{who} {rig.ratio_words(ratios)}")
        events = [rig.median_and_spread([run["events_per_frame"] for run in way])[0] for way in (off, on)]
        lab.r.check(f"{kind} guest, {name}, smart poll over events, n {len(on)}: events are gone",
                    events[1] <= 0.05 * max(events[0], 1e-9),
                    f"{events[0]:.3f} to {events[1]:.4f} a frame; {', '.join(words)};"
                    f" guest {rig.median_and_spread([run['guest_s_per_gbit'] for run in off])[0]:.2f} s a Gbit with events")  # fmt: skip
