//! QEMU in software emulation, with a stock kernel. Ports of a virtio-serial device are the
//! channels; the root is the host's file system over 9p.
//!
//! Never with KVM: what a guest costs would then depend on what the lab itself runs in.

use std::os::fd::AsRawFd;

use super::super::installed::need;
use super::channel::{self, CHANNELS};
use super::image::Image;
use super::plan::Plan;
use crate::error::Fail;

/// Time that a guest takes to start, in seconds of one CPU.
pub(super) const BOOT_S: f64 = 5.0;
const PROGRAM: &str = "qemu-system-x86_64";
const MEMORY: &str = "256M";

/// The program and its arguments.
pub(super) fn words(plan: &Plan) -> Result<Vec<String>, Fail> {
    need(PROGRAM)?;
    let image = plan.image.expect("QEMU boots one");
    let lines = [
        // What the machine is. With `-no-reboot` a kernel that panics ends it.
        format!("{PROGRAM} -nodefaults -no-user-config -display none -no-reboot"),
        format!("-machine q35,memory-backend=memory -accel tcg -cpu max -smp 1 -m {MEMORY}"),
        // The switch maps it.
        format!("-object memory-backend-memfd,id=memory,size={MEMORY},share=on"),
        format!("-chardev socket,id=port,path={}", plan.socket),
        "-netdev vhost-user,id=net,chardev=port".into(),
        // `vectors=0`, no MSI-X: with it QEMU 7.2 dies when a guest in emulation brings a
        // vhost-user device up. Nothing boots from it: no option ROM.
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
        &plan.setup.words(),
    ];
    for (key, value) in [
        ("-kernel", image.kernel.display().to_string()),
        ("-initrd", image.archive.display().to_string()),
        ("-append", append.concat().join(" ")),
    ] {
        words.extend([key.into(), value]);
    }
    Ok(words)
}
