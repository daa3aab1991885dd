//! The libvirt hook, with a running switch and the XML that libvirt passes.

mod common;

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output, Stdio};

use common::{Dir, Gen, Switch};
use serde_json::Value;

const UUID: &str = "61928968-58cf-48f6-81d3-8954bccd5da1";
const OTHER: &str = "00000000-58cf-48f6-81d3-8954bccd5da1";

/// A switch with an include directory, and the hook's settings.
struct World {
    dir: Dir,
    switch: Switch,
}

impl World {
    /// `None`: this machine has no python3.
    fn new() -> Option<Self> {
        if Command::new("python3").args(["-c", ""]).status().is_err() {
            println!("skipped: python3 is not installed");
            return None;
        }
        let dir = Dir::new();
        std::fs::create_dir(dir.path("ports")).unwrap();
        std::fs::write(dir.path("x.toml"), "include = 'ports'\n[port.own]\nkind = 'null'\n")
            .unwrap();
        let switch = Switch::start(&dir, &["--config", &dir.text("x.toml")], &[]);
        let conf = format!(
            "[pvswitch]\nprogram={}\nports={}\nsockets={}\ncontrol={}\nsocket-group=\n",
            env!("CARGO_BIN_EXE_pvswitch"),
            dir.text("ports"),
            dir.text(""),
            switch.control()
        );
        std::fs::write(dir.path("hook.conf"), conf).unwrap();
        Some(Self { dir, switch })
    }

