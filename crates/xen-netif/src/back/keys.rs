//! The keys of a vif's handshake: what a back end offers, what a front end asks for.
//!
//! Everything a guest wrote is checked here, once; what comes out is plain.

use std::fmt;

use rustix::io::Errno;

use super::MTU_MAX;
use super::tree::{Failure, Tree};

/// Most queues that a vif can be offered.
pub const QUEUES_MAX: u16 = 16;

/// What a back end can be told not to offer, by the names of its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// `multi-queue-max-queues`, 1 to [`QUEUES_MAX`].
    pub queues: u16,
    /// Bits by position in [`FEATURES`] that are written as 0.
    pub without: u32,
}

/// Features by the names of their keys, less `feature-`, in the order they are written.
pub const FEATURES: [&str; 9] = [
    "sg",
    "gso-tcpv4",
    "gso-tcpv6",
    "ipv6-csum-offload",
    "multicast-control",
    "dynamic-multicast-control",
    "split-event-channels",
    "ctrl-ring",
    "smart-poll",
];

/// Parses `sg+ctrl-ring` to bits of [`Offer::without`]; the error is the word that is none.
pub fn without(names: &str) -> Result<u32, String> {
    names.split('+').try_fold(0, |bits, word| {
        let name = word.strip_prefix("feature-").unwrap_or(word);
        let bit = FEATURES.iter().position(|f| *f == name).ok_or_else(|| word.to_string())?;
        Ok(bits | 1 << bit)
    })
}

impl Offer {
    /// Whether a feature is offered. One that needs another is not offered without it.
    pub fn has(&self, name: &str) -> bool {
        let bit = FEATURES.iter().position(|f| *f == name).expect("a feature's name");
        let needs = match name {
            "gso-tcpv4" | "gso-tcpv6" => self.has("sg"),
            "dynamic-multicast-control" => self.has("multicast-control"),
            _ => true,
        };
        self.without & 1 << bit == 0 && needs
    }

    /// The block of keys that goes before InitWait. "0" and "1" exactly: Windows reads them as
    /// binary numbers.
    pub fn keys(&self) -> Vec<(String, String)> {
        let mut keys: Vec<_> = FEATURES
            .iter()
            .map(|name| (format!("feature-{name}"), u8::from(self.has(name)).to_string()))
            .collect();
        // Linux fronts refuse a back end that does not copy; page flipping is dead.
        keys.push(("feature-rx-copy".into(), "1".into()));
        keys.push(("feature-rx-flip".into(), "0".into()));
        keys.push(("multi-queue-max-queues".into(), self.queues.to_string()));
        keys
    }
}

/// One queue's rings and channels, as the front named them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueKeys {
    /// `tx-ring-ref`
    pub tx_ref: u32,
    /// `rx-ring-ref`
    pub rx_ref: u32,
    /// `event-channel-tx`, or `event-channel`.
    pub tx_port: u32,
    /// `event-channel-rx`; `None`: one channel for both rings.
    pub rx_port: Option<u32>,
}

/// The control ring, as the front named it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CtrlKeys {
    /// `ctrl-ring-ref`
    pub ring_ref: u32,
    /// `event-channel-ctrl`
    pub port: u32,
}

/// What a front end takes; all absent by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Takes {
    /// Packets in several slots.
    pub sg: bool,
    /// GSO TCPv4.
    pub gso_tcpv4: bool,
    /// GSO TCPv6.
    pub gso_tcpv6: bool,
    /// IPv4 checksums must be complete.
    pub no_csum_offload: bool,
    /// IPv6 checksums may be blank.
    pub ipv6_csum_offload: bool,
    /// It notifies when it has posted buffers.
    pub rx_notify: bool,
    /// Both ends take part in smart poll.
    pub smart_poll: bool,
}

impl Takes {
    /// Names of what is there, for people.
    pub fn names(&self) -> Vec<&'static str> {
        let all = [
            (self.sg, "sg"),
            (self.gso_tcpv4, "gso-tcpv4"),
            (self.gso_tcpv6, "gso-tcpv6"),
            (self.no_csum_offload, "no-csum-offload"),
            (self.ipv6_csum_offload, "ipv6-csum-offload"),
            (self.rx_notify, "rx-notify"),
            (self.smart_poll, "smart-poll"),
        ];
        all.into_iter().filter(|(has, _)| *has).map(|(_, name)| name).collect()
    }
}

/// All that a front end asks for at Connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its queues, one at least.
    pub queues: Vec<QueueKeys>,
    /// Its control ring.
    pub ctrl: Option<CtrlKeys>,
    /// What it takes.
    pub takes: Takes,
}

/// Why a front end's keys cannot be used: an errno, as the `error` node wants one, and a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// For the `error` node.
    pub errno: Errno,
    /// What is wrong, and where.
    pub text: String,
}

impl Refused {
    /// Invalid, and why.
    pub fn invalid(text: String) -> Self {
        Self { errno: Errno::INVAL, text }
    }
}

impl fmt::Display for Refused {
    /// As Linux writes it: `<errno> <text>`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.errno.raw_os_error(), self.text)
    }
}

/// Why keys could not be read: the guest's fault, or xenstore's.
#[derive(Debug)]
pub enum ReadError {
    /// The guest's.
    Refused(Refused),
    /// Xenstore is gone.
    Store(Failure),
}

