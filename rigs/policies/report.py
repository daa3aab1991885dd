"""Tables and plots of results."""

import statistics

import plot
import rig

OTHERS_PERCENT = 10  # of a core, that other programs may take during a run that counts
COUNTED = ("idle",)  # parts whose figures are counts, which no distance and no neighbour changes
WAITED_PERCENT = 3  # of the time, that a worker may stand ready while its CPU does something else


def write(data, folder):
    """results.md and plots of everything there is so far; returns the parts told of."""
    if not data["runs"]:
        return []
    table = Table(data)
    sections = [section(table) for section in (load, judged, idle, first, bursts, neighbour, tax, workers, peers)]
    (folder / "results.md").write_text("\n".join([head(data, table), *filter(None, sections)]))
    for name, text in plots(table):
        (folder / name).write_text(text)
    return [section for section in sections if section]


def in_short(figures):
    """One line for someone who watches."""
    words = []
    for name, form in (("frames_per_s", "{:.4g}/s"), ("cpu_percent", "CPU {:.2f} %"), ("wakeups_per_s", "{:.0f} wakes/s"),
                       ("latency_ns_p50", "p50 {}"), ("latency_ns_p99", "p99 {}"), ("loss_percent", "loss {:.2g} %"),
                       ("kicks_per_frame", "{:.3g} kicks"), ("jain_served_ns", "Jain {:.3f}")):  # fmt: skip
        if figures.get(name) is not None and not (name.startswith("latency") and not figures[name]):
            value = figures[name]
            words.append(form.format(time_words(value) if name.startswith("latency") else value))
    return "  ".join(words)


def nearest(runs):
    return rig.Distance.nearest([ns for run in runs for ns in run["distance_ns"]])


def is_far(run, near):
    return run["part"] not in COUNTED and max(run["distance_ns"]) > rig.Distance.FAR * near


def is_disturbed(run):
    figures = run["figures"]
    if run["part"] in COUNTED:
        return False
    waited = 0 if figures.get("shares_cpu") else figures.get("worker_waited_percent", 0)
    return figures.get("others_percent", 0) > OTHERS_PERCENT or waited > WAITED_PERCENT


class Table:
    """Runs by part and cell."""

    def __init__(self, data):
        self.data = data
        self.nearest = nearest(data["runs"])
        self.cells = {}
        for run in data["runs"]:
            key = (run["part"], tuple(sorted((name, str(value)) for name, value in run["cell"].items())))
            self.cells.setdefault(key, []).append(run)

    def far(self, run):
        return is_far(run, self.nearest)

    def disturbed(self, run):
        return is_disturbed(run)

    def runs(self, part, **cell):
        """Runs of a cell that count: the near and quiet ones, or all of them, marked."""
        every = self.cells.get((part, tuple(sorted((name, str(value)) for name, value in cell.items()))), [])
        near = [run for run in every if not self.far(run) and not self.disturbed(run)]
        return near or every

    def mark(self, part, **cell):
        runs = self.runs(part, **cell)
        if not runs:
            return ""
        return ("f" if all(self.far(run) for run in runs) else "") + (
            "d" if all(self.disturbed(run) for run in runs) else "")

    def spread(self, figure, part, **cell):
        """Median, smallest, largest; or None."""
        values = [run["figures"][figure] for run in self.runs(part, **cell) if run["figures"].get(figure) is not None]
        return rig.median_and_spread(values) if values else None

    def median(self, figure, part, **cell):
        spread = self.spread(figure, part, **cell)
        return spread[0] if spread else None

    def values(self, part, name):
        """The values a cell's part has, in the order they came first."""
        seen = {}
        for run in self.data["runs"]:
            if run["part"] == part and name in run["cell"]:
                seen[run["cell"][name]] = True
        return list(seen)

    def policies(self, part):
        from parts import POLICIES

        return sorted(self.values(part, "policy"), key=lambda p: (POLICIES.index(p) if p in POLICIES else 99, p))


# ---------------------------------------------------------------- words


def time_words(ns):
    for size, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "us")):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.0f} ns"


def count_words(n):
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if n >= 0.9995 * size:
            return f"{n / size:.3g} {unit}"
    return f"{n:.3g}"


def percent(x):
    return f"{x:.2g} %" if x < 1 else f"{x:.3g} %"


