"""What `--assert` judges: counts only. Times belong to the machine, counts to the program."""

PARTS = ["load", "idle", "bursts", "tax"]
BULK = "100k"


def cells(data, part):
    return [(run["cell"], run["figures"]) for run in data["runs"] if run["part"] == part]


def judge(r, data):
    nothing_wakes(r, data)
    kicks(r, data)
    accounts(r, data)


def nothing_wakes(r, data):
    """Without traffic a worker sleeps, whatever its policy (but `spin`) and however many ports there are."""
    quiet = [(f"{cell['ports']} idle ports", cell, figures) for cell, figures in cells(data, "idle")]
    quiet += [("an idle pair", cell, figures) for cell, figures in cells(data, "load") if cell["rate"] == "0"]
    for what, cell, figures in quiet:
        if not cell["policy"].startswith("spin"):
            woken = figures["worker_sleeps"] + figures["worker_naps"]
            r.check(f"{cell['policy']}, {what}: no wake-up", woken == 0,
                    f"{woken} in {figures['seconds']:.1f} s")  # fmt: skip


def kicks(r, data):
    """`timer` looks by itself: in bulk its guest has nothing to kick for."""
    bulk = {}
    for cell, figures in cells(data, "load"):
        if cell["rate"] == BULK:
            bulk.setdefault(cell["policy"], []).append(figures["kicks_per_frame"])
    if bulk.get("event") and bulk.get("timer:1000"):
        event, timer = max(bulk["event"]), max(bulk["timer:1000"])
        r.check(f"timer:1000, {BULK} frames/s: 95 % fewer kicks than event", timer < 0.05 * min(bulk["event"]),
                f"{timer:.4f} and {event:.4f} for each frame")  # fmt: skip


def accounts(r, data):
    """Every frame sent was received or is in exactly one drop counter."""
    for part in ("load", "tax", "bursts"):
        for cell, figures in cells(data, part):
            if "sent" in figures:
                lost = figures["sent"] - figures["received"]
                named = ", ".join(str(value) for value in cell.values())
                r.check(f"{part} {named}: every frame accounted for", lost == sum(figures["drops"].values()),
                        f"{figures['sent']} sent, {lost} lost, {figures['drops']}")  # fmt: skip