impl From<Failure> for ReadError {
    fn from(failure: Failure) -> Self {
        Self::Store(failure)
    }
}

fn refused<T>(text: String) -> Result<T, ReadError> {
    Err(ReadError::Refused(Refused::invalid(text)))
}

/// Longest value shown in a message: a guest may write 4 KiB of anything.
const SHOWN_MAX: usize = 32;

/// A value for people: printable and short.
pub fn shown(value: &str) -> String {
    value.chars().take(SHOWN_MAX).flat_map(char::escape_debug).collect()
}

/// A decimal number. Spaces around it are ignored, as Linux does.
pub fn decimal(value: &str) -> Option<u32> {
    let value = value.trim();
    value.bytes().all(|b| b.is_ascii_digit()).then(|| value.parse().ok()).flatten()
}

/// A key that says yes with anything but 0; missing or garbled, it says no.
pub fn flag<T: Tree>(store: &mut T, path: &str) -> Result<bool, Failure> {
    Ok(store.read(path)?.and_then(|value| decimal(&value)).is_some_and(|n| n != 0))
}

/// The keys below one directory.
struct Keys<'a, T> {
    store: &'a mut T,
    dir: String,
}

impl<T: Tree> Keys<'_, T> {
    fn optional(&mut self, key: &str) -> Result<Option<u32>, ReadError> {
        let path = format!("{}/{key}", self.dir);
        match self.store.read(&path)? {
            None => Ok(None),
            Some(value) => match decimal(&value) {
                Some(n) => Ok(Some(n)),
                None => refused(format!("{path} is '{}', which is no number", shown(&value))),
            },
        }
    }

    fn required(&mut self, key: &str) -> Result<u32, ReadError> {
        match self.optional(key)? {
            Some(n) => Ok(n),
            None => refused(format!("{}/{key} is missing", self.dir)),
        }
    }

    fn flag(&mut self, key: &str) -> Result<bool, ReadError> {
        Ok(flag(self.store, &format!("{}/{key}", self.dir))?)
    }

    fn queue(&mut self, split: bool) -> Result<QueueKeys, ReadError> {
        let tx_ref = self.required("tx-ring-ref")?;
        let rx_ref = self.required("rx-ring-ref")?;
        // Split channels only if they were offered, and then both or none.
        if split && let Some(tx_port) = self.optional("event-channel-tx")? {
            let rx_port = Some(self.required("event-channel-rx")?);
            return Ok(QueueKeys { tx_ref, rx_ref, tx_port, rx_port });
        }
        let tx_port = self.required("event-channel")?;
        Ok(QueueKeys { tx_ref, rx_ref, tx_port, rx_port: None })
    }
}

/// Whether a front end has named its rings: fronts that write Initialised may do so before.
pub fn named<T: Tree>(store: &mut T, front: &str) -> Result<bool, Failure> {
    for key in ["tx-ring-ref", "queue-0/tx-ring-ref"] {
        if store.read(&format!("{front}/{key}"))?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Reads what the front end at `front` asks for, and checks it against what was offered.
pub fn read<T: Tree>(store: &mut T, front: &str, offer: &Offer) -> Result<Request, ReadError> {
    let mut top = Keys { store, dir: front.into() };
    let count = top.optional("multi-queue-num-queues")?.unwrap_or(1);
    if !(1..=u32::from(offer.queues)).contains(&count) {
        return refused(format!(
            "{front}/multi-queue-num-queues is {count}: 1 to {} are offered",
            offer.queues
        ));
    }
    //= netif.h: a backend that gets no request-rx-copy would have to flip pages.
    if !top.flag("request-rx-copy")? {
        return Err(ReadError::Refused(Refused {
            errno: Errno::OPNOTSUPP,
            text: format!("{front}/request-rx-copy is not 1: pages are not flipped any more"),
        }));
    }
    let split = offer.has("split-event-channels");
    let queues = if count == 1 {
        // With one queue the keys are flat (netif.h).
        vec![top.queue(split)?]
    } else {
        let dirs = (0..count).map(|n| format!("{front}/queue-{n}"));
        dirs.map(|dir| Keys { store: &mut *top.store, dir }.queue(split))
            .collect::<Result<_, _>>()?
    };
    let ctrl = match offer.has("ctrl-ring").then(|| top.optional("ctrl-ring-ref")).transpose()? {
        Some(Some(ring_ref)) => {
            Some(CtrlKeys { ring_ref, port: top.required("event-channel-ctrl")? })
        }
        _ => None,
    };
    let takes = Takes {
        sg: top.flag("feature-sg")?,
        gso_tcpv4: top.flag("feature-gso-tcpv4")?,
        gso_tcpv6: top.flag("feature-gso-tcpv6")?,
        no_csum_offload: top.flag("feature-no-csum-offload")?,
        ipv6_csum_offload: top.flag("feature-ipv6-csum-offload")?,
        rx_notify: top.flag("feature-rx-notify")?,
        smart_poll: offer.has("smart-poll") && top.flag("feature-smart-poll")?,
    };
    Ok(Request { queues, ctrl, takes })
}

/// What an `mtu` key says, if it can be one.
pub fn mtu(value: &str) -> Option<u16> {
    let mtu = decimal(value).and_then(|n| u16::try_from(n).ok())?;
    (68..=MTU_MAX).contains(&mtu).then_some(mtu)
}

#[cfg(test)]
mod tests;
