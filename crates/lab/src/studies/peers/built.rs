//! Other switches that no package has: each is built from its sources, and found in `PATH`.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::ends::{Part, Sockets, cpu, paths, start_rival, wait_sockets};
use super::memory;
use crate::error::Fail;
use crate::stage::{Place, Port, Proto, START_MAX_S, Stage, need, wait_for};

/// Programs, and how each is built.
const SOURCES: [(&str, &str); 4] = [
    (
        "vpp",
        "github.com/FDio/vpp, `cmake -G Ninja -DCMAKE_BUILD_TYPE=release -DVPP_PLUGINS=vhost src`, \
         ninja, and its folder `bin` in PATH",
    ),
    (
        "snabb",
        "github.com/snabbco/snabb, with 2^32 (VIRTIO_F_VERSION_1) added to supported_features in \
         src/lib/virtio/net_device.lua, `make`, and its folder `src` in PATH",
    ),
    (
        "grout",
        "github.com/DPDK/grout, `meson setup build -Dfrr=disabled -Ddocs=disabled`, with DPDK of \
         github.com/DPDK/dpdk, `ninja -C build grout grcli`, and that folder in PATH",
    ),
    (
        "vhost_user_net",
        "the sources of cloud-hypervisor, `cargo build --release -p vhost_user_net`; it is \
         rust-vmm's vhost-user-backend",
    ),
];
/// Size of rings that are replayed to Snabb, whose links hold 1023 frames: it drops what is beyond.
const SNABB_RING: u16 = 1024;
/// Interfaces that VPP makes of two sockets.
const VPP_PORTS: [&str; 2] = ["VirtualEthernet0/0/0", "VirtualEthernet0/0/1"];

/// Fails if a program is not installed, with what it is built from.
fn need_built(program: &str) -> Result<(), Fail> {
    let from = SOURCES.iter().find(|(name, _)| *name == program).map_or("", |(_, from)| from);
    need(program).map_err(|_| {
        Fail::Missing(format!("{program} is not installed; no package has it: {from}"))
    })
}

/// Writes the commands that set up a peer to a file, and records them.
fn write_setup(stage: &Stage, peer: &str, file: &Path, lines: &[String]) -> Result<(), Fail> {
    lines.iter().for_each(|line| stage.record_rival(peer, &[line]));
    std::fs::write(file, lines.join("\n") + "\n")
        .map_err(|error| Fail::Over(format!("{}: {error}", file.display())))
}

/// Returns the reason why rust-vmm cannot be measured.
pub(super) fn rust_vmm() -> Fail {
    need_built("vhost_user_net").err().unwrap_or_else(|| {
        let reason = "vhost_user_net connects a guest and a TAP interface, not two guests";
        Fail::Missing(reason.into())
    })
}

/// Starts VPP: `vpp`, a learning bridge domain; `vpp-cross`, connected directly. It polls: its
/// other modes can be set for connected guests only.
pub(super) fn vpp(stage: &Stage, peer: &str) -> Result<Sockets, Fail> {
    need_built("vpp")?;
    let dir = stage.subfolder("vpp")?;
    let (ports, both) = Port::many(stage, "v", Proto::Virtio, 2)?;
    write_setup(stage, peer, &dir.join("setup"), &vpp_setup(&paths(&ports), peer))?;
    let (back, main) = (cpu(&stage.switch_cpus), cpu(&stage.guest_cpus));
    let dir = dir.display();
    let words = format!(
        "unix {{ nodaemon nobanner runtime-dir {dir} cli-listen {dir}/cli exec {dir}/setup }} \
         cpu {{ main-core {main} corelist-workers {back} }} \
         socksvr {{ socket-name {dir}/api }} statseg {{ socket-name {dir}/stats }} \
         plugins {{ plugin default {{ disable }} plugin vhost_plugin.so {{ enable }} }}"
    );
    let args: Vec<String> = words.split_whitespace().map(String::from).collect();
    let mut process = start_rival(stage, [peer, "vpp"], &args, &Place::default())?;
    wait_sockets(&ports, &mut process)?;
    let version = ["-s", &format!("{dir}/cli"), "show", "version"].map(String::from);
    record_version(stage, peer, "vppctl", &version);
    Ok(Sockets::of_rival(ports, both, process))
}

