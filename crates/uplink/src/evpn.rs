//! The addresses of the switch in the forwarding table of a Linux bridge, for BGP EVPN.
//!
//! A TAP of the switch is in a bridge with VXLAN interfaces. FRR announces the bridge's entries to
//! the other hosts, and installs theirs as `extern_learn` entries on a VXLAN interface. So the
//! table of the bridge is the interface to FRR, and netlink the protocol
//! ([0035](../../../docs/design/0035-evpn.md)).
//!
//! ```text
//!   addresses at ports ──▶ Mirror ──▶ RTM_NEWNEIGH, RTM_DELNEIGH: static, on the TAP
//!                            ▲  └───▶ forget: the address is on another host
//!                            └─────── RTNLGRP_NEIGH, RTNLGRP_LINK: extern_learn, on a VXLAN
//! ```
//!
//! `Mirror` decides: messages in, requests out, without a clock or a descriptor. [`Evpn`] joins
//! it to a netlink socket, which never blocks: messages that were lost cause a new dump.

mod links;
mod mirror;
mod problem;
mod socket;
mod tap;
mod wire;

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use switch::fdb::{Mac, PortId};
use switch::tenant::Vlan;

use self::mirror::Mirror;
use self::socket::Netlink;
use crate::in_netns;
use crate::tap::TapError;

/// An address in a VLAN of the switch; 0: untagged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// The MAC address.
    pub mac: Mac,
    /// The VLAN.
    pub vlan: u16,
}

/// What the switch knows of an address at one of its ports, other than the TAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Local {
    /// The port.
    pub port: PortId,
    /// Whether it was learned from a frame.
    pub learned: bool,
    /// If it was configured: how many times its port came up. Otherwise 0.
    pub starts: u64,
}

/// A TAP of the switch in a bridge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Name of the interface.
    pub interface: String,
    /// Name of the bridge.
    pub bridge: String,
    /// VLANs of the TAP's port.
    pub vlan: Vlan,
}

/// VLANs that an interface of a VLAN-aware bridge carries.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Vlans {
    /// With tags: ranges of ids, both ends included.
    tagged: Vec<(u16, u16)>,
    /// Without a tag.
    untagged: Option<u16>,
}

impl Vlans {
    /// Those of a port; none of a transparent one: the bridge's settings stay.
    fn of(vlan: &Vlan) -> Self {
        let mut tagged: Vec<(u16, u16)> = Vec::new();
        if let Vlan::Trunk { vids, native } = vlan {
            let vids = (1..4095).filter(|vid| vids.contains(*vid) && *native != Some(*vid));
            for vid in vids {
                match tagged.last_mut() {
                    Some((_, last)) if *last + 1 == vid => *last = vid,
                    _ => tagged.push((vid, vid)),
                }
            }
        }
        Self { tagged, untagged: vlan.untagged() }
    }
}

/// State of an address of the switch in a bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The bridge has it, for FRR to announce.
    Announced,
    /// It is to be announced: the kernel has not replied, has refused, or the port's rate of
    /// changes is used up.
    Pending,
    /// It is on another host, and nothing was heard of it here since.
    Yielded,
    /// It was heard here and on another host in turn, and is left to the other for some time.
    Duplicate,
}

impl State {
    /// Its name in `ctl fdb`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Announced => "announced",
            Self::Pending => "pending",
            Self::Yielded => "yielded",
            Self::Duplicate => "duplicate",
        }
    }
}

/// An address on another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// The address.
    pub address: Address,
    /// The host's VXLAN tunnel endpoint.
    pub vtep: Option<IpAddr>,
}

/// State of a [`Member`], for display.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// VXLAN network identifiers of the bridge.
    pub vnis: Vec<u32>,
    /// Addresses in each state.
    pub states: BTreeMap<&'static str, usize>,
    /// Addresses on other hosts.
    pub remote: usize,
    /// What is wrong, each with a remedy.
    pub problems: Vec<String>,
}

/// What the switch has to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Remove the learned entry of an address that moved to another host.
    Forget(Address, PortId),
    /// Report an address that two hosts have: the other one's tunnel endpoint, if known.
    Duplicate(Address, PortId, Option<IpAddr>),
}

/// The mirror of one network namespace.
pub struct Evpn {
    mirror: Mirror,
    socket: Netlink,
    heard: Vec<(u32, wire::Heard)>,
    bytes: Vec<u8>,
}

