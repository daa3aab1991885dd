//! Checks of what a port attaches to, and of rules that must agree.

use super::Value;
use crate::inherited::inherited;
use crate::invalid::Invalid;

/// Longest socket path that fits `sockaddr_un`.
const SOCKET_PATH_MAX: usize = 107;
/// Longest Linux interface name.
const IFNAME_MAX: usize = 15;

/// Checks the socket of a port: a path, or `fd=NAME`.
pub fn socket(path: &str) -> Result<(), String> {
    if let Some(name) = inherited(path) {
        return name.map(drop);
    }
    match path.len() {
        0 => Err("no socket path: use KIND:PATH".into()),
        1..=SOCKET_PATH_MAX => Ok(()),
        len => Err(format!(
            "socket path is {len} bytes long, the maximum is {SOCKET_PATH_MAX}: use a shorter \
             directory"
        )),
    }
}

/// Checks a path of a socket.
pub fn path(path: &str) -> Result<(), String> {
    match inherited(path) {
        Some(_) => Err(format!("'{path}': a datagram socket cannot be inherited: use a path")),
        None => socket(path),
    }
}

/// Checks the name of an interface, or `fd=NAME`.
pub fn interface(name: &str) -> Result<(), String> {
    match inherited(name) {
        Some(name) => name.map(drop),
        None => interface_name(name),
    }
}

/// Checks the name of an interface.
pub fn interface_name(name: &str) -> Result<(), String> {
    let bad = |c: char| c.is_whitespace() || c.is_control() || "/:%".contains(c);
    let is_path = name == "." || name == "..";
    if (1..=IFNAME_MAX).contains(&name.len()) && !name.contains(bad) && !is_path {
        return Ok(());
    }
    Err(format!(
        "interface name '{}' must have 1 to {IFNAME_MAX} characters, without white space, '/', ':' \
         and '%'",
        name.escape_debug()
    ))
}

/// Checks the directory of a `xen-local` port.
pub fn directory(path: &str) -> Result<(), String> {
    if path.is_empty() { Err("no directory: use xen-local:DIR".into()) } else { Ok(()) }
}

/// Parses `DOMID/DEVID` of a vif; `None`: `auto`, all vifs.
///
/// # Errors
/// It is neither; the error shows both forms.
pub fn vif(arg: &str) -> Result<Option<(u16, u32)>, String> {
    if arg == "auto" {
        return Ok(None);
    }
    let numbers = arg
        .split_once('/')
        .and_then(|(domid, devid)| Some((domid.parse().ok()?, devid.parse().ok()?)));
    numbers.map(Some).ok_or_else(|| {
        format!("invalid vif '{arg}': use xen:DOMID/DEVID, for example xen:1/0, or xen:auto")
    })
}

/// Checks that the rules of a port agree; `value` returns an option's value.
///
/// # Errors
/// They do not; the error names an option, and says what to write.
pub fn check_rules(value: impl Fn(&str) -> Option<Value>) -> Result<(), Invalid> {
    check_vlans(&value)?;
    check_burst(&value, "rate-in", "burst-in")?;
    check_burst(&value, "rate-out", "burst-out")?;
    check_burst(&value, "storm", "burst-storm")
}

/// A burst needs a rate of its kind.
fn check_burst(
    value: impl Fn(&str) -> Option<Value>,
    rate: &str,
    burst: &str,
) -> Result<(), Invalid> {
    let amounts = |name| value(name).and_then(|value| value.amounts()).unwrap_or_default();
    let (rates, bursts) = (amounts(rate), amounts(burst));
    for (what, example, has_rate, has_burst) in [
        ("bytes", "100Mbit", rates.data.is_some(), bursts.data.is_some()),
        ("frames", "20kframes", rates.frames.is_some(), bursts.frames.is_some()),
    ] {
        if has_burst && !has_rate {
            let what = format!(
                "{burst}= in {what} needs a rate: add one like {rate}={example}; {burst}=none \
                 removes it"
            );
            return Err(Invalid::new(burst, what));
        }
    }
    Ok(())
}

fn check_vlans(value: impl Fn(&str) -> Option<Value>) -> Result<(), Invalid> {
    let vlan = |name| value(name).and_then(|value| value.vlan());
    let is_trunk = value("trunk").is_some_and(|value| !value.vlans().is_empty());
    if let Some(access) = vlan("vlan")
        && is_trunk
    {
        let what = format!(
            "vlan={access} and trunk= exclude each other: for untagged frames in VLAN {access} \
             use native={access} with trunk=, or remove one with trunk=none or vlan=none"
        );
        return Err(Invalid::new("vlan", what));
    }
    match vlan("native") {
        Some(native) if !is_trunk => {
            let what = format!(
                "native={native} needs a trunk: add trunk=N+M-K, or use vlan={native} for an \
                 access port; native=none removes it"
            );
            Err(Invalid::new("native", what))
        }
        _ => Ok(()),
    }
}
