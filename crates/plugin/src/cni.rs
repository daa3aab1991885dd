//! CNI, versions 0.4.0 to 1.1.0: the operation is in the environment, the network on standard
//! input.

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};

use api::Request;
use serde_json::{Value, json};

use crate::attachment::{Attachment, Settings, check_interface, check_netns, configure};

const VERSIONS: [&str; 3] = ["0.4.0", "1.0.0", "1.1.0"];
/// Longest configuration.
const STDIN_MAX: u64 = 1 << 20;

/// An error as CNI reports it; numbers below 100 are the specification's.
struct Error {
    code: u32,
    text: String,
}

const VERSION: u32 = 1;
const ENVIRONMENT: u32 = 4;
const DECODE: u32 = 6;
const CONFIGURATION: u32 = 7;
const UNAVAILABLE: u32 = 50;
const FAILED: u32 = 100;

/// Gives an error its number.
fn code<T>(code: u32) -> impl FnOnce(String) -> Result<T, Error> {
    move |text| Err(Error { code, text })
}

/// Runs an operation. Returns what to print, and whether it succeeded.
pub fn run(command: &str) -> (Option<Value>, bool) {
    let mut version = "1.0.0".to_owned();
    match operate(command, &mut version) {
        Ok(reply) => (reply, true),
        Err(Error { code, text }) => {
            (Some(json!({"cniVersion": version, "code": code, "msg": text})), false)
        }
    }
}

fn operate(command: &str, version: &mut String) -> Result<Option<Value>, Error> {
    let mut text = Vec::new();
    let read = std::io::stdin().take(STDIN_MAX).read_to_end(&mut text);
    read.map_err(|error| error.to_string()).or_else(code(DECODE))?;
    let parsed = serde_json::from_slice(&text).map_err(|error| format!("network: {error}"));
    let conf: Value = parsed.or_else(code(DECODE))?;
    let wanted = conf["cniVersion"].as_str().unwrap_or("1.0.0");
    if command == "VERSION" {
        return Ok(Some(json!({"cniVersion": wanted, "supportedVersions": VERSIONS})));
    }
    if !VERSIONS.contains(&wanted) {
        return code(VERSION)(format!("version {wanted}: {} are supported", VERSIONS.join(", ")));
    }
    *version = wanted.into();
    let Some(network) = conf["name"].as_str().filter(|name| !name.is_empty()) else {
        return code(CONFIGURATION)("the network has no 'name'".into());
    };
    let settings = Settings::read(&conf).or_else(code(CONFIGURATION))?;
    let ipam = Ipam { plugin: conf["ipam"]["type"].as_str(), command, text: &text };
    match command {
        "STATUS" => {
            let show = settings.call(&Request::Show).map(drop);
            show.map_err(|error| error.to_string()).or_else(code(UNAVAILABLE))?;
            ipam.run().map(|_| None)
        }
        "GC" => {
            collect(&conf, &settings, network)?;
            ipam.run().map(|_| None)
        }
        "ADD" | "DEL" | "CHECK" => {
            let (container, interface) = (variable("CNI_CONTAINERID")?, variable("CNI_IFNAME")?);
            check_interface(&interface).or_else(code(ENVIRONMENT))?;
            let (container, interface) = (&*container, &*interface);
            let at = Attachment { settings: &settings, network, container, interface };
            match command {
                "ADD" => add(&at, &conf, &ipam).map(Some),
                "DEL" => {
                    at.detach().or_else(code(FAILED))?;
                    ipam.run().map(|_| None)
                }
                _ => check(&at, &conf, &ipam).map(|()| None),
            }
        }
        other => code(ENVIRONMENT)(format!("CNI_COMMAND {other} is not supported")),
    }
}

fn variable(name: &str) -> Result<String, Error> {
    let value = std::env::var(name).ok().filter(|value| !value.is_empty());
    value.ok_or_else(|| Error { code: ENVIRONMENT, text: format!("{name} is not set") })
}

fn netns() -> Result<String, Error> {
    let netns = variable("CNI_NETNS")?;
    check_netns(&netns).or_else(code(ENVIRONMENT))?;
    Ok(netns)
}

fn add(at: &Attachment<'_>, conf: &Value, ipam: &Ipam<'_>) -> Result<Value, Error> {
    let netns = netns()?;
    let mac = std::env::var("CNI_ARGS").unwrap_or_default();
    let mac = mac.split(';').find_map(|arg| arg.strip_prefix("MAC="));
    let mac = conf["runtimeConfig"]["mac"].as_str().or(mac);
    // Before addresses are allocated: those of the interface that exists must stay so.
    at.check_new().or_else(code(FAILED))?;
    let addresses = ipam.run()?;
    let made = at.attach(&netns, mac).or_else(code(FAILED)).and_then(|mac| {
        let made = result(at, conf, &netns, &mac, &addresses);
        made.inspect_err(|_| drop(at.detach()))
    });
    // Addresses of an interface that does not exist are free.
    made.inspect_err(|_| drop(Ipam { command: "DEL", ..*ipam }.run()))
}

