//! Command lines to paste that attach a guest to a port.

use std::io::Write;

use api::schema::Value;

use crate::spec::{Dgram, Kind, PortSpec, Role, Stream, VhostUser, Xen, XenAt};

/// Prints how to attach a guest: for QEMU, libvirt and Cloud Hypervisor, for xl, or for a front
/// half of our own.
pub fn print(spec: &PortSpec) {
    match &spec.kind {
        // Its path is known to the parent process only.
        Kind::VhostUser(conf) if conf.socket.to_string_lossy().starts_with(api::INHERITED) => {}
        Kind::VhostUser(conf) => show(&text(&spec.name, conf)),
        Kind::Xen(conf) => show(&xen(&spec.name, conf, spec.tuning.tenant.mac())),
        Kind::Stream(conf) if conf.socket.to_string_lossy().starts_with(api::INHERITED) => {}
        Kind::Stream(conf) => show(&stream(&spec.name, conf, spec.tuning.tenant.mac())),
        Kind::Dgram(conf) => show(&dgram(&spec.name, conf, spec.tuning.tenant.mac())),
        Kind::Passt(_) | Kind::Tap(_) | Kind::AfPacket(_) | Kind::AfXdp(_) | Kind::Null => {}
    }
}

/// A closed stdout must not stop the switch.
fn show(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// How to create a vif. Without an interface of the host, the script is set: xl's default one
/// expects one.
fn xen(name: &str, conf: &Xen, own: Option<[u8; 6]>) -> String {
    let mac = own.map(|own| format!("mac={},", mac(name, Some(own)))).unwrap_or_default();
    let script = if conf.tap { "bridge=xenbr0" } else { "script=/bin/true" };
    match &conf.at {
        XenAt::Local(dir) => format!(
            "# attach to port {name}, without Xen\n  \
             pvswitch nic --connect xen-local:{} --tap tap0\n",
            dir.display()
        ),
        XenAt::Vif(_) | XenAt::Auto => format!(
            "\
# attach a guest to port {name}: in its xl configuration (docs/xen.md)
  vif = [ '{mac}{script}' ]
# or while it runs
  xl network-attach DOMAIN {mac}{script}
"
        ),
    }
}

/// How to attach what knows QEMU's framing.
fn stream(name: &str, conf: &Stream, own: Option<[u8; 6]>) -> String {
    let (socket, mac) = (conf.socket.display(), mac(name, own));
    let id = name.replace(['.', '_'], "-");
    if conf.role == Role::Client {
        return format!(
            "\
# start what listens at the socket of port {name}, for example
  passt --socket {socket}
"
        );
    }
    format!(
        "\
# attach a guest to port {name}: QEMU, without shared memory
  -netdev stream,id=net-{id},server=off,addr.type=unix,addr.path={socket} \\
  -device virtio-net-pci,netdev=net-{id},mac={mac}
"
    )
}

fn dgram(name: &str, conf: &Dgram, own: Option<[u8; 6]>) -> String {
    let (socket, peer, mac) = (conf.socket.display(), conf.peer.display(), mac(name, own));
    let id = name.replace(['.', '_'], "-");
    let ends = format!("local.type=unix,local.path={peer},remote.type=unix,remote.path={socket}");
    format!(
        "\
# attach a guest to port {name}: QEMU, without shared memory
  -netdev dgram,id=net-{id},{ends} \\
  -device virtio-net-pci,netdev=net-{id},mac={mac}
"
    )
}

/// Options to add to a QEMU command line.
pub fn qemu(name: &str, conf: &VhostUser) -> String {
    let socket = conf.socket.display();
    let id = name.replace(['.', '_'], "-");
    let listens = conf.role == Role::Client;
    let chardev = if listens { ",server=on,wait=off" } else { ",reconnect=1" };
    let (netdev_mq, device_mq) = match conf.queues {
        1 => (String::new(), String::new()),
        n => (format!(",queues={n}"), format!(",mq=on,vectors={}", 2 * n + 2)),
    };
    let mac = mac(name, conf.mac);
    format!(
        "  -object memory-backend-memfd,id=mem,size=1G,share=on \\
  -machine memory-backend=mem \\
  -chardev socket,id=chr-{id},path={socket}{chardev} \\
  -netdev vhost-user,id=net-{id},chardev=chr-{id}{netdev_mq} \\
  -device virtio-net-pci,netdev=net-{id},mac={mac}{device_mq}
"
    )
}

fn text(name: &str, conf: &VhostUser) -> String {
    let socket = conf.socket.display();
    let listens = conf.role == Role::Client;
    let queues = conf.queues;
    let mode = if listens { "server" } else { "client" };
    let qemu = qemu(name, conf);
    let driver = if queues > 1 { format!("<driver queues='{queues}'/>") } else { String::new() };
    let ch_queues = if queues > 1 { format!(",num_queues={}", 2 * queues) } else { String::new() };
    let ch_mode = if listens { ",vhost_mode=server" } else { "" };
    let mac = mac(name, conf.mac);
    // Only a client reconnects; libvirt refuses the element in a server.
    let source = if listens {
        format!("<source type='unix' path='{socket}' mode='{mode}'/>")
    } else {
        format!(
            "<source type='unix' path='{socket}' mode='{mode}'><reconnect enabled='yes' \
             timeout='1'/></source>"
        )
    };
    format!(
        "\
# attach a guest to port {name}:
#   QEMU (without KVM, -accel tcg: add ,vectors=0 to -device, or QEMU 7.2 crashes (SIGSEGV); its
#   warning about VHOST_USER_PROTOCOL_F_CONFIG is harmless: other front-ends use that feature)
{qemu}#   libvirt (with <memoryBacking><source type='memfd'/>\
<access mode='shared'/></memoryBacking>)
  <interface type='vhostuser'><mac address='{mac}'/>\
{source}<model type='virtio'/>{driver}</interface>
#   Cloud Hypervisor
  --memory size=1G,shared=on --net vhost_user=true,socket={socket},mac={mac}{ch_queues}{ch_mode}
"
    )
}

