"""One emulated machine with Xen, a Debian dom0, and PV and PVH guests, each driven command by command.

Everything comes from Debian packages, unpacked and not installed. Two images: `base` is a small
busybox system, and all that a guest needs; dom0 has the same plus Xen's tools, and `base` and the
kernel as files to start guests from. The program under test is added to both on each run.

Commands reach dom0 on a virtio-serial port, and a guest on another one, which dom0 joins to the
guest's Xen console.
"""

import re
import shutil
from pathlib import Path

import agent
import rig

XEN = "4.17"
XEN_BIN = f"usr/lib/xen-{XEN}/bin"
IMAGE_PACKAGES = f"""
    busybox-static coreutils iperf3 libiperf0 libsctp1 libssl3 libc6 libgcc-s1 ethtool libmnl0
    xen-hypervisor-{XEN}-amd64 xen-utils-{XEN} xen-utils-common xenstore-utils bash libtinfo6
    libxencall1 libxendevicemodel1 libxenevtchn1 libxenforeignmemory1 libxengnttab1 libxenhypfs1
    libxenmisc{XEN} libxenstore4 libxentoolcore1 libxentoollog1
    libyajl2 libfdt1 libnl-3-200 libnl-route-3-200 libuuid1
    zlib1g libbz2-1.0 liblzma5 liblzo2-2 libzstd1
""".split()

# An emulated processor does not speculate. With these on, Xen changes page tables twice for each
# entry from a guest, which an emulator is far slower at than a processor.
XEN_MITIGATIONS = "xpti=no spec-ctrl=no"

# By the host's clock an emulated second is a second of this machine, and what else it does shows.
# By instructions each one takes 8 ns, independent of its emulation cost: figures repeat within a
# few per cent.
CLOCKS = {
    "host": ["-accel", "tcg,thread=multi,tb-size=256"],
    "instructions": ["-accel", "tcg,thread=single,tb-size=256", "-icount", "shift=3,sleep=off"],
    "fast": ["-accel", "tcg,thread=single,tb-size=256", "-icount", "shift=0,sleep=off"],
}

# Without AVX: with the vector registers of `-cpu max` two domains mix theirs up. Without SMAP: dom0 does not boot with
# it. With AMD's virtualization, for PVH guests, the only kind that Debian's Xen migrates live. Xen intercepts the TSC;
# QEMU reports RDTSCP as RDTSC, which Xen takes for a fault.
CPU = "Opteron_G3,+svm,+npt,-rdtscp"

# Tests of the kernel's own ciphers take a fifth of a boot in emulation.
KERNEL_WORDS = "console=hvc0 mitigations=off cryptomgr.notests"

# The image is unpacked in memory and takes some 35 MiB. With 160 in all, four streams over `pvswitch nic`
# with two queues ran out of memory now and then, and the kernel killed nic.
GUEST_MIB = 240

BASE_PROGRAMS = ["usr/bin/iperf3", "sbin/ethtool"]
DOM0_PROGRAMS = [
    f"{XEN_BIN}/{name}" for name in ("xl", "xenstored", "xenconsoled", "xen-init-dom0", "libxl-save-helper")
] + ["usr/bin/xenstore", "bin/bash"]
XENSTORE_NAMES = ["chmod", "exists", "list", "ls", "read", "rm", "watch", "write"]

BASE_MODULES = "xen-evtchn xen-gntdev xen-gntalloc xen-netfront tun".split()
DOM0_MODULES = """
    xen-privcmd xenfs xen-netback llc stp bridge
    virtio_ring virtio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci virtio_console
""".split()

# What both inits begin with.
INIT = r"""#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /tmp /run /sbin /usr/bin /usr/sbin
/bin/busybox --install -s
export PATH=/bin:/sbin:/usr/bin:/usr/sbin:/XEN_BIN HOME=/tmp
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/pts /dev/net
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /run
echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6
echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6
echo 0 > /proc/sys/kernel/printk
ip link set lo up
""".replace("XEN_BIN", XEN_BIN)