/// Commands that make VPP's ports.
fn vpp_setup(sockets: &[PathBuf], peer: &str) -> Vec<String> {
    let mut lines = Vec::new();
    for (socket, port) in sockets.iter().zip(VPP_PORTS) {
        lines.push(format!("create vhost-user socket {} server", socket.display()));
        lines.push(format!("set interface state {port} up"));
    }
    for (port, other) in VPP_PORTS.iter().zip(VPP_PORTS.iter().rev()) {
        lines.push(match peer {
            "vpp-cross" => format!("set interface l2 xconnect {port} {other}"),
            _ => format!("set interface l2 bridge {port} 1"),
        });
    }
    lines
}

/// Starts grout: `grout`, a bridge; `grout-cross`, connected directly. With its default settings:
/// its worker sleeps briefly when no frame has come for a while.
pub(super) fn grout(stage: &Stage, peer: &str) -> Result<Sockets, Fail> {
    need_built("grout")?;
    need("grcli")?;
    let dir = stage.subfolder("grout")?;
    let (ports, both) = Port::many(stage, "v", Proto::Virtio, 2)?;
    let api = dir.join("api").display().to_string();
    let words = format!("-s {api} -M 127.0.0.1:0 -- {}", memory::DPDK_IN_MEMORY);
    let args: Vec<String> = words.split_whitespace().map(String::from).collect();
    let mut process = start_rival(stage, [peer, "grout"], &args, &Place::default())?;
    wait_for("grout's socket", START_MAX_S, || {
        process.check()?;
        Ok(Path::new(&api).exists())
    })?;
    let (back, main) = (cpu(&stage.switch_cpus), cpu(&stage.guest_cpus));
    let mut setup = vec![format!("affinity cpus set control {main} datapath {back}")];
    setup.extend(grout_setup(&paths(&ports), peer));
    let script = dir.join("setup");
    write_setup(stage, peer, &script, &setup)?;
    let args = ["-e", "-s", &api, "-f", &script.display().to_string()].map(String::from);
    stage.start("grcli", "grcli", &args, &Place::default())?.finish(START_MAX_S)?;
    wait_sockets(&ports, &mut process)?;
    record_version(stage, peer, "grout", &["-V".into()]);
    Ok(Sockets::of_rival(ports, both, process))
}

/// Commands that make grout's ports.
fn grout_setup(sockets: &[PathBuf], peer: &str) -> Vec<String> {
    let port = |(i, socket): (usize, &PathBuf)| {
        format!("interface add port p{i} devargs net_vhost{i},iface={}", socket.display())
    };
    let ports = sockets.iter().enumerate().map(port);
    match peer {
        "grout-cross" => {
            let each = [(0, 1), (1, 0)];
            let each = each.map(|(i, other)| format!("interface set port p{i} domain p{other}"));
            ports.chain(each).collect()
        }
        _ => {
            let bridge = std::iter::once("interface add bridge br0".to_string());
            bridge.chain(ports.map(|port| port + " domain br0")).collect()
        }
    }
}

