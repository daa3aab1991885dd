"""A stock Debian kernel in QEMU emulation with a vhost-user NIC, driven command by command.

The image is built from Debian packages, unpacked and not installed: kernel and virtio modules,
busybox, iperf3, ethtool. It holds one shell script, which answers commands on a virtio-serial port.
"""

import shutil
from pathlib import Path

import agent
import rig

IMAGE_PACKAGES = "busybox-static iperf3 libiperf0 libsctp1 libssl3 libc6 ethtool libmnl0".split()

# In the order of insmod.
MODULES = """
    virtio_ring virtio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci
    failover net_failover virtio_net virtio_console af_packet
""".split()

# The kernel's command line carries guest_ip= and guest_mtu=; everything else comes as commands.
INIT = r"""#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /tmp /run /sbin /usr/bin /usr/sbin
/bin/busybox --install -s
export PATH=/bin:/sbin:/usr/bin:/usr/sbin HOME=/tmp
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tmpfs tmpfs /tmp
# An idle guest must not send: no neighbour discovery, no multicast reports.
echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6
echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6
echo 0 > /proc/sys/kernel/printk
for module in $(cat /modules/order); do insmod /modules/$module.ko; done
for word in $(cat /proc/cmdline); do
    case $word in guest_*) export "$word";; esac
done
ip link set lo up
[ -n "$guest_mtu" ] && ip link set eth0 mtu "$guest_mtu"
[ "$guest_ip" = dhcp ] || ip addr add "$guest_ip/24" dev eth0
ip link set eth0 up

# The agent. Not on a UART: an emulated one loses characters when the machine is busy.
while ! ls /dev/vport*p1 > /dev/null 2>&1; do sleep 0.1; done
port=$(ls /dev/vport*p1)
exec 3<> "$port"
"""

# virtio-v1.3, 5.1.3 and 6: what a guest and its device agreed on.
FEATURES = {
    0: "CSUM", 1: "GUEST_CSUM", 2: "CTRL_GUEST_OFFLOADS", 3: "MTU", 5: "MAC", 6: "GSO",
    7: "GUEST_TSO4", 8: "GUEST_TSO6", 9: "GUEST_ECN", 10: "GUEST_UFO", 11: "HOST_TSO4",
    12: "HOST_TSO6", 13: "HOST_ECN", 14: "HOST_UFO", 15: "MRG_RXBUF", 16: "STATUS", 17: "CTRL_VQ",
    18: "CTRL_RX", 19: "CTRL_VLAN", 20: "CTRL_RX_EXTRA", 21: "GUEST_ANNOUNCE", 22: "MQ",
    23: "CTRL_MAC_ADDR", 24: "NOTIFY_ON_EMPTY", 27: "ANY_LAYOUT", 28: "INDIRECT_DESC",
    29: "EVENT_IDX", 32: "VERSION_1", 33: "ACCESS_PLATFORM", 34: "RING_PACKED", 35: "IN_ORDER",
    36: "ORDER_PLATFORM", 54: "GUEST_USO4", 55: "GUEST_USO6", 56: "HOST_USO",
}  # fmt: skip


def build_image():
    """Builds the guest's kernel and initramfs, or finds them in the cache; returns both paths."""
    with rig.cache("qemu-guest") as cache:
        return build_image_in(cache)


def build_image_in(cache):
    kernel_package = rig.dependency("linux-image-amd64", r"linux-image-.*")
    kernel_root = rig.unpack_packages([kernel_package], cache / "kernel")
    user_root = rig.unpack_packages(IMAGE_PACKAGES, cache / "user")
    kernel = cache / "vmlinux"
    image = cache / "initramfs.cpio"
    inputs = [Path(__file__), Path(agent.__file__), kernel_root / ".packages", user_root / ".packages"]
    if image.exists() and image.stat().st_mtime > max(path.stat().st_mtime for path in inputs):
        return kernel, image
    rig.need_packages(["cpio"])
    print("building the guest image ...", flush=True)
    kernel.write_bytes(agent.plain_kernel(next((kernel_root / "boot").glob("vmlinuz-*"))))
    tree = cache / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    (tree / "modules").mkdir(parents=True)
    for module in MODULES:
        found = list((kernel_root / "lib/modules").rglob(f"{module}.ko"))
        if found:  # one that is missing is built into this kernel
            shutil.copy(found[0], tree / "modules")
    present = [m for m in MODULES if (tree / "modules" / f"{m}.ko").exists()]
    (tree / "modules/order").write_text(" ".join(present))
    for folder in ("bin", "sbin", "usr/bin", "usr/sbin", "lib", "lib64", "usr/lib"):
        (tree / folder).mkdir(parents=True, exist_ok=True)
    shutil.copy(user_root / "bin/busybox", tree / "bin/busybox")
    shutil.copy(user_root / "usr/bin/iperf3", tree / "usr/bin/iperf3")
    shutil.copy(next(user_root.rglob("sbin/ethtool")), tree / "sbin/ethtool")
    shutil.copy(next(user_root.rglob("ld-linux-x86-64.so.2")), tree / "lib64")
    for library in "libc.so.6 libm.so.6 libiperf.so.0 libsctp.so.1 libssl.so.3 libcrypto.so.3 libmnl.so.0".split():
        shutil.copy(next(user_root.rglob(library)), tree / "lib")
    (tree / "init").write_text(INIT + agent.SHELL)
    (tree / "init").chmod(0o755)
    # Written aside and renamed: an interrupted build must not look like a finished one.
    unfinished = image.with_suffix(".new")
    rig.run(["sh", "-c", f"find . | cpio -o -H newc -R 0:0 --quiet > '{unfinished}'"], cwd=tree)
    unfinished.rename(image)
    shutil.rmtree(tree)
    return kernel, image


