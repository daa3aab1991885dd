//! What one process hands to the next: the state of a switch.
//!
//! ```text
//!   old ── Offer, descriptors ──▶ new        all but what workers change; both may still fail
//!   old ◀── Reply ───────────────            prepared, or why not
//!       (workers stop)
//!   old ── Handed ──────────────▶ new        positions of rings, counters, held frames
//!   old ◀── Reply ───────────────
//!   old ── GO ──────────────────▶ new        and exits
//! ```

use std::collections::BTreeMap;
use std::path::PathBuf;

use api::config::ConfigText;
use os::HandoverError;
use serde::{Deserialize, Serialize};
use vhost_user::connection::ConnectionState;
use xen_netif::back::RingPositions;

use super::keep::StoreState;
use super::stream::StreamHanded;
use super::vifs::XenOffer;
use super::xdp::{XdpOffer, XdpQueueHanded};

/// Version of all messages; a program takes over from the same version only.
pub(super) const VERSION: u32 = 3;
/// Last message of the old process.
pub(super) const GO: &[u8] = b"go";

/// State that does not change while the control thread waits. Descriptors are indices into the list
/// that goes with it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Offer {
    /// Process that hands over.
    pub(super) pid: u32,
    pub(super) config: ConfigText,
    pub(super) file: Option<PathBuf>,
    pub(super) command_line: ConfigText,
    pub(super) include: Option<PathBuf>,
    pub(super) duration_left_ms: Option<u64>,
    /// Time at which it was made, on the machine's monotonic clock, in ns.
    pub(super) made_ns: u64,
    /// Costs of sleeping on this machine, in ns: wake, wake_late, nap, nap_late.
    pub(super) costs_ns: [u64; 4],
    /// Key of the flow hash, without which flows would change their queues.
    #[serde(default)]
    pub(super) flow_key: Option<u64>,
    /// The store of a switch that is kept.
    pub(super) keep: Option<StoreState>,
    pub(super) control: Option<ListenerState>,
    /// A Unix socket of `--http`.
    pub(super) http_unix: Option<ListenerState>,
    /// A TCP listener of `--http`.
    pub(super) http_tcp: Option<u32>,
    /// Descriptors from the parent process (`fd=NAME`), by their names. Not in a store: after a
    /// kill the parent process passes them again.
    #[serde(default)]
    pub(super) activated: Vec<(String, u32)>,
    pub(super) ports: Vec<PortOffer>,
    pub(super) addresses: Vec<Address>,
}

/// A listening socket, and device and inode of its name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ListenerState {
    pub(super) fd: u32,
    pub(super) path: PathBuf,
    pub(super) made: Option<(u64, u64)>,
}

/// A port.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PortOffer {
    pub(super) name: String,
    pub(super) id: u16,
    pub(super) listener: Option<ListenerState>,
    pub(super) connection: Option<ConnectionState>,
    /// Queues of a TAP, and whether the switch created it.
    pub(super) tap: Option<(Vec<u32>, bool)>,
    /// The vif's port, of its TAP.
    #[serde(default)]
    pub(super) wired: Option<String>,
    /// The connection of a stream port.
    #[serde(default)]
    pub(super) stream: Option<u32>,
    /// The passt process of a port.
    #[serde(default)]
    pub(super) passt: Option<u32>,
    /// AF_XDP sockets.
    #[serde(default)]
    pub(super) xdp: Option<XdpOffer>,
    /// A vif.
    pub(super) xen: Option<XenOffer>,
    /// Whether the other port of its pair carries the frames.
    #[serde(default)]
    pub(super) blocked: bool,
    #[serde(default, alias = "takeovers")]
    pub(super) failovers: u64,
    #[serde(default)]
    pub(super) interface_losses: u64,
    pub(super) faults: u64,
    pub(super) connections: u64,
    pub(super) errors: BTreeMap<String, u64>,
    pub(super) last_error: Option<String>,
    pub(super) drain: bool,
}

/// A learned address: MAC, VLAN, port's id.
pub(super) type Address = ([u8; 6], u16, u16);

/// Reply of the new process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Reply {
    /// Another process of this id was started in its place, and is no child of the old one.
    Started(u32),
    /// It can continue from here.
    Ready,
    /// It cannot, and ends.
    Failed(String),
}

/// State that workers change, after they stopped.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Handed {
    /// Time at which they stopped, on the machine's monotonic clock, in ns.
    pub(super) stopped_ns: u64,
    pub(super) ports: Vec<PortHanded>,
    /// Addresses learned since the offer.
    pub(super) addresses: Vec<Address>,
}

/// A port.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PortHanded {
    pub(super) name: String,
    /// Positions of running rings, by index.
    pub(super) positions: Vec<(u16, u32)>,
    /// The same of a vif.
    pub(super) vif: Option<RingPositions>,
    /// Counters other than 0 of each queue.
    pub(super) ingress: Vec<Counters>,
    pub(super) egress: Vec<Counters>,
    /// Frames held for each egress queue.
    pub(super) held: Vec<Vec<Frame>>,
    /// Frames read from each queue of a TAP and not forwarded.
    pub(super) unsent: Vec<Vec<Frame>>,
    /// Bytes of a stream port's connection.
    #[serde(default)]
    pub(super) stream: StreamHanded,
    /// Queues of AF_XDP sockets.
    #[serde(default)]
    pub(super) xdp: Vec<XdpQueueHanded>,
    /// Place of its flows' queues among the bytes after the message.
    #[serde(default)]
    pub(super) flows: Place,
}

pub(super) type Counters = Vec<(String, u64)>;

/// A frame: its bytes are a part of those after the message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Frame {
    pub(super) hdr: [u8; 10],
    pub(super) at: usize,
    pub(super) len: usize,
    /// Id and queue of its sender.
    pub(super) from: Option<(u16, u16)>,
}

/// Where a part is among the bytes after a message: its offset and length.
pub(super) type Place = (usize, usize);

/// Appends a part to the bytes after a message.
pub(super) fn put(bytes: &mut Vec<u8>, part: &[u8]) -> Place {
    let at = bytes.len();
    bytes.extend(part);
    (at, part.len())
}

/// The part at a place; `None`: the other process sent fewer bytes.
pub(super) fn part(place: Place, bytes: &[u8]) -> Option<&[u8]> {
    let (at, len) = place;
    bytes.get(at..at.checked_add(len)?)
}

/// Encodes a message, and bytes that it refers to.
pub(super) fn encode<T: Serialize>(message: &T, bytes: &[u8]) -> Vec<u8> {
    let json = serde_json::to_vec(message).expect("maps have text keys");
    let mut all = Vec::with_capacity(8 + json.len() + bytes.len());
    all.extend((json.len() as u64).to_le_bytes());
    all.extend(json);
    all.extend(bytes);
    all
}

/// Decodes a message; returns it and the bytes that it refers to.
///
/// # Errors
/// It is not one.
pub(super) fn decode<T: for<'de> Deserialize<'de>>(
    all: &[u8],
) -> Result<(T, &[u8]), HandoverError> {
    let (len, rest) = all.split_first_chunk().ok_or(HandoverError::Foreign)?;
    let len = usize::try_from(u64::from_le_bytes(*len)).ok().filter(|len| *len <= rest.len());
    let (json, bytes) = rest.split_at(len.ok_or(HandoverError::Foreign)?);
    Ok((serde_json::from_slice(json).map_err(|_| HandoverError::Foreign)?, bytes))
}

#[cfg(test)]
mod tests;
