//! Keys of a vif's handshake: offered by a back end, requested by a front end.
//!
//! All keys written by a guest are validated here, once; the results are trusted.

use std::fmt;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::MTU_MAX;
use super::tree::{Failure, Tree};

/// Maximum number of queues offered for a vif.
pub const QUEUES_MAX: u16 = 16;

/// Features offered, by the names of their keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// `multi-queue-max-queues`, 1 to [`QUEUES_MAX`].
    pub queues: u16,
    /// Bits of features written as 0, by position in [`FEATURES`].
    pub without: u32,
}

/// Names of features without `feature-`, in the order in which they are written.
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

/// Parses `sg+ctrl-ring` to bits of [`Offer::without`]; the error is the unknown word.
pub fn without(names: &str) -> Result<u32, String> {
    names.split('+').try_fold(0, |bits, word| {
        let name = word.strip_prefix("feature-").unwrap_or(word);
        let bit = FEATURES.iter().position(|f| *f == name).ok_or_else(|| word.to_string())?;
        Ok(bits | 1 << bit)
    })
}

impl Offer {
    /// Whether a feature is offered. A feature that depends on another is not offered without it.
    pub fn has(&self, name: &str) -> bool {
        let bit = FEATURES.iter().position(|f| *f == name).expect("a feature's name");
        let needs = match name {
            "gso-tcpv4" | "gso-tcpv6" => self.has("sg"),
            "dynamic-multicast-control" => self.has("multicast-control"),
            _ => true,
        };
        self.without & 1 << bit == 0 && needs
    }

    /// The keys written before InitWait. Values are exactly "0" and "1": Windows reads them as
    /// binary numbers.
    pub fn keys(&self) -> Vec<(String, String)> {
        let mut keys: Vec<_> = FEATURES
            .iter()
            .map(|name| (format!("feature-{name}"), u8::from(self.has(name)).to_string()))
            .collect();
        // Linux front ends reject a back end that does not copy; page flipping is obsolete.
        keys.push(("feature-rx-copy".into(), "1".into()));
        keys.push(("feature-rx-flip".into(), "0".into()));
        keys.push(("multi-queue-max-queues".into(), self.queues.to_string()));
        keys
    }
}

/// Rings and channels of one queue, as named by the front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

/// The control ring, as named by the front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CtrlKeys {
    /// `ctrl-ring-ref`
    pub ring_ref: u32,
    /// `event-channel-ctrl`
    pub port: u32,
}

/// Features of a front end; all absent by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrontFeatures {
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
    /// Whether it sends an event when it has posted buffers.
    pub rx_notify: bool,
    /// Both ends support smart poll.
    pub smart_poll: bool,
}

impl FrontFeatures {
    /// Names of the features present.
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

/// Request of a front end at Connected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Its queues, at least one.
    pub queues: Vec<QueueKeys>,
    /// Its control ring, if any.
    pub ctrl: Option<CtrlKeys>,
    /// Its features.
    pub features: FrontFeatures,
}

/// Reason to reject a front end's keys: an errno, for the `error` node, and a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// For the `error` node.
    pub errno: Errno,
    /// Description of the error, with the key.
    pub text: String,
}

impl Refused {
    /// Invalid input, with a reason.
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

/// Error while reading keys: of the guest, or of xenstore.
#[derive(Debug)]
pub enum ReadError {
    /// An error of the guest.
    Refused(Refused),
    /// Xenstore failed.
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

/// Maximum length of a value in a message: a guest may write 4 KiB of arbitrary data.
const SHOWN_MAX: usize = 32;

/// Escapes and shortens a value for a message.
pub fn printable(value: &str) -> String {
    value.chars().take(SHOWN_MAX).flat_map(char::escape_debug).collect()
}

/// Parses a decimal number. Surrounding spaces are ignored, as in Linux.
pub fn decimal(value: &str) -> Option<u32> {
    let value = value.trim();
    value.bytes().all(|b| b.is_ascii_digit()).then(|| value.parse().ok()).flatten()
}

/// Reads a boolean key: true unless it is 0, missing or invalid.
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
                None => {
                    refused(format!("{path} is '{}', which is not a number", printable(&value)))
                }
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
        // Split channels only if offered, and then both or none.
        if split && let Some(tx_port) = self.optional("event-channel-tx")? {
            let rx_port = Some(self.required("event-channel-rx")?);
            return Ok(QueueKeys { tx_ref, rx_ref, tx_port, rx_port });
        }
        let tx_port = self.required("event-channel")?;
        Ok(QueueKeys { tx_ref, rx_ref, tx_port, rx_port: None })
    }
}

/// Whether a front end has named its rings: those that write Initialised may do so before.
pub fn has_rings<T: Tree>(store: &mut T, front: &str) -> Result<bool, Failure> {
    for key in ["tx-ring-ref", "queue-0/tx-ring-ref"] {
        if store.read(&format!("{front}/{key}"))?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Reads and validates the request of the front end at `front` against the offer.
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
            text: format!("{front}/request-rx-copy is not 1: page flipping is not supported"),
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
    let features = FrontFeatures {
        sg: top.flag("feature-sg")?,
        gso_tcpv4: top.flag("feature-gso-tcpv4")?,
        gso_tcpv6: top.flag("feature-gso-tcpv6")?,
        no_csum_offload: top.flag("feature-no-csum-offload")?,
        ipv6_csum_offload: top.flag("feature-ipv6-csum-offload")?,
        rx_notify: top.flag("feature-rx-notify")?,
        smart_poll: offer.has("smart-poll") && top.flag("feature-smart-poll")?,
    };
    Ok(Request { queues, ctrl, features })
}

/// Parses an `mtu` key; `None` if it is out of range.
pub fn mtu(value: &str) -> Option<u16> {
    let mtu = decimal(value).and_then(|n| u16::try_from(n).ok())?;
    (68..=MTU_MAX).contains(&mtu).then_some(mtu)
}

#[cfg(test)]
mod tests;