# A guest gets its identity from its kernel's command line.
GUEST_INIT = r"""
for word in $(cat /proc/cmdline); do
    case $word in guest_*) export "$word";; esac
done
for module in xen-evtchn xen-gntdev tun; do insmod /modules/$module.ko; done
# Two queues of `pvswitch nic` take some 1600 pages; without a word it gives 1024.
insmod /modules/xen-gntalloc.ko limit=8192
if [ "$guest_netfront" = yes ]; then
    insmod /modules/xen-netfront.ko
    ip addr add "$guest_ip/24" dev eth0
    ip link set eth0 up
fi
exec 3<> /dev/hvc0
stty raw -echo <&3
"""

DOM0_INIT = r"""
for module in $(cat /modules/order); do insmod /modules/$module.ko; done
mount -t xenfs xenfs /proc/xen
mkdir -p /run/xen /run/xenstored /var/log/xen /var/lib/xen /var/lock
ln -s /run /var/run
xenstored --pid-file /run/xenstored.pid
xen-init-dom0
xenconsoled
ports=/sys/class/virtio-ports
while ! ls $ports/vport*p1 > /dev/null 2>&1; do sleep 0.1; done
for port in $ports/*; do ln -s /dev/${port##*/} /dev/agent-$(cat $port/name); done
exec 3<> /dev/agent-dom0
"""

# A driver domain is a guest with dom0's tools.
DRIVER_INIT = r"""
for module in xen-privcmd xenfs xen-evtchn xen-gntdev tun llc stp bridge; do insmod /modules/$module.ko; done
insmod /modules/xen-gntalloc.ko limit=8192
mount -t xenfs xenfs /proc/xen
mkdir -p /run/xen /var/log/xen /var/lib/xen /var/lock
ln -s /run /var/run
exec 3<> /dev/hvc0
stty raw -echo <&3
"""

# Makes its image, of what is in dom0.
DRIVER = r"""#!/bin/sh
cd / && find bin sbin lib lib64 usr etc modules | cpio -o -H newc > $1 2> /dev/null
cd /driver && echo init | cpio -o -H newc >> $1 2> /dev/null
"""

# Joins a guest's console and the virtio-serial port of the same name, until the guest goes.
RELAY = r"""#!/bin/sh
[ -f /run/relay.$1 ] && kill -- -$(cat /run/relay.$1) 2> /dev/null
# A domain that is being made has no terminal yet.
for i in $(seq 600); do
    tty=$(xenstore-read /local/domain/$(xl domid $1)/console/tty 2> /dev/null)
    [ -c "$tty" ] && break
    sleep 0.1
done
[ -c "$tty" ] || {
    echo no terminal for the console of $1: xenconsoled $(pidof xenconsoled || echo ended), $(xl list), \
        $(xenstore-ls /local/domain/$(xl domid $1)/console)
    exit 1
}
setsid sh -c '
    echo $$ > /run/relay.$0
    exec 3<> /dev/agent-$0 4<> $1
    cat <&3 >&4 &
    cat <&4 >&3
    kill $!
' $1 $tty > /dev/null 2>&1 < /dev/null &
"""

# What the toolstack calls for each vif, except where Debian's own script is to be used. A kernel's vif has an
# interface, which joins the bridge.
VIF_SCRIPT = r"""#!/bin/sh
[ "$1" = online ] || exit 0
if [ -d /sys/class/net/$vif ]; then
    ip link set $vif master br0 && ip link set $vif up
fi
xenstore-write $XENBUS_PATH/hotplug-status connected
"""