/// Most datagrams read per call: a bridge with many addresses must not keep the caller.
const READS_MAX: usize = 16;
/// Time after which no other datagram is read in a call. The kernel makes each datagram of a dump
/// while it is read, and first walks to where the one before ended: longer in a larger table.
const READS_TIME: Duration = Duration::from_millis(2);

impl Evpn {
    /// Opens a netlink socket in the namespace `netns`; `None`: the current one.
    ///
    /// # Errors
    /// [`TapError`]: there is no such namespace, or the system refuses.
    pub fn open(netns: Option<&str>, now: Instant) -> Result<Self, TapError> {
        let socket = match netns {
            None => Netlink::open(),
            Some(netns) => in_netns(netns, Netlink::open)?,
        };
        let os = |error| TapError::Os { what: "open a netlink socket".into(), error };
        let (heard, bytes) = (Vec::new(), Vec::new());
        Ok(Self { mirror: Mirror::new(now), socket: socket.map_err(os)?, heard, bytes })
    }

    /// Sets the TAPs in bridges; those that are no longer in it have their entries removed.
    pub fn set_members(&mut self, members: Vec<Member>) {
        self.mirror.set_members(members);
    }

    /// Sets all addresses at ports, in the order of [`Address`].
    pub fn set_locals(&mut self, locals: Vec<(Address, Local)>) {
        self.mirror.set_locals(locals);
    }

    /// Marks the addresses as those of another process, which announced them: they are no new
    /// evidence against other hosts.
    pub fn inherit(&mut self) {
        self.mirror.inherit();
    }

    /// Reads messages of the kernel, and sends a bounded number of requests. `permit` charges an
    /// announcement to the account of a port: otherwise the time of the next one. Returns what the
    /// switch has to do, and whether to call again at once.
    pub fn run(
        &mut self,
        now: Instant,
        mut permit: impl FnMut(PortId) -> Result<(), Instant>,
    ) -> (Vec<Action>, bool) {
        let more = self.read(now);
        let mut actions = Vec::new();
        self.bytes.clear();
        let bytes = &mut self.bytes;
        let mut send = |seq, request: &wire::Request| wire::encode(seq, request, bytes);
        self.mirror.step(now, &mut permit, &mut send, &mut actions);
        if !self.bytes.is_empty() && self.socket.send(&self.bytes).is_err() {
            // The socket is full, or the system is short of memory.
            self.mirror.hear(0, wire::Heard::Lost, now);
        }
        (actions, more)
    }

    fn read(&mut self, now: Instant) -> bool {
        let end = Instant::now() + READS_TIME;
        for reads in 0..READS_MAX {
            if reads > 0 && Instant::now() >= end {
                break;
            }
            match self.socket.receive(&mut self.heard) {
                Ok(true) => {}
                Ok(false) => return false,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => self.heard.push((0, wire::Heard::Lost)),
            }
            for (seq, heard) in self.heard.drain(..) {
                self.mirror.hear(seq, heard, now);
            }
        }
        true
    }

    /// Whether entries of TAPs that are no longer members are gone.
    pub fn has_left(&self) -> bool {
        self.mirror.has_left()
    }

    /// Interfaces of the TAPs.
    pub fn interfaces(&self) -> impl Iterator<Item = &str> {
        self.mirror.interfaces()
    }

    /// Time of the next call of [`run`](Self::run) without a message.
    pub fn due(&self) -> Option<Instant> {
        self.mirror.due()
    }

    /// Addresses of the switch that a TAP carries, with their ports.
    pub fn claims(&self, now: Instant) -> impl Iterator<Item = (Address, PortId, State)> {
        self.mirror.claims(now)
    }

    /// Addresses on other hosts, of each TAP by its interface.
    pub fn remotes(&self) -> impl Iterator<Item = (&str, Remote)> {
        self.mirror.remotes()
    }

    /// State of a TAP.
    pub fn status(&self, interface: &str, now: Instant) -> Option<Status> {
        self.mirror.status(interface, now)
    }

    /// What is wrong, by interface, each with a remedy, if it may have changed since the last call.
    pub fn news(&mut self) -> Option<Vec<(String, String)>> {
        self.mirror.news()
    }
}

impl AsFd for Evpn {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
