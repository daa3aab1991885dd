//! Netavark's plugin protocol, version 1.0.0: the operation is an argument, the network and the
//! container on standard input.

use std::io::Read as _;

use serde_json::{Value, json};

use crate::attachment::{Attachment, KEYS, Settings, check_interface, check_netns, configure};

/// Longest input.
const STDIN_MAX: u64 = 1 << 20;

/// Runs an operation. Returns what to print, and whether it succeeded.
pub fn run(mut args: impl Iterator<Item = String>) -> (Option<Value>, bool) {
    let (operation, netns) = (args.next().unwrap_or_default(), args.next());
    match operate(&operation, netns.as_deref()) {
        Ok(reply) => (reply, true),
        Err(text) => (Some(json!({ "error": text })), false),
    }
}

fn operate(operation: &str, netns: Option<&str>) -> Result<Option<Value>, String> {
    match (operation, netns) {
        ("info", _) => {
            let version = env!("CARGO_PKG_VERSION");
            Ok(Some(json!({"version": version, "api_version": "1.0.0"})))
        }
        ("create", _) => create(input()?).map(Some),
        ("setup", Some(netns)) => setup(netns, &input()?).map(Some),
        ("teardown", Some(_)) => teardown(&input()?).map(|()| None),
        _ => {
            Err("usage: create, setup NETNS, teardown NETNS or info; for CNI set CNI_COMMAND"
                .into())
        }
    }
}

fn input() -> Result<Value, String> {
    let mut text = Vec::new();
    std::io::stdin().take(STDIN_MAX).read_to_end(&mut text).map_err(|error| error.to_string())?;
    serde_json::from_slice(&text).map_err(|error| format!("input: {error}"))
}

/// Checks a new network and returns it as it is.
fn create(network: Value) -> Result<Value, String> {
    Settings::read(&network["options"])?;
    let options = network["options"].as_object().into_iter().flatten();
    if let Some((key, _)) = options.into_iter().find(|(key, _)| !KEYS.contains(&key.as_str())) {
        return Err(format!("unknown option '{key}'; there are {}", KEYS.join(", ")));
    }
    if network["ipam_options"]["driver"] == "dhcp" {
        return Err("--ipam-driver dhcp is not supported: use host-local or none".into());
    }
    Ok(network)
}

/// The container, its interface, and the network of an input.
fn attachment<'a>(input: &'a Value, settings: &'a Settings) -> Result<Attachment<'a>, String> {
    let text = |value: &'a Value, what: &str| {
        let text = value.as_str().filter(|text| !text.is_empty());
        text.ok_or_else(|| format!("input: no {what}"))
    };
    let interface = text(&input["network_options"]["interface_name"], "interface_name")?;
    check_interface(interface)?;
    let network = text(&input["network"]["name"], "network name")?;
    let container = text(&input["container_id"], "container_id")?;
    Ok(Attachment { settings, network, container, interface })
}

fn setup(netns: &str, input: &Value) -> Result<Value, String> {
    check_netns(netns)?;
    let settings = Settings::read(&input["network"]["options"])?;
    let at = attachment(input, &settings)?;
    let subnets = input["network"]["subnets"].as_array().cloned().unwrap_or_default();
    let ips = input["network_options"]["static_ips"].as_array().cloned().unwrap_or_default();
    // Podman gives one address of each subnet, in their order.
    let mut given = Vec::new();
    for (ip, subnet) in ips.iter().zip(&subnets) {
        let prefix = subnet["subnet"].as_str().and_then(|subnet| subnet.rsplit_once('/'));
        let (Some(ip), Some((_, prefix))) = (ip.as_str(), prefix) else {
            return Err(format!("input: address {ip} is not in subnet {subnet}"));
        };
        given.push((format!("{ip}/{prefix}"), subnet["gateway"].as_str()));
    }
    let mac = at.attach(netns, input["network_options"]["static_mac"].as_str())?;
    let addresses: Vec<_> = given.iter().map(|(address, _)| &**address).collect();
    let gateways = given.iter().filter_map(|(_, gateway)| *gateway);
    let internal = input["network"]["internal"] == true;
    let default = |gateway| ("default", Some(gateway));
    let routes: Vec<_> = gateways.filter(|_| !internal).map(default).collect();
    configure(netns, at.interface, &addresses, &routes).inspect_err(|_| drop(at.detach()))?;
    let nets = given.iter().map(|(address, gateway)| match gateway {
        Some(gateway) => json!({"ipnet": address, "gateway": gateway}),
        None => json!({"ipnet": address}),
    });
    let nets: Vec<_> = nets.collect();
    Ok(json!({
        "dns_search_domains": [],
        "dns_server_ips": [],
        "interfaces": {at.interface: {"mac_address": mac, "subnets": nets}},
    }))
}

fn teardown(input: &Value) -> Result<(), String> {
    let settings = Settings::read(&input["network"]["options"])?;
    attachment(input, &settings)?.detach()
}
