//! Guests in QEMU (software emulation) with a stock kernel. Channels are ports of a virtio-serial
//! device; the root is the host's file system over 9p.
//!
//! KVM is not used: the cost of a guest would depend on whether the lab runs in a virtual machine.

use std::os::fd::AsRawFd;

use super::super::installed::need;
use super::channel::{self, CHANNELS};
use super::image::Image;
use super::plan::Plan;
use crate::error::Fail;

/// Boot time of a guest, in seconds of CPU time.
pub(super) const BOOT_S: f64 = 5.0;
const PROGRAM: &str = "qemu-system-x86_64";
const MEMORY: &str = "256M";

/// Returns the program and its arguments.
pub(super) fn command_line(plan: &Plan) -> Result<Vec<String>, Fail> {
    need(PROGRAM)?;
    let image = plan.image.expect("QEMU needs boot files");
    let lines = [
        // With `-no-reboot`, a kernel panic ends the machine.
        format!("{PROGRAM} -nodefaults -no-user-config -display none -no-reboot"),
        format!("-machine q35,memory-backend=memory -accel tcg -cpu max -smp 1 -m {MEMORY}"),
        // Shared: the switch maps the guest's memory.
        format!("-object memory-backend-memfd,id=memory,size={MEMORY},share=on"),
        format!("-chardev socket,id=port,path={}", plan.socket),
        "-netdev vhost-user,id=net,chardev=port".into(),
        // `vectors=0` disables MSI-X: with it, QEMU 7.2 crashes when an emulated guest brings a
        // vhost-user device up. `romfile=`: no option ROM, as nothing boots from the network.
        format!("-device virtio-net-pci,netdev=net,mac={},vectors=0,romfile=", plan.setup.mac),
        "-fsdev local,id=host,path=/,security_model=none,readonly=on,multidevs=remap".into(),
        format!("-device virtio-9p-pci,fsdev=host,mount_tag={}", Image::ROOT_TAG),
        format!("-chardev file,id=console,path=/dev/fd/{}", plan.console.as_raw_fd()),
        "-serial chardev:console -device virtio-serial-pci".into(),
    ];
    let mut words: Vec<String> =
        lines.iter().flat_map(|line| line.split(' ').map(String::from)).collect();
    for n in 1..=CHANNELS {
        let path = channel::base(plan.folder, n);
        words.extend(["-chardev".into(), format!("pipe,id=c{n},path={}", path.display())]);
        let port = format!("virtserialport,nr={n},chardev=c{n},name={}", channel::name(n));
        words.extend(["-device".into(), port]);
    }
    let agent = plan.agent.display().to_string();
    let append = [
        &["console=ttyS0 loglevel=4 panic=-1 mitigations=off --".into(), agent][..],
        &["guest", "serve"].map(String::from),
        &plan.setup.args(),
    ];
    for (key, value) in [
        ("-kernel", image.kernel.display().to_string()),
        ("-initrd", image.initramfs.display().to_string()),
        ("-append", append.concat().join(" ")),
    ] {
        words.extend([key.into(), value]);
    }
    Ok(words)
}