def copy_program(root, tree, name):
    """Copies a program and the libraries that it asks for from the unpacked packages into an image."""
    libraries = f"{root}/lib/x86_64-linux-gnu:{root}/usr/lib/x86_64-linux-gnu"
    loader = next(root.rglob("ld-linux-x86-64.so.2"))
    (tree / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(root / name, tree / name)
    listing = rig.run([loader, "--library-path", libraries, "--list", root / name]).stdout
    for line in listing.splitlines():
        _, arrow, path = line.partition(" => ")
        if "not found" in line:
            raise rig.Failure(f"{name}: {line.strip()}; add its package to IMAGE_PACKAGES")
        if arrow and str(root) in path:
            shutil.copy(path.split()[0], tree / "lib")


def copy_modules(kernel_root, tree, modules):
    (tree / "modules").mkdir(exist_ok=True)
    present = []
    for module in modules:
        found = list((kernel_root / "lib/modules").rglob(f"{module}.ko"))
        if found:  # one that is missing is built into this kernel
            shutil.copy(found[0], tree / "modules")
            present.append(module)
    return present


def write_script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def pack(tree, image):
    """Written aside and renamed: an interrupted build must not look like a finished one."""
    unfinished = image.with_suffix(".new")
    rig.run(["sh", "-c", f"find . | cpio -o -H newc -R 0:0 --quiet > '{unfinished}'"], cwd=tree)
    unfinished.rename(image)
    shutil.rmtree(tree)


def build_images():
    """Builds hypervisor, kernel and both images, or finds them in the cache; returns the folder."""
    with rig.cache("xen") as cache:
        return build_images_in(cache)


def build_images_in(cache):
    kernel_package = rig.dependency("linux-image-amd64", r"linux-image-.*")
    kernel_root = rig.unpack_packages([kernel_package], cache / "kernel")
    root = rig.unpack_packages(IMAGE_PACKAGES, cache / "user")
    inputs = [Path(__file__), Path(agent.__file__), kernel_root / ".packages", root / ".packages"]
    dom0 = cache / "dom0.cpio"
    if dom0.exists() and dom0.stat().st_mtime > max(path.stat().st_mtime for path in inputs):
        return cache
    rig.need_packages(["cpio"])
    print("building the images of guests and dom0 ...", flush=True)
    rig.run(["sh", "-c", f"gunzip < '{root}/boot/xen-{XEN}-amd64.gz' > '{cache}/xen'"])
    vmlinux = cache / "vmlinux"
    vmlinux.write_bytes(agent.plain_kernel(next((kernel_root / "boot").glob("vmlinuz-*"))))

    tree = cache / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for folder in ("bin", "sbin", "lib", "lib64"):
        (tree / folder).mkdir(parents=True)
    shutil.copy(root / "bin/busybox", tree / "bin")
    shutil.copy(next(root.rglob("ld-linux-x86-64.so.2")), tree / "lib64")
    shutil.copy(next(root.rglob("libgcc_s.so.1")), tree / "lib")
    for program in BASE_PROGRAMS:
        copy_program(root, tree, program)
    copy_modules(kernel_root, tree, BASE_MODULES)
    write_script(tree / "init", INIT + GUEST_INIT + agent.SHELL)
    pack(tree, cache / "base.cpio")

    # Unpacked on top of `base`.
    for folder in ("bin", "lib", "guest"):
        (tree / folder).mkdir(parents=True)
    for program in DOM0_PROGRAMS:
        copy_program(root, tree, program)
    for name in XENSTORE_NAMES:
        (tree / f"usr/bin/xenstore-{name}").symlink_to("xenstore")
    extra = copy_modules(kernel_root, tree, DOM0_MODULES)
    # privcmd before xenfs; netback is loaded by the rig.
    order = ["xen-privcmd", "xenfs", "xen-evtchn", "xen-gntdev", "xen-gntalloc", "tun"]
    order += [module for module in extra if module not in (*order, "xen-netback")]
    (tree / "modules/order").write_text(" ".join(order))
    write_script(tree / "init", INIT + DOM0_INIT + agent.SHELL)
    write_script(tree / "bin/relay", RELAY)
    write_script(tree / "bin/driver-image", DRIVER)
    write_script(tree / "driver/init", INIT + DRIVER_INIT + agent.SHELL)
    shutil.copytree(root / "etc/xen/scripts", tree / "etc/xen/scripts")
    write_script(tree / "etc/xen/scripts/vif", VIF_SCRIPT)
    (tree / "etc/xen/xl.conf").write_text('autoballoon="off"\n')
    shutil.copy(vmlinux, tree / "guest/vmlinux")
    pack(tree, dom0)
    return cache


def with_program(r, cache):
    """The images of this run: those of the cache, with the program under test."""
    tree = r.tmp / "tree"
    (tree / "usr/bin").mkdir(parents=True)
    # Each machine unpacks it at its start, in emulation; lines of the source are most of it.
    rig.run(["strip", "--strip-debug", "-o", tree / "usr/bin/pvswitch", r.pvswitch])
    pack(tree, r.tmp / "program.cpio")
    guest = r.tmp / "tree/guest/guest.cpio"
    guest.parent.mkdir(parents=True)
    join([cache / "base.cpio", r.tmp / "program.cpio"], guest)
    pack(tree, r.tmp / "guest.cpio")
    image = r.tmp / "dom0.cpio"
    join([cache / "base.cpio", cache / "dom0.cpio", r.tmp / "program.cpio", r.tmp / "guest.cpio"], image)
    return image


def join(parts, whole):
    with open(whole, "wb") as out:
        for part in parts:
            out.write(part.read_bytes())


class Machine(agent.Agent):
    """The emulated machine; as an agent, its dom0."""

    def __init__(self, r, names, cpus, clock):
        cache = build_images()
        image = with_program(r, cache)
        self.r = r
        self.sockets = {name: r.socket_path(f"{name}.agent") for name in ("dom0", *names)}
        ports = []
        for number, (name, path) in enumerate(self.sockets.items(), 1):
            ports += ["-chardev", f"socket,id={name},path={path},server=on,wait=off"]
            ports += ["-device", f"virtserialport,chardev={name},name={name},nr={number}"]
        process = r.start("xen", [
            "qemu-system-x86_64", "-nodefaults", "-display", "none", "-no-reboot",
            "-machine", "q35", *CLOCKS[clock], "-cpu", CPU,
            "-smp", str(cpus), "-m", "2560M",
            "-kernel", cache / "xen",
            "-append", f"console=com1 com1=115200 dom0_mem=1400M noreboot guest_loglvl=all {XEN_MITIGATIONS}",
            "-initrd", f"{cache}/vmlinux {KERNEL_WORDS},{image}",
            "-serial", f"file:{r.out / 'console.log'}",
            "-device", "virtio-serial-pci", *ports,
        ])  # fmt: skip
        super().__init__(r, "dom0", self.sockets["dom0"], process)


# A script of ours, quicker than Debian's.
SCRIPT = "script=/etc/xen/scripts/vif"


class Guest(agent.Agent):
    """A guest, of kind `pv` or `pvh`; `vif`: options of its NIC, if it has one from the start."""

    # The domain of its back end.
    back = 0

    def __init__(self, machine, name, ip, *, kind="pv", vcpus=1, netfront=True, vif=SCRIPT):
        self.machine, self.ip = machine, ip
        number = int(ip.split(".")[-1])
        self.mac = f"00:16:3e:00:00:{number:02x}"
        words = f"{KERNEL_WORDS} guest_ip={ip} guest_netfront={'yes' if netfront else 'no'}"
        lines = [
            f'type="{kind}"', f'name="{name}"', f"memory={GUEST_MIB}", f"vcpus={vcpus}", 'kernel="/guest/vmlinux"',
            'ramdisk="/guest/guest.cpio"', f'extra="{words}"',
            # Its console keeps the reason.
            'on_crash="preserve"',
        ]  # fmt: skip
        if vif:
            lines.append(f'vif=["mac={self.mac},{vif}"]')
        quoted = " ".join(f"'{line}'" for line in lines)
        machine.must(f"printf '%s\\n' {quoted} > /tmp/{name}.cfg")
        super().__init__(machine.r, name, machine.sockets[name], machine.process)

    def become_driver_domain(self):
        """Before it is created. It may write to its part of xenstore, and has dom0's tools."""
        image, config = "/tmp/driver.cpio", f"/tmp/{self.name}.cfg"
        self.machine.must(f"driver-image {image} && echo driver_domain=1 >> {config}"
                          f" && sed -i 's,/guest/guest.cpio,{image},; s,memory=.*,memory=320,' {config}", timeout_s=120)  # fmt: skip
        return self

    def create(self):
        self.machine.must(f"xl create /tmp/{self.name}.cfg", timeout_s=120)
        return self.join()

    def destroy(self):
        """Ends it at once; another guest may have its name then."""
        self.machine.run(f"xl destroy {self.name}", timeout_s=60)
        self.close()

    def join(self):
        """Joins the console of a new domain to our socket."""
        self.machine.must(f"relay {self.name}", timeout_s=240)
        return self

    def domid(self):
        """The number of the domain, a new one after each start; None while there is none."""
        status, text = self.machine.run(f"xl domid {self.name}")
        return int(text) if status == 0 else None

    def reboot(self):
        """Reboots from inside; the toolstack then starts a new domain."""
        before = self.domid()
        self.send("reboot -f")
        rig.wait_for(f"a new domain for {self.name}", lambda: self.domid() not in (None, before), 120, 0.5)
        self.join().wait_ready(600)
        return self.wait_connected()

    def save_and_restore(self):
        self.machine.must(f"xl save {self.name} /tmp/{self.name}.save", timeout_s=120)
        self.machine.must(f"xl restore /tmp/{self.name}.save && rm /tmp/{self.name}.save", timeout_s=120)
        self.join()
        return self.wait_connected()

    def migrate(self):
        """Live, to the same host: both domains have their vifs for a while. Not for PV guests: Debian's Xen does not log
        the pages that they write."""
        self.machine.must(f"xl migrate -s '' {self.name} 'xl migrate-receive'", timeout_s=180)
        self.join()
        return self.wait_connected()

    def attach(self, vif=SCRIPT):
        """Plugs the NIC in, and brings it up inside. A back end without an interface needs no script."""
        self.machine.must(f"xl network-attach {self.name} mac={self.mac} {vif}", timeout_s=60)
        self.must("for i in $(seq 150); do [ -d /sys/class/net/eth0 ] && break; sleep 0.1; done;"
                  f" ip addr add {self.ip}/24 dev eth0 && ip link set eth0 up", timeout_s=60)  # fmt: skip
        return self.wait_connected()

    def wait_connected(self):
        """Until both halves are connected: an interface that is up comes before them, and its first frames are lost."""
        state = f"xenstore-read /local/domain/{self.back}/backend/vif/{self.domid()}/0/state"
        self.machine.must(f'for i in $(seq 150); do [ "$({state})" = 4 ] && exit 0; sleep 0.1; done; exit 1',
                          timeout_s=60)  # fmt: skip
        return self

    def detach(self):
        self.machine.must(f"xl network-detach {self.name} {self.mac}", timeout_s=60)
        self.must("for i in $(seq 100); do [ -d /sys/class/net/eth0 ] || exit 0; sleep 0.1; done; exit 1", timeout_s=60)

    def run(self, command, timeout_s=20):
        try:
            return super().run(command, timeout_s)
        except rig.Failure as error:
            raise rig.Failure(f"{error}; {self.examine()}") from error

    def has_crashed(self):
        """Crashed domains are kept; one that ended in another way has gone."""
        status, text = self.machine.run(f"xl list {self.name}")
        state = text.split()[-2] if status == 0 else "gone"
        return "c" in state or "d" in state or state == "gone"

    def examine(self):
        """Of a guest that does not answer: whether its processors run, its network answers, and the last words of its
        console; details go to a file."""
        show = f"xl vcpu-list {self.name}"
        _, text = self.machine.run(
            f"cat /var/log/xen/xl-{self.name}.log; xl list; {show}; sleep 2; {show}; ping -c 3 -W 2 {self.ip};"
            " cat /proc/interrupts; pvswitch ctl --control /run/pvswitch.sock show;"
            " for key in q e r; do xl debug-keys $key; done; xl dmesg | tail -n 400", timeout_s=60)  # fmt: skip
        text += f"\nConsole:\n{self._unread.decode(errors='replace')}"
        file = self.machine.r.out / f"{self.name}.hung"
        file.write_text(text)
        answers = re.search(r"\d+ packets received|\d+ received", text)
        processors = re.findall(rf"^{self.name} +\d+ +\d+ +\S+ +(\S+) +(\S+)", text, re.MULTILINE)
        return (f"its processors, state and seconds of CPU, twice: {' '.join(map(' '.join, processors)) or 'none'};"
                f" ping: {answers[0] if answers else 'none'}; {rig.last_line(text)}; see {file}")  # fmt: skip

    def store(self, key):
        """A key of the NIC's frontend directory, or nothing."""
        status, text = self.machine.run(f"xenstore-read /local/domain/{self.domid()}/device/vif/0/{key}")
        return text.strip() if status == 0 else ""