def ratio_words(x):
    return f"{x:.3f}"


def plain(x):
    return f"{x:.3g}"


def with_spread(spread, form):
    if spread is None:
        return "-"
    median, low, high = spread
    words = form(median)
    return words if form(low) == form(high) else f"{words} ({form(low)} - {form(high)})"


def lines(header, rows):
    out = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return out + ["| " + " | ".join(row) + " |" for row in rows]


def grid(table, part, rows, columns, figures, **fixed):
    """A table of cells: `rows` and `columns` are (name in the cell, values); a row for each figure."""
    (row_name, row_values), (column_name, column_values) = rows, columns
    marks = set()
    out = []
    for title, figure, form in figures:
        body = []
        for row in row_values:
            words = [f"`{row}`" if row_name == "policy" else str(row)]
            for column in column_values:
                cell = {row_name: row, column_name: column, **fixed}
                mark = table.mark(part, **cell)
                marks |= set(mark)
                words.append(with_spread(table.spread(figure, part, **cell), form) + (f" {mark}" if mark else ""))
            body.append(words)
        if any(word != "-" for words in body for word in words[1:]):
            out += ["", f"{title}:", "", *lines([row_name, *map(str, column_values)], body)]
    return out


# ---------------------------------------------------------------- sections


def head(data, table):
    machine, settings = data["machine"], data["settings"]
    far = sum(table.far(run) for run in data["runs"])
    disturbed = sum(table.disturbed(run) for run in data["runs"])
    repeats = max(run["repeat"] for run in data["runs"]) + 1
    features = next((run["figures"]["features"] for run in data["runs"] if run["figures"].get("features")), [])
    costs = [run["figures"]["costs_ns"] for run in data["runs"] if run["figures"].get("costs_ns")]
    cost_words = ", ".join(
        f"{name} {with_spread(rig.median_and_spread([c[name] for c in costs]), time_words)}" for name in (costs[0] if costs else {}))  # fmt: skip
    return "\n".join([
        "# Poll policies, side by side", "",
        f"{data['date']}, {data['program']}, commit {data['commit']}; measured by:", "",
        *(f"    rigs/policies/run {command}" for command in data["commands"]), "",
        *lines(["", ""], [
            ["CPU", f"{machine['cpu']}, {machine['cpus']} CPUs" + (", a virtual machine" if machine["hypervisor"] else "")],
            ["kernel", f"{machine['kernel']}, {machine['system']}; idle {machine['idle'] or 'by the hypervisor'}"],
            ["CPUs", f"workers on {settings['switch_cpus']}, guests on {settings['guest_cpus']}"],
            ["guests", f"`pvswitch gen --poll {settings['guest_poll']}` in all runs alike, 60-byte frames unless told"],
            *([["receivers", "in the real-time class, before senders and floods, with which they share a CPU"]]
              if settings.get("receivers_first") else []),
            ["switch", f"`--forward {settings['forward']} --call {settings['call']} --workers 1` unless told"],
            ["features negotiated", " ".join(features)],
            ["measured at start (`ctl show`: costs_ns)", cost_words],
            ["windows", f"{window_words(data)}; up to {repeats} repeats, in turn"],
            ["distance of the CPUs", f"{table.nearest:.0f} ns when near; {far} of {len(data['runs'])} cells measured"
             f" while far (over {rig.Distance.FAR} times that), {disturbed} while others took more than {OTHERS_PERCENT} % of a"
             f" core or {WAITED_PERCENT} % of the worker's time"],
        ]), "",
        "Figures are medians with the smallest and largest in brackets. Far and disturbed runs are left out where a cell"
        " has others, and marked `f` and `d` where it has none. Latency is from the moment a guest publishes a frame"
        " until the other has read it: its own wake-up included, which is the same for every policy, so `spin` shows the"
        " floor. A guest here is a process: leaving and entering a virtual machine would come on top, once for each kick"
        " and each call.", ""])  # fmt: skip


def window_words(data):
    """How long the windows of each part were: parts measured in turns may differ."""
    lengths = {}
    for run in data["runs"]:
        if "seconds" in run["figures"]:
            lengths.setdefault(run["part"], []).append(run["figures"]["seconds"])
    return ", ".join(f"{part} {statistics.median(each):.2g} s" for part, each in lengths.items())