class Guest(agent.Agent):
    """One virtual machine with one vhost-user NIC."""

    def __init__(self, r, name, ip, nic_socket, *, listen=False, queues=1, mtu=None, properties="", cpus=2,
                 memory="256M", more=(), netdev=None, mac=None, netns=None, prefix=(), console=None, documented=None):  # fmt: skip
        """`listen`: QEMU listens on the socket and the back-end connects; otherwise QEMU connects,
        and reconnects every second after the back-end disconnected. `more`: further words for QEMU.
        `netdev`: another one than vhost-user, without shared memory. `prefix`: words before QEMU's name.
        `documented`: a command of a document, which has the NIC; to it only that is added with which the rig drives it."""
        self.ip = ip
        kernel, image = build_image()
        agent_socket = r.socket_path(f"{name}.agent")
        chardev = f"socket,id=nic,path={nic_socket}" + (",server=on,wait=off" if listen else ",reconnect=1")
        shares = netdev is None
        netdev = netdev or f"vhost-user,id=net,chardev=nic,queues={queues}"
        # vectors=0: no MSI-X. QEMU 7.2 dies of a segmentation fault (vhost_net_start) when a guest
        # under emulation brings up a vhost-user NIC with MSI-X. Linux then uses one shared INTx
        # line for all virtqueues, which also carries several queue pairs (mq=on): each interrupt
        # polls all of them. romfile=: nothing boots from this NIC, so no option ROM is needed.
        device = f"virtio-net-pci,netdev=net,mac={mac or f'02:00:00:00:00:0{ip[-1]}'},vectors=0,romfile="
        if queues > 1:
            device += ",mq=on"
        if mtu:
            device += f",host_mtu={mtu}"
        if properties:
            device += f",{properties}"
        # init_on_alloc=0: else the kernel writes each page before the switch does, which hides marks that are missing.
        words = f"console=ttyS0 panic=-1 mitigations=off init_on_alloc=0 guest_ip={ip}" + (f" guest_mtu={mtu}" if mtu else "")
        machine = [
            "qemu-system-x86_64", "-nodefaults", "-machine", "q35,memory-backend=memory",
            "-accel", "tcg,thread=multi,tb-size=128", "-smp", str(cpus), "-m", memory,
            # vhost-user: the back-end maps the guest's memory, so it must be shared.
            "-object", f"memory-backend-memfd,id=memory,size={memory},share=on",
            *(["-chardev", chardev] if shares else []), "-netdev", netdev, "-device", device,
        ]  # fmt: skip
        process = r.start(f"guest-{name}", [
            *prefix, *(documented or machine), "-display", "none", "-cpu", "max",
            "-kernel", kernel, "-initrd", image, "-append", words,
            "-serial", f"file:{console or r.out / f'console-{name}.log'}",
            "-chardev", f"socket,id=agent,path={agent_socket},server=on,wait=off",
            "-device", "virtio-serial-pci", "-device", "virtserialport,chardev=agent",
            *more,
        ], netns=netns)  # fmt: skip
        super().__init__(r, name, agent_socket, process)

    def reboot(self):
        """Resets the machine without shutting its devices down, and does not wait; `wait_ready` does.

        `reboot -f` under traffic hangs in virtnet_poll_cleantx once in some 30 times: device_shutdown
        marks a transmit queue as broken, and its softirq waits for it indefinitely. Linux fixed that in
        0d0eff39ceb3 ("virtio_ring: fix infinite loop in virtnet_poll_cleantx when device is broken").
        """
        self.send("echo b > /proc/sysrq-trigger")

    def features(self):
        """The virtio features that driver and device agreed on, as a list of bit numbers."""
        text = self.must("cat /sys/class/net/eth0/device/features").strip()
        return [bit for bit, value in enumerate(text) if value == "1"]

    def frames(self):
        """Frames sent and received by eth0."""
        folder = "/sys/class/net/eth0/statistics"
        sent, received = self.must(f"cat {folder}/tx_packets {folder}/rx_packets").split()
        return int(sent), int(received)


def feature_names(bits):
    return " ".join(FEATURES.get(bit, f"bit{bit}") for bit in bits)