/// A MAC address for the guest: that of the port, which admits no other, or else one derived from
/// its name, because QEMU gives every machine the same default address.
fn mac(name: &str, own: Option<[u8; 6]>) -> String {
    if let Some(own) = own {
        return Value::Macs(vec![own]).to_string();
    }
    // FNV-1a: spreads names like vm1 and vm2 apart.
    let sum =
        name.bytes().fold(0x811c_9dc5_u32, |h, b| (h ^ u32::from(b)).wrapping_mul(0x100_0193));
    let [_, x, y, z] = sum.to_be_bytes();
    format!("52:54:00:{x:02x}:{y:02x}:{z:02x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_for_vifs_name_the_toolstack() {
        let at = |spec: &str| match spec.parse::<PortSpec>().unwrap().kind {
            Kind::Xen(xen) => xen,
            _ => panic!("a Xen port"),
        };
        let local = xen("x", &at("x=xen-local:/run/v"), None);
        assert!(local.contains("--connect xen-local:/run/v --tap"), "{local}");
        assert!(xen("x", &at("x=xen:auto"), None).contains("vif = [ 'script=/bin/true' ]"));
        let bridged = xen("x", &at("x=xen:auto,tap=vif"), None);
        assert!(bridged.contains("vif = [ 'bridge=xenbr0' ]") && !bridged.contains("script"));
        let locked = xen("x", &at("x=xen:1/0"), Some([2, 0, 0, 0, 0, 7]));
        assert!(locked.contains("vif = [ 'mac=02:00:00:00:00:07,script=/bin/true' ]"), "{locked}");
    }

    #[test]
    fn lines_follow_mode_and_queues() {
        let spec: PortSpec = "vm.1=vhost-user:/tmp/a,queues=4".parse().unwrap();
        let Kind::VhostUser(conf) = &spec.kind else { panic!("a vhost-user port") };
        let lines = text(&spec.name, conf);
        assert!(lines.contains("id=chr-vm-1,path=/tmp/a,reconnect=1"));
        assert!(lines.contains("chardev=chr-vm-1,queues=4") && lines.contains("vectors=10"));
        assert!(lines.contains("mode='client'") && lines.contains("num_queues=8"));
        // Issue 16, row 4: what libvirt and emulation need.
        let reconnect = "mode='client'><reconnect enabled='yes' timeout='1'/></source><model";
        assert!(lines.contains(reconnect) && lines.contains("-accel tcg: add ,vectors=0"));
        assert!(lines.contains("VHOST_USER_PROTOCOL_F_CONFIG is harmless"), "{lines}");
        assert!(lines.lines().all(|line| line.len() < 240), "{lines}");
        // A guest with another address would be dropped.
        let locked: PortSpec = "v=vhost-user:/tmp/a,mac=02:00:00:00:00:07".parse().unwrap();
        let Kind::VhostUser(conf) = &locked.kind else { panic!("a vhost-user port") };
        assert_eq!(text("v", conf).matches("02:00:00:00:00:07").count(), 3);
        let spec: PortSpec = "v=vhost-user:/tmp/a,mode=client".parse().unwrap();
        let Kind::VhostUser(conf) = &spec.kind else { panic!("a vhost-user port") };
        let lines = text(&spec.name, conf);
        assert!(lines.contains("server=on,wait=off") && lines.contains("vhost_mode=server"));
        assert!(lines.contains("mode='server'/><model") && !lines.contains("<reconnect"));
    }
}
