"""Plots as SVG, written by hand: they need no package, and follow the reader's light or dark scheme."""

import math
from html import escape

WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 76, 190, 52, 60
# Told apart by hue, by lightness and by dash, on white and on black alike; one policy, one look.
LOOKS = {
    "event": ("#2f7fd6", ""),
    "napi": ("#5b9bd5", "6 3"),
    "timer:1000": ("#17a398", ""),
    "timer:20000": ("#17a398", "6 3"),
    "coalesce:50,32": ("#9b6fd3", ""),
    "coalesce:50/pending": ("#9b6fd3", "6 3"),
    "spin": ("#e0803a", ""),
    "adaptive": ("#e23d5b", ""),
    "adaptive:200": ("#e23d5b", "6 3"),
    "pvswitch adaptive, cross": ("#e23d5b", ""),
    "pvswitch adaptive, switch": ("#e23d5b", "6 3"),
    "testpmd io": ("#2f7fd6", ""),
    "OVS-DPDK": ("#17a398", ""),
    "OVS-DPDK, pmd-maxsleep 500": ("#17a398", "6 3"),
}
MORE_LOOKS = [("#8a8f98", ""), ("#8a8f98", "6 3"), ("#b8a13a", ""), ("#b8a13a", "6 3"), ("#c25fb0", "")]
BEHIND = ("0", "max")  # not on the scale of the others: drawn to by a thin line
STYLE = """
  text { font: 13px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #30343b }
  .title { font-size: 16px; font-weight: 600 }
  .small { font-size: 12px; fill: #60656f }
  .back { fill: #ffffff }
  .grid { stroke: #d9dce2; stroke-width: 1 }
  .axis { stroke: #8a8f98; stroke-width: 1 }
  .halo { stroke: #ffffff; stroke-width: 3; stroke-linejoin: round; paint-order: stroke }
  @media (prefers-color-scheme: dark) {
    text { fill: #e3e6ec } .small { fill: #a3a9b5 } .back { fill: #16181d }
    .grid { stroke: #32363f } .halo { stroke: #16181d }
  }
"""


def lines(title, x_title, y_title, x_names, series, floor):
    """Series of (name, [(median, low, high) or None for each x], scale) over a logarithmic y axis.

    What lies below `floor` is drawn on the axis: a logarithm knows no zero.
    """
    points = [(name, [tuple(max(v * scale, floor) for v in spread) if spread and spread[0] is not None else None
                      for spread in values]) for name, values, scale in series]  # fmt: skip
    points = [(name, values) for name, values in points if any(values)]
    used = [i for i in range(len(x_names)) if any(values[i] for _, values in points)]
    x_names = [x_names[i] for i in used]
    points = [(name, [values[i] for i in used]) for name, values in points]
    highest = max((v[2] for _, values in points for v in values if v), default=floor * 10)
    low, high = math.log10(floor), math.ceil(math.log10(max(highest, floor * 10)) - 0.02)
    if highest > 10**high:  # one point just above a power of ten needs no decade of its own
        high = math.log10(highest) + 0.02

    def x(i):
        return LEFT + 24 + (WIDTH - LEFT - RIGHT - 48) * i / max(len(x_names) - 1, 1)

    def y(value):
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (math.log10(value) - low) / (high - low)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
           f' role="img" aria-label="{escape(title)}">', f"<style>{STYLE}</style>",
           f'<rect class="back" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
           f'<text class="title" x="{LEFT}" y="28">{escape(title)}</text>',
           f'<text class="small" x="{LEFT}" y="{TOP - 8}">{escape(y_title)}</text>']  # fmt: skip
    for power in range(math.floor(low), math.floor(high) + 1):
        at = y(10.0**power)
        words = f"{10**power:,}" if power >= 0 else f"{10.0**power:g}"
        if power == low:
            words = f"≤ {words}"
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        out.append(f'<text class="small" x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{words}</text>')
    for i, name in enumerate(x_names):
        out.append(f'<text x="{x(i):.1f}" y="{HEIGHT - BOTTOM + 22}" text-anchor="middle">{escape(name)}</text>')
        out.append(f'<line class="axis" x1="{x(i):.1f}" x2="{x(i):.1f}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 5}"/>')
    out.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>')
    out.append(f'<text class="small" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 14}" text-anchor="middle">'
               f"{escape(x_title)}; bars: smallest and largest</text>")  # fmt: skip
    # The ones that matter last, on top of the others.
    order = sorted(range(len(points)), key=lambda n: points[n][0].startswith(("adaptive", "pvswitch")))
    for n in order:
        out += curve(look(points, n), x_names, points[n][1], x, y)
    out += labels(points, x, y)
    return "\n".join([*out, "</svg>", ""])




def look(points, n):
    others = [name for name, _ in points if name not in LOOKS]
    name = points[n][0]
    return LOOKS.get(name) or MORE_LOOKS[others.index(name) % len(MORE_LOOKS)]


def curve(its_look, x_names, values, x, y):
    colour, dash = its_look
    there = [(x_names[i], x(i), *(y(v) for v in value)) for i, value in enumerate(values) if value]
    out = []
    for (name_a, ax, ay, *_), (name_b, bx, by, *_) in zip(there, there[1:]):
        thin = name_a in BEHIND or name_b in BEHIND
        out.append(f'<path d="M{ax:.1f} {ay:.1f}L{bx:.1f} {by:.1f}" stroke="{colour}" stroke-linecap="round"'
                   f' stroke-width="{1 if thin else 2.4}"' + (f' stroke-dasharray="{dash}"' if dash else "")
                   + (' opacity="0.45"' if thin else "") + "/>")  # fmt: skip
    for _, px, py, bottom, top in there:
        if bottom - top > 3:
            out.append(f'<path d="M{px:.1f} {bottom:.1f}V{top:.1f}" stroke="{colour}" stroke-width="1.2" opacity="0.7"/>')
        out.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.2" fill="{colour}"/>')
    return out


def labels(points, x, y):
    """Each name at the end of its line, pushed apart where lines end together."""
    ends = []
    for n, (name, values) in enumerate(points):
        last = max(i for i, value in enumerate(values) if value)
        ends.append([y(values[last][0]), x(last), n, name])
    ends.sort()
    gap, places = 18, []
    for wanted, *_ in ends:
        places.append(max(wanted, places[-1] + gap) if places else wanted)
    lowest = HEIGHT - BOTTOM
    for k in range(len(places) - 1, -1, -1):  # what was pushed below the axis pushes back
        places[k] = min(places[k], lowest)
        lowest = places[k] - gap
    out = []
    for place, (wanted, end_x, n, name) in zip(places, ends):
        colour = look(points, n)[0]
        at = WIDTH - RIGHT + 14
        out.append(f'<path d="M{end_x + 6:.1f} {wanted:.1f}L{at - 8} {place:.1f}h5" stroke="{colour}" fill="none"'
                   ' stroke-width="1" opacity="0.6"/>')  # fmt: skip
        out.append(f'<text class="halo" x="{at}" y="{place + 4:.1f}" style="fill:{colour};font-weight:600">{escape(name)}</text>')
    return out