LOAD = [
    ("CPU of the worker, of one core", "cpu_percent", percent),
    ("Latency, p50", "latency_ns_p50", time_words),
    ("Latency, p99", "latency_ns_p99", time_words),
    ("Latency, p99.9", "latency_ns_p999", time_words),
    ("Frames received a second", "delivered_per_s", count_words),
    ("Frames lost, of those sent", "loss_percent", percent),
    ("Wake-ups of the worker a second", "wakeups_per_s", count_words),
    ("Kicks for each frame", "kicks_per_frame", plain),
    ("Calls for each frame", "calls_per_frame", plain),
    ("Frames for a CPU-second of the worker", "frames_per_cpu_s", count_words),
    ("CPU of the guests, of one core", "guests_cpu_percent", percent),
]


def rates(table, part):
    order = ["0", "1k", "10k", "100k", "1M", "max"]
    return sorted(table.values(part, "rate"), key=order.index)


def load(table):
    if not table.values("load", "rate"):
        return ""
    columns = ("rate", rates(table, "load"))
    return "\n".join(["## Load curve: frames offered a second", "", "![CPU](load-cpu.svg)", "", "![p99](load-p99.svg)",
                      *grid(table, "load", ("policy", table.policies("load")), columns, LOAD), ""])  # fmt: skip


JUDGED = [("CPU", "cpu_percent", min), ("p99", "latency_ns_p99", min), ("frames/s", "delivered_per_s", max)]


def judged(table):
    """Adaptive against the better of event and spin, figure by figure."""
    rows = []
    places = [("load", {"rate": rate}) for rate in rates(table, "load")] if table.values("load", "rate") else []
    places += [("bursts", {"on_off_ms": ms}) for ms in burst_lengths(table)]
    for part, cell in places:
        row = [f"{part} {next(iter(cell.values()))}{' ms on and off' if part == 'bursts' and 'at' not in cell['on_off_ms'] else ''}"]
        for _, figure, best in JUDGED:
            ours, *others = (table.median(figure, part, policy=p, **cell) for p in ("adaptive", "event", "spin"))
            if ours is None or None in others:
                row.append("-")
                continue
            better = best(others)
            of = "event" if better == others[0] else "spin"
            if better <= 0:
                row.append("same" if ours <= 0 else f"{plain(ours)} against 0 ({of})")
                continue
            ratio = ours / better
            worse = ratio > 1.1 if best is min else ratio < 0.9
            row.append(f"{'**' if worse else ''}{ratio:.2f}{'**' if worse else ''} of {of}")
        if any(word != "-" for word in row[1:]):
            marks = "".join(table.mark(part, policy=p, **cell) for p in ("adaptive", "event", "spin"))
            row.append(" ".join(sorted(set(marks))))
            rows.append(row)
    if not rows:
        return ""
    return "\n".join(["## Adaptive against the better of event and spin", "",
                      "Each figure by itself, so that no policy could reach all of them at once; bold: worse by more than a"
                      " tenth. A ratio with a mark has a far or disturbed run in it and proves nothing.", "",
                      *lines(["", *(name for name, _, _ in JUDGED), "marks"], rows), ""])  # fmt: skip


def idle(table):
    counts = sorted(table.values("idle", "ports"))
    if not counts:
        return ""
    figures = [("Wake-ups of the worker in the window", "worker_sleeps", plain), ("Naps", "worker_naps", plain),
               ("CPU of the worker, of one core", "cpu_percent", percent),
               ("CPU of the whole switch, our two looks at its counters included", "switch_cpu_percent", percent),
               ("Private memory of the switch, KiB", "resident_kib", count_words),
               ("Seconds to connect", "connected_s", plain)]  # fmt: skip
    seconds = statistics.median(run["figures"]["seconds"] for run in table.data["runs"] if run["part"] == "idle")
    return "\n".join([f"## Idle: connected ports without traffic, {seconds:.3g} s",
                      *grid(table, "idle", ("policy", table.policies("idle")), ("ports", counts), figures), ""])  # fmt: skip