/// Configures the interface as the IPAM plugin says, and returns the result of ADD.
fn result(
    at: &Attachment<'_>,
    conf: &Value,
    netns: &str,
    mac: &str,
    ipam: &Value,
) -> Result<Value, Error> {
    let list = |key: &str| ipam[key].as_array().cloned().unwrap_or_default();
    let (mut ips, routes) = (list("ips"), list("routes"));
    let addresses: Vec<_> = ips.iter().filter_map(|ip| ip["address"].as_str()).collect();
    let is_six = |text: &str| text.contains(':');
    let gateway = |destination: &str| {
        let gateways = ips.iter().filter_map(|ip| ip["gateway"].as_str());
        gateways.into_iter().find(|gateway| is_six(gateway) == is_six(destination))
    };
    let via = |route: &'_ Value| -> Option<(String, Option<String>)> {
        let destination = route["dst"].as_str()?;
        let gateway = route["gw"].as_str().or_else(|| gateway(destination));
        Some((destination.into(), gateway.map(Into::into)))
    };
    let via: Vec<_> = routes.iter().filter_map(via).collect();
    let via: Vec<_> = via.iter().map(|(to, gateway)| (&**to, gateway.as_deref())).collect();
    configure(netns, at.interface, &addresses, &via).or_else(code(FAILED))?;
    for ip in &mut ips {
        ip["interface"] = 0.into();
        if conf["cniVersion"] == "0.4.0" {
            let six = ip["address"].as_str().is_some_and(is_six);
            ip["version"] = if six { "6" } else { "4" }.into();
        }
    }
    let dns = [&ipam["dns"], &conf["dns"]].into_iter().find(|dns| dns.is_object());
    Ok(json!({
        "cniVersion": conf["cniVersion"].as_str().unwrap_or("1.0.0"),
        "interfaces": [{"name": at.interface, "mac": mac, "sandbox": netns}],
        "ips": ips,
        "routes": routes,
        "dns": dns.cloned().unwrap_or_else(|| json!({})),
    }))
}

fn check(at: &Attachment<'_>, conf: &Value, ipam: &Ipam<'_>) -> Result<(), Error> {
    let netns = netns()?;
    let Some(ips) = conf["prevResult"].as_object().map(|result| result.get("ips")) else {
        return code(CONFIGURATION)("CHECK needs 'prevResult'".into());
    };
    let ips = ips.and_then(Value::as_array).into_iter().flatten();
    let addresses: Vec<_> = ips.filter_map(|ip| ip["address"].as_str()).collect();
    at.check(&netns, &addresses).or_else(code(FAILED))?;
    ipam.run().map(drop)
}

/// Removes attachments that the runtime no longer has.
fn collect(conf: &Value, settings: &Settings, network: &str) -> Result<(), Error> {
    let Some(valid) = conf["cni.dev/valid-attachments"].as_array() else {
        return code(CONFIGURATION)("GC needs 'cni.dev/valid-attachments'".into());
    };
    let mut failed = Vec::new();
    for (container, interface) in settings.attached(network) {
        let is_this = |v: &&Value| v["containerID"] == *container && v["ifname"] == *interface;
        if valid.iter().find(is_this).is_none() {
            let (container, interface) = (&*container, &*interface);
            failed.extend(Attachment { settings, network, container, interface }.detach().err());
        }
    }
    if failed.is_empty() { Ok(()) } else { code(FAILED)(failed.join("; ")) }
}

/// The plugin that chooses addresses, if the network has one.
#[derive(Clone, Copy)]
struct Ipam<'a> {
    plugin: Option<&'a str>,
    command: &'a str,
    text: &'a [u8],
}

impl Ipam<'_> {
    /// Runs the operation there, with the same environment and network.
    fn run(&self) -> Result<Value, Error> {
        let Some(name) = self.plugin else { return Ok(Value::Null) };
        let path = std::env::var("CNI_PATH").unwrap_or_default();
        let directories = path.split(':').filter(|dir| !dir.is_empty());
        let found = directories.map(|dir| Path::new(dir).join(name)).find(|path| path.is_file());
        let Some(program) = found.filter(|_| !name.contains('/')) else {
            return code(CONFIGURATION)(format!("no IPAM plugin '{name}' in CNI_PATH '{path}'"));
        };
        let done = Command::new(&program)
            .env("CNI_COMMAND", self.command)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .and_then(|mut child| {
                child.stdin.take().expect("piped").write_all(self.text)?;
                child.wait_with_output()
            });
        let done = done.map_err(|error| format!("{}: {error}", program.display()));
        let done = done.or_else(code(FAILED))?;
        let reply: Value = serde_json::from_slice(&done.stdout).unwrap_or_default();
        if done.status.success() {
            return Ok(reply);
        }
        let number = reply["code"].as_u64().and_then(|code| u32::try_from(code).ok());
        let why = reply["msg"].as_str().unwrap_or("no reason given");
        code(number.unwrap_or(FAILED))(format!("IPAM plugin {name}: {why}"))
    }
}