/// Starts Snabb with two ports connected directly; it needs huge pages.
pub(super) fn snabb(stage: &Stage) -> Result<Sockets, Fail> {
    need_built("snabb")?;
    let dir = stage.subfolder("snabb")?;
    let (ports, both) = Port::many(stage, "v", Proto::Virtio, 2)?;
    let sockets = paths(&ports);
    let script = dir.join("setup.lua");
    let mut lines = vec![
        "local vhost = require('apps.vhost.vhost_user').VhostUser".to_string(),
        "local c = config.new()".into(),
    ];
    for (i, socket) in sockets.iter().enumerate() {
        let socket = socket.display();
        lines.push(format!(
            "config.app(c, 'v{i}', vhost, {{socket_path='{socket}', is_server=true}})"
        ));
    }
    lines.extend(
        [
            "config.link(c, 'v0.tx -> v1.rx')",
            "config.link(c, 'v1.tx -> v0.rx')",
            "engine.configure(c)",
            // Else each port waits for its guest before the other one does anything.
            "local fcntl = require('syscall').fcntl",
            "for _, app in pairs(engine.app_table) do",
            "  fcntl(app.listen_socket, 'setfl', 'nonblock')",
            "end",
            "engine.busywait = true",
            "engine.main()",
        ]
        .map(String::from),
    );
    write_setup(stage, "snabb", &script, &lines)?;
    let args = ["snsh".to_string(), script.display().to_string()];
    let place = Place { netns: None, cpus: &stage.switch_cpus };
    let mut process = start_rival(stage, ["snabb", "snabb"], &args, &place)?;
    wait_sockets(&ports, &mut process)?;
    record_version(stage, "snabb", "snabb", &["--version".into()]);
    let mut all = Sockets::of_rival(ports, both, process);
    all.replay_ring = SNABB_RING;
    all.parts.extend(sockets.iter().map(|socket| Part::Cache { _it: Cache::of(socket) }));
    Ok(all)
}

/// Snabb's note of the features of a socket, in `/tmp`; removed when dropped, for the next guest of
/// a socket of this name would get these features.
pub(super) struct Cache(PathBuf);

impl Cache {
    fn of(socket: &Path) -> Self {
        let name = socket.display().to_string().replace('/', "__");
        Self(Path::new("/tmp").join(format!("vhost_features_{name}")))
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // It is missing if no guest was connected.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Records the first line that a program prints about itself, if it does.
fn record_version(stage: &Stage, rival: &str, program: &str, args: &[String]) {
    let Ok(out) = Command::new(program).args(args).output() else { return };
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    if let Some(line) = text.lines().find(|line| !line.trim().is_empty()) {
        stage.record_rival(rival, &["version", line.trim()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vpp_connects_each_port_with_the_other() {
        let sockets = ["/a", "/b"].map(PathBuf::from);
        let cross = vpp_setup(&sockets, "vpp-cross").join("\n") + "\n";
        assert!(cross.contains("create vhost-user socket /b server\n"), "{cross}");
        for (from, to) in [(0, 1), (1, 0)] {
            let line = format!("l2 xconnect {} {}\n", VPP_PORTS[from], VPP_PORTS[to]);
            assert!(cross.contains(&line), "{cross}");
        }
        let bridge = vpp_setup(&sockets, "vpp").join("\n");
        assert_eq!(bridge.matches("l2 bridge VirtualEthernet0/0/").count(), 2, "{bridge}");
    }

    #[test]
    fn grout_connects_each_port_with_the_other() {
        let sockets = ["/a", "/b"].map(PathBuf::from);
        let cross = grout_setup(&sockets, "grout-cross").join("\n");
        for line in ["devargs net_vhost1,iface=/b\n", "port p0 domain p1\n", "port p1 domain p0"] {
            assert!(cross.contains(line), "{cross}");
        }
        let bridge = grout_setup(&sockets, "grout").join("\n");
        assert!(bridge.starts_with("interface add bridge br0\n"), "{bridge}");
        assert_eq!(bridge.matches(" domain br0").count(), 2, "{bridge}");
    }

    #[test]
    fn a_missing_program_is_named_with_its_sources() {
        for (program, _) in SOURCES {
            if let Err(Fail::Missing(reason)) = need_built(program) {
                assert!(
                    reason.contains(program) && reason.contains("sources")
                        || reason.contains("github.com"),
                    "{reason}"
                );
            }
        }
    }
}