def one_row_each(table, part, figures, **fixed):
    rows = []
    for policy in table.policies(part):
        cell = {"policy": policy, **fixed}
        if table.runs(part, **cell):
            mark = table.mark(part, **cell)
            rows.append([f"`{policy}`{' ' + mark if mark else ''}",
                         *(with_spread(table.spread(figure, part, **cell), form) for _, figure, form in figures)])  # fmt: skip
    return lines(["policy", *(title for title, _, _ in figures)], rows)


def first(table):
    if not table.values("first", "policy"):
        return ""
    gap = next(run["figures"]["gap_s"] for run in table.data["runs"] if run["part"] == "first")
    figures = [("p50", "latency_ns_p50", time_words), ("p99", "latency_ns_p99", time_words),
               ("slowest", "latency_ns_p999", time_words), ("frames", "received", plain),
               ("of it in the switch, mean", "switch_first_frame_ns", time_words)]  # fmt: skip
    return "\n".join([f"## The first frame after {gap:g} s of silence", "", *one_row_each(table, "first", figures), ""])


def burst_lengths(table):
    from parts import AT_ONCE

    return sorted(table.values("bursts", "on_off_ms"), key=lambda name: 0 if name == AT_ONCE else float(name))


def bursts(table):
    if not table.values("bursts", "on_off_ms"):
        return ""
    from parts import AT_ONCE, BURST_RATE

    return "\n".join([f"## Bursts: {BURST_RATE} frames/s for so many ms, then as long nothing", "",
                      f"`{AT_ONCE}`: every millisecond, without time between them.",
                      *grid(table, "bursts", ("policy", table.policies("bursts")), ("on_off_ms", burst_lengths(table)), LOAD),
                      ""])  # fmt: skip


def neighbour(table):
    if not table.values("neighbour", "policy"):
        return ""
    from parts import JAIN_SIZES, QUIET_GUESTS, QUIET_RATE

    asked = [("answers/s", "answers_per_s", count_words), ("p50", "latency_ns_p50", time_words),
             ("p99, median guest", "latency_ns_p99", time_words), ("p99, worst guest", "latency_ns_p99_worst", time_words),
             ("lost", "lost", plain), ("flood, frames/s", "flood_per_s", count_words),
             ("CPU of the worker", "cpu_percent", percent)]  # fmt: skip
    shared = [("by frames", "jain_frames", ratio_words), ("by bytes", "jain_bytes", ratio_words),
              ("by time served", "jain_served_ns", ratio_words), ("frames/s", "frames_per_s", count_words)]  # fmt: skip
    out = ["## A noisy neighbour", ""]
    for what in ("alone", "with a flooder"):
        out += [f"{QUIET_GUESTS} guests that ask {QUIET_RATE} times a second and wait for the echo, {what}:", "",
                *one_row_each(table, "neighbour", asked, what=what), ""]  # fmt: skip
    out += [f"Jain's index of equal floods, frames of {', '.join(map(str, JAIN_SIZES))} bytes, the worker with half a core"
            " (1: equal; 0.25: one has it all):", "", *one_row_each(table, "neighbour", shared, what="shares"), ""]  # fmt: skip
    return "\n".join(out)


def tax(table):
    counts = sorted(table.values("tax", "ports"))
    if not counts:
        return ""
    rows = []
    for policy in table.policies("tax"):
        alone = table.median("delivered_per_s", "tax", policy=policy, ports=0)
        row = [f"`{policy}`", with_spread(table.spread("delivered_per_s", "tax", policy=policy, ports=0), count_words)]
        for count in counts[1:]:
            spread = table.spread("delivered_per_s", "tax", policy=policy, ports=count)
            marks = {*table.mark("tax", policy=policy, ports=0), *table.mark("tax", policy=policy, ports=count)}
            words = with_spread(spread and [x / alone for x in spread], ratio_words) if alone else "-"
            row.append(" ".join([words, *sorted(marks)]))
        rows.append(row)
    cost = grid(table, "tax", ("policy", table.policies("tax")), ("ports", counts),
                [("Time of the worker for each frame", "ns_per_frame", time_words)])  # fmt: skip
    return "\n".join(["## The tax of idle neighbours", "",
                      "Frames a second of one busy pair alone, and in parts of that beside so many idle ports:", "",
                      *lines(["policy", "alone", *(f"{count} ports" for count in counts[1:])], rows), *cost, ""])  # fmt: skip


