"""User-Mode Linux guests: a kernel as a process, with an initramfs built here and a console for commands."""

import os
import re
import shutil
import signal
import stat
import subprocess
from pathlib import Path

import rig

PACKAGES = ["user-mode-linux", "busybox-static"]


class Guest:
    """A UML kernel; its console is the pipe the rig types into. `devices`: options of the kernel that add them."""

    def __init__(self, r, name, image, devices, log=None):
        self.name = name
        self.count = 0
        log = log or f"guest-{name}"
        # The lab's: it knows what the kernel needs on this processor.
        kernel = [rig.lab_beside(rig.program_with_lab(r)), "guest", "uml", "mem=256M", f"initrd={image}",
                  *devices, f"umid={log}", "con=null", "con0=fd:0,fd:1"]  # fmt: skip
        # UML waits for its console with epoll, which takes pipes but no file: hence cat. And it makes
        # a session of its own, so that the rig's signals do not reach it: hence setpriv and kill().
        command = ["sh", "-c", 'setpriv --pdeathsig KILL "$@" 2>&1 | cat', "guest", *kernel]
        self.pid_file = r.tmp / ".uml" / log / "pid"
        r.undo(self.kill)
        # HOME: UML keeps a folder of its own there. /dev/shm: a guest's memory must not go to a disk.
        environment = {"TMPDIR": "/dev/shm", "HOME": str(r.tmp)}
        self.process = r.start(log, command, stdin=subprocess.PIPE, env=environment)

    def wait_ready(self):
        self.process.wait_line(r"^=0= ready", 60)

    def do(self, command, timeout_s=60):
        """Runs a command line in the guest; returns what it printed and its exit status."""
        self.count += 1
        seen = len(self.process.log())
        self.process.need_alive()
        self.process.write(command + "\n")
        end = re.compile(rf"^={self.count}= (\d+)", re.MULTILINE)

        def ended():
            self.process.need_alive()
            return end.search(self.process.log()[seen:])

        found = rig.wait_for(f"guest {self.name}: {command}", ended, timeout_s)
        return self.process.log()[seen : seen + found.start()].strip().replace("\r", ""), int(found[1])

    def power_off(self):
        self.process.write("poweroff -f\n")
        try:
            self.process.popen.wait(20)
        except subprocess.TimeoutExpired:
            raise rig.Failure(f"guest {self.name}: does not power off") from None

    def kill(self):
        try:
            os.killpg(int(self.pid_file.read_text()), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError, ValueError):
            pass  # it powered off


def build_image(name, programs, modules=()):
    """An initramfs of busybox, programs with their libraries, and kernel modules; kept in the cache."""
    folders = list(Path("/usr/lib/uml/modules").glob("*/kernel"))
    if not folders:
        raise rig.Skip("UML's kernel modules; install them: sudo apt-get install user-mode-linux")
    busybox = shutil.which("busybox")
    files = {"init": Path(__file__).with_name("uml-init"), "bin/busybox": Path(busybox)}
    for module in modules:
        files["lib/" + Path(module).name] = folders[0] / module
    for program in programs:
        files["bin/" + Path(program).name] = Path(program)
        for library in re.findall(r"(/\S+) \(0x", rig.run(["ldd", program]).stdout):
            files[library.lstrip("/")] = Path(library)
    image = rig.CACHE / "uml" / f"{name}.cpio"
    newest = max(source.stat().st_mtime for source in [*files.values(), Path(__file__)])
    if image.exists() and image.stat().st_mtime > newest:
        return image
    image.parent.mkdir(parents=True, exist_ok=True)
    archive = Archive()
    for folder in ("proc", "sys", "tmp", "dev"):
        archive.add(folder, stat.S_IFDIR | 0o755)
    archive.add("dev/console", stat.S_IFCHR | 0o600, device=(5, 1))
    archive.add("dev/null", stat.S_IFCHR | 0o666, device=(1, 3))
    archive.add("dev/urandom", stat.S_IFCHR | 0o666, device=(1, 9))
    archive.add("dev/ubda", stat.S_IFBLK | 0o600, device=(98, 0))
    archive.add("lib/modules", stat.S_IFREG | 0o644, " ".join(Path(module).stem for module in modules).encode())
    for path, source in files.items():
        archive.add(path, stat.S_IFREG | 0o755, source.read_bytes())
    for applet in rig.run([busybox, "--list"]).stdout.split():
        if applet != "busybox":
            archive.add(f"bin/{applet}", stat.S_IFLNK | 0o777, b"busybox")
    image.write_bytes(archive.end())
    return image


class Archive:
    """A cpio archive in the kernel's "newc" form. Written here because device files need no root so."""

    def __init__(self):
        self.parts = []
        self.known = set()

    def add(self, name, mode, data=b"", device=(0, 0)):
        for parent in reversed(Path(name).parents[:-1]):
            if str(parent) not in self.known:
                self.add(str(parent), stat.S_IFDIR | 0o755)
        if name in self.known:
            return
        self.known.add(name)
        number = len(self.known)
        links = 2 if stat.S_ISDIR(mode) else 1
        fields = (number, mode, 0, 0, links, 0, len(data), 0, 0, *device, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
        self.parts += [padded(head), padded(data)]

    def end(self):
        self.add("TRAILER!!!", 0)
        return b"".join(self.parts)


def padded(data):
    return data + b"\0" * (-len(data) % 4)