    /// Runs the hook.
    fn hook(&self, operation: &str, xml: &str) -> Output {
        let hook = concat!(env!("CARGO_MANIFEST_DIR"), "/../../plugins/libvirt/qemu");
        let mut child = Command::new("python3")
            .args([hook, "guest", operation, "begin", "-"])
            .env("PVSWITCH_LIBVIRT_CONF", self.dir.path("hook.conf"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // A hook that needs no XML may end before it has read it.
        let _ = child.stdin.take().unwrap().write_all(xml.as_bytes());
        child.wait_with_output().unwrap()
    }

    fn done(&self, operation: &str, xml: &str) {
        let out = self.hook(operation, xml);
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        // libvirt takes what is printed for the guest's new XML.
        assert!(out.stdout.is_empty());
    }

    /// The reason for which a guest must not start; nothing changes.
    fn refused(&self, xml: &str) -> String {
        let before = (self.names(), self.files());
        let out = self.hook("prepare", xml);
        let error = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(1), "{error}");
        assert_eq!(error.trim_end().lines().count(), 1, "libvirt shows one line: {error}");
        assert!(error.starts_with("pvswitch: guest guest: "), "{error}");
        assert_eq!((self.names(), self.files()), before);
        error
    }

    fn names(&self) -> Vec<String> {
        let show = self.switch.json(&["show"]);
        let ports = show["ports"].as_array().unwrap().iter();
        let mut names: Vec<_> = ports.map(|p| p["name"].as_str().unwrap().to_owned()).collect();
        names.sort();
        names
    }

    fn files(&self) -> Vec<String> {
        let files = std::fs::read_dir(self.dir.path("ports")).unwrap();
        let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.filter(|name| name != ".ports.lock").collect();
        names.sort();
        names
    }

    fn rules(&self, port: &str) -> Value {
        self.switch.port("show", port)["rules"].clone()
    }

    /// A guest with these elements in `<metadata>` and `<devices>`.
    fn domain(&self, uuid: &str, metadata: &str, devices: &str) -> String {
        let devices = devices.replace("{dir}", &self.dir.text(""));
        format!(
            "<?xml version='1.0'?><domain type='kvm' id='1'><name>guest</name><uuid>{uuid}</uuid>\
             <metadata><other:x xmlns:other='urn:other'>1</other:x>\
             <pvswitch:ports xmlns:pvswitch='urn:pvswitch:libvirt:1'>{metadata}</pvswitch:ports>\
             </metadata><devices>{devices}</devices></domain>"
        )
    }
}

/// An interface as libvirt passes it, with more elements.
fn interface(n: u8, more: &str) -> String {
    format!(
        "<interface type='vhostuser'><mac address='52:54:00:00:00:0{n}'/><source type='unix' \
         path='{{dir}}vm{n}.sock' mode='client'><reconnect enabled='yes' timeout='1'/></source>\
         <model type='virtio'/>{more}</interface>"
    )
}

/// Metadata for interface `n`.
fn settings(n: u8, more: &str) -> String {
    let more = more.replace('<', "<pvswitch:").replace("<pvswitch:/", "</pvswitch:");
    format!("<pvswitch:interface mac='52:54:00:00:00:0{n}'>{more}</pvswitch:interface>")
}

#[test]
fn guest_gets_its_ports_before_it_starts_and_loses_them_after() {
    let Some(world) = World::new() else { return };
    let metadata = settings(1, "<vlan><tag id='42'/></vlan><port isolated='yes'/>")
        + &settings(2, "<vlan trunk='yes'><tag id='5'/><tag id='6' nativeMode='untagged'/></vlan>")
        + &settings(3, "<option name='mac' value='52:54:00:00:00:03'/>");
    let devices = interface(1, "<target dev='web'/><driver queues='2'/><mtu size='9000'/>")
        + &interface(2, "")
        + &interface(3, "").replace("mode='client'", "mode='server'")
        // Others' interfaces.
        + "<interface type='network'><source network='default'/></interface>\
           <interface type='vhostuser'><source type='unix' path='/run/ovs/x'/></interface>";
    let domain = world.domain(UUID, &metadata, &devices);
    world.done("prepare", &domain);
    assert_eq!(world.names(), ["own", "vm2", "vm3", "web"]);
    assert_eq!(world.files(), [format!("libvirt-{UUID}.toml")]);
    let web = world.switch.port("show", "web");
    assert_eq!((&web["queues"], &web["rules"]["vlan"]), (&2.into(), &"42".into()), "{web}");
    assert_eq!(web["rules"]["isolated"], "on");
    assert_eq!(world.rules("vm2")["trunk"], "5-6");
    assert_eq!(world.rules("vm2")["native"], "6");
    assert_eq!(world.rules("vm3")["mac"], "52:54:00:00:00:03");
    // QEMU listens at its socket: the switch does not.
    assert!(world.dir.path("vm1.sock").exists() && !world.dir.path("vm3.sock").exists());
    // A guest connects; a restarted libvirtd changes nothing.
    let guest = Gen::start(&world.dir.path("vm2.sock"), &["--mode", "sink"]);
    world.switch.wait_up("vm2", true);
    for operation in ["start", "started", "reconnect", "stopped", "unknown"] {
        world.done(operation, &domain);
    }
    assert_eq!(world.switch.port("show", "vm2")["connections"], 1);
    drop(guest);
    world.done("release", &domain);
    assert_eq!(world.names(), ["own"]);
    assert!(world.files().is_empty());
    world.done("release", &domain);
}

#[test]
fn changed_rules_are_those_of_the_next_start() {
    let Some(world) = World::new() else { return };
    let vlan = settings(1, "<vlan><tag id='42'/></vlan>");
    world.done("prepare", &world.domain(UUID, &vlan, &interface(1, "")));
    assert_eq!(world.rules("vm1")["vlan"], "42");
    // A reload and a restart of the switch keep the rules, which `ctl set` would not.
    world.switch.json(&["reload"]);
    assert_eq!(world.rules("vm1")["vlan"], "42");
    world.done("prepare", &world.domain(UUID, "", &interface(1, "")));
    assert_eq!(world.rules("vm1")["vlan"], Value::Null);
}

#[test]
fn bandwidth_limits_both_directions_as_the_guest_sees_them() {
    let Some(world) = World::new() else { return };
    let rates = "<bandwidth><inbound average='1000' peak='5000' burst='256'/><outbound \
                 average='128'/></bandwidth>";
    let xml = world.domain(UUID, "", &interface(1, rates));
    let out = world.hook("prepare", &xml);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(String::from_utf8_lossy(&out.stderr).contains("peak> has no equivalent"));
    let rules = world.rules("vm1");
    assert_eq!(rules["rate-out"], "8Mbit", "{rules}");
    assert_eq!(rules["burst-out"], "256K");
    assert_eq!((&rules["rate-in"], &rules["burst-in"]), (&"1024kbit".into(), &Value::Null));
    for bad in ["average='0'", "average='-1'", "average='1' burst='x'"] {
        let rates = format!("<bandwidth><inbound {bad}/></bandwidth>");
        let error = world.refused(&world.domain(UUID, "", &interface(1, &rates)));
        assert!(error.contains("<bandwidth><inbound") && error.contains("not a number"), "{error}");
    }
}

/// libvirt refuses these elements today in a vhostuser interface; a later one may not.
#[test]
fn elements_of_the_interface_itself_count_too() {
    let Some(world) = World::new() else { return };
    let devices = interface(1, "<vlan><tag id='7'/></vlan><port isolated='yes'/>");
    world.done("prepare", &world.domain(UUID, "", &devices));
    assert_eq!(world.rules("vm1")["vlan"], "7");
    assert_eq!(world.rules("vm1")["isolated"], "on");
}

#[test]
fn bad_guests_are_refused_with_the_reason_and_change_nothing() {
    let Some(world) = World::new() else { return };
    world.done("prepare", &world.domain(OTHER, "", &interface(9, "")));
    let one = interface(1, "");
    let of = |metadata: &str| world.domain(UUID, metadata, &one);
    let long = "<target dev='a-name-that-is-too-long'/>";
    for (xml, reason) in [
        (String::new(), "malformed"),
        ("<domain><uuid>".into(), "malformed"),
        ("<network/>".into(), "not a <domain> with a <uuid>"),
        ("<domain><uuid>../../etc/x</uuid></domain>".into(), "not a <domain> with a <uuid>"),
        (
            of(&settings(1, "<vlan><tag id='4095'/></vlan>")),
            "is '4095', not a number from 1 to 4094",
        ),
        (of(&settings(1, "<vlan><tag id='x'/></vlan>")), "is 'x', not a number"),
        (of(&settings(1, "<vlan><tag/></vlan>")), "is 'None', not a number"),
        (of(&settings(1, "<vlan/>")), "<vlan> has no <tag"),
        (of(&settings(1, "<vlan><tag id='5' nativeMode='tagged'/></vlan>")), "nativeMode='tagged'"),
        (of(&settings(1, "<port isolated='maybe'/>")), "isolated='maybe'"),
        (of(&settings(1, "<option name='socket' value='/x'/>")), "other than kind, socket, mode"),
        (of(&settings(1, "<option name='wieght' value='3'/>")), "wieght"),
        (of(&settings(1, "<option name='weight' value='3&#10;[port.x]'/>")), "weight"),
        (of(&settings(2, "")), "no vhostuser interface has the MAC address 52:54:00:00:00:02"),
        (of(&(settings(1, "") + &settings(1, ""))), "needs the MAC address of one interface"),
        (world.domain(UUID, "", &interface(1, long)), "cannot be the name of a port"),
        (world.domain(UUID, "", &interface(1, "<target dev='../x'/>")), "cannot be the name"),
        (world.domain(UUID, "", &interface(1, "<target dev='own'/>")), "own"),
        (world.domain(UUID, "", &(one.clone() + &one)), "two interfaces have the name 'vm1'"),
        (world.domain(UUID, "", &interface(1, "<driver queues='17'/>")), "from 1 to 16"),
        // The socket of the other guest, under another name.
        (world.domain(UUID, "", &interface(9, "<target dev='x'/>")), "vm9"),
    ] {
        let error = world.refused(&xml);
        assert!(error.contains(reason), "{reason}: {error}");
    }
    assert_eq!(world.names(), ["own", "vm9"]);
}

#[test]
fn missing_switch_or_directory_and_wrong_settings_are_reported() {
    let Some(world) = World::new() else { return };
    let domain = world.domain(UUID, "", &interface(1, ""));
    let conf = std::fs::read_to_string(world.dir.path("hook.conf")).unwrap();
    let with = |from: &str, to: &str| {
        let text = conf.replace(from, to);
        assert_ne!(text, conf);
        std::fs::write(world.dir.path("hook.conf"), text).unwrap();
        world.refused(&domain)
    };
    let error = with(world.switch.control(), "/nonexistent");
    assert!(error.contains("cannot reach a switch at /nonexistent"), "{error}");
    assert!(with(&world.dir.text("ports"), "/nonexistent").contains("create it, and include it"));
    assert!(with("program=", "program=/nonexistent").contains("No such file"));
    assert!(with("sockets=", "socket=").contains("unknown 'socket'; [pvswitch] has the keys"));
    assert!(with("[pvswitch]", "[x]").contains("unknown 'x'"));
    assert!(with("[pvswitch]", "pvswitch").contains("cannot read"));
    // Guests that are not ours start with any settings.
    let other = format!("<domain><uuid>{UUID}</uuid><devices/></domain>");
    world.done("prepare", &other);
}

#[test]
fn hook_is_executable() {
    let hook = concat!(env!("CARGO_MANIFEST_DIR"), "/../../plugins/libvirt/qemu");
    assert_eq!(std::fs::metadata(hook).unwrap().permissions().mode() & 0o111, 0o111);
}