def workers(table):
    if not table.values("workers", "placement"):
        return ""
    policy = table.policies("workers")[0]
    out = ["## Workers and placement", "",
           f"`{policy}`; guests send to nowhere; skewed: those flood that placement by number puts on one worker, the"
           " others send 10,000 a second."]  # fmt: skip
    if table.data["machine"]["cpus"] < 6:
        out += ["The guests share the workers' CPUs, so that frames a second end where all CPU time is spent, whatever the"
                " number of workers; frames for a CPU-second of the workers tell what a worker lost by sharing."]  # fmt: skip
    for load_name in ("even", "skewed"):
        base_cell = {"policy": policy, "load": load_name, "workers": 1, "placement": "single"}
        base = table.median("frames_per_s", "workers", **base_cell)
        base_cpu = table.median("frames_per_cpu_s", "workers", **base_cell)
        rows = []
        counts, placements = sorted(table.values("workers", "workers")), ("single", "group", "per-port", "balanced")
        for workers, placement in [(n, placement) for n in counts for placement in placements]:
            cell = {"policy": policy, "load": load_name, "workers": workers, "placement": placement}
            if not table.runs("workers", **cell) or not base:
                continue
            spread, per_cpu = (table.spread(name, "workers", **cell) for name in ("frames_per_s", "frames_per_cpu_s"))
            each = [run["figures"]["each_worker_percent"] for run in table.runs("workers", **cell)]
            busy = [f"{statistics.median(part):.0f} %" for part in zip(*each)]
            mark = table.mark("workers", **cell)
            rows.append([f"{workers} {placement}{' ' + mark if mark else ''}", with_spread(spread, count_words), f"{spread[0] / base:.2f}",
                         with_spread(per_cpu, count_words), f"{per_cpu[0] / base_cpu:.2f}", " + ".join(busy),
                         with_spread(table.spread("guests_cpu_percent", "workers", **cell), percent),
                         with_spread(table.spread("moves", "workers", **cell), plain)])  # fmt: skip
        header = ["workers, placement", "frames/s", "ratio", "frames for a worker's CPU-second", "ratio", "CPU of workers",
                  "CPU of guests", "moves"]  # fmt: skip
        out += ["", f"{load_name.capitalize()} load:", "", *lines(header, rows)]
    return "\n".join([*out, ""])


def peers(table):
    if not table.values("peers", "backend"):
        return ""
    return "\n".join(["## Other back-ends, same guests, same rates", "",
                      "Wake-ups of testpmd and OVS are the voluntary switches of their busy thread. Histograms take in"
                      " the first frames of a run; why OVS is slow in the tail at low rates was not looked into.",
                      *grid(table, "peers", ("backend", sorted(table.values("peers", "backend"))),
                            ("rate", rates(table, "peers")), LOAD), ""])  # fmt: skip


# ---------------------------------------------------------------- plots


def plots(table):
    """Name and text of each plot that there is data for."""
    if table.values("load", "rate"):
        names = rates(table, "load")
        series = lambda figure, scale: [  # noqa: E731
            (policy, [table.spread(figure, "load", policy=policy, rate=rate) for rate in names], scale)
            for policy in table.policies("load")]  # fmt: skip
        yield "load-cpu.svg", plot.lines("CPU of the worker against load", "frames offered a second",
                                         "% of one core", names, series("cpu_percent", 1), 0.01)  # fmt: skip
        yield "load-p99.svg", plot.lines("Latency, 99th percentile, against load", "frames offered a second",
                                         "us from guest to guest", names, series("latency_ns_p99", 1e-3), 10)  # fmt: skip
    if table.values("peers", "rate"):
        names = rates(table, "peers")
        for name, figure, title, unit, scale, floor in (
            ("peers-cpu.svg", "cpu_percent", "CPU of each back-end against load", "% of one core", 1, 0.01),
            ("peers-p99.svg", "latency_ns_p99", "Latency, 99th percentile, of each back-end", "us from guest to guest", 1e-3, 10),
        ):
            data = [(end, [table.spread(figure, "peers", backend=end, rate=rate) for rate in names], scale)
                    for end in sorted(table.values("peers", "backend"))]  # fmt: skip
            yield name, plot.lines(title, "frames offered a second", unit, names, data, floor)
