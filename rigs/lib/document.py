"""Commands of the documents, run as they are written there, so that document and rig cannot drift apart.

    guide = Document("uplinks.md")
    start, qemu = commands(guide.take("Stream sockets", {"/run/pvswitch/": f"{folder}/"}))

Blocks under a heading are taken in their order, each once; `left` has the others. What is substituted must
be there: a changed document fails the rig until both agree.
"""

import re

import rig


class Document:
    """The code blocks of a document, fenced or indented, with the heading above each; drawings are left out."""

    def __init__(self, name):
        self.name = f"docs/{name}"
        self.left = list(blocks((rig.ROOT / self.name).read_text()))

    def take(self, heading, replace=None):
        """The next block under a heading, with substitutions."""
        at = next((at for at, (above, _) in enumerate(self.left) if above == heading), None)
        if at is None:
            raise rig.Failure(f"{self.name}: no further block under `{heading}`")
        return self.substituted(self.left.pop(at)[1], replace or {})

    def substituted(self, text, replace):
        for old, new in replace.items():
            if old not in text:
                raise rig.Failure(f"{self.name}: `{old}` is not in the block:\n{text}")
            text = text.replace(old, str(new))
        return text

    def skip(self, r, heading, why):
        """The same for a block that cannot run here."""
        r.say(f"      {self.name}, {heading}: not run: {why}: {commands(self.take(heading))[-1]}")

    def check_all_taken(self, r):
        left = "; ".join(f"{above}: {text.splitlines()[0]}" for above, text in self.left)
        r.check(f"{self.name}: every block was used", not left, left)


def blocks(text):
    heading, lines, fence = "", [], None
    for line in [*text.splitlines(), "", "end"]:
        if fence is not None:
            if line.startswith("```"):
                if fence != "text":
                    yield heading, "\n".join(lines)
                fence, lines = None, []
            else:
                lines.append(line)
        elif line.startswith("    ") or lines and not line:
            lines.append(line.removeprefix("    "))
        else:
            if lines:
                yield heading, "\n".join(lines).strip()
                lines = []
            if line.startswith("```"):
                fence = line.removeprefix("```")
            elif line.startswith("#"):
                heading = line.lstrip("# ")


def commands(text):
    """Its commands, one a line: continued lines are joined, comments and empty lines left out."""
    lines = text.replace("\\\n", "").splitlines()
    return [line for line in (re.sub(r"(^|\s+)# .*", "", line).strip() for line in lines) if line]


def shell(command, *more):
    """Words that run a command of a document, with further words."""
    return ["bash", "-c", f"exec {command} {' '.join(map(str, more))}"]
