//! An interface of the host, a TAP or by packet sockets, as the queues of a port.

use std::num::NonZeroU16;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use shm::Private;
use shm::sync::{Lock, Mutex};
use switch::port::Egress;
use switch::stats::{EgressStats, IngressStats};
use switch::vnet::{Offloads, VnetHdr};
use uplink::{
    Batching, Create, PACKET_OFFLOADS, PacketLink, PacketOptions, TapEgress, TapError, TapFd,
    TapIngress, TapOptions,
};

use crate::spec::{AfPacket, Tap};

/// Buffers of a queue to place in grantable memory: the frames in flight while the receiver keeps
/// up.
const GRANTABLE: usize = 12;

/// MAC address of a vif's interface, as xen-netback's: the highest, so that no bridge takes it.
const VIF_MAC: [u8; 6] = [0xfe, 0xff, 0xff, 0xff, 0xff, 0xff];

/// One queue of a TAP, both directions.
pub struct TapPair {
    pub ingress: Arc<Mutex<TapIngress>>,
    pub ingress_stats: Arc<IngressStats>,
    pub egress: Arc<Mutex<dyn Egress>>,
    pub egress_stats: Arc<EgressStats>,
    pub fd: Arc<OwnedFd>,
}

/// An open TAP.
pub struct TapPort {
    pub pairs: Vec<TapPair>,
    pub created: bool,
    pub offloads: Offloads,
    /// Whether the interface was removed.
    pub removed: bool,
    /// Whether its queues are packet sockets.
    pub is_packet: bool,
}

/// Opens (or creates) the TAP of a port and sets it up.
pub fn open(conf: &Tap) -> Result<TapPort, TapError> {
    let mut options = options(conf);
    // Of one that may have existed, when all else has succeeded.
    let mtu = options.mtu.take_if(|_| !conf.of_vif);
    let tap = uplink::open(&options)?;
    if conf.of_vif {
        // Before scripts set it up: the guest is not connected.
        let what = format!("clear the carrier of `{}`", conf.ifname);
        let cleared = uplink::set_carrier(&*tap.queues[0], false);
        cleared.map_err(|error| TapError::Os { what, error })?;
    }
    let port = port(&tap.queues, tap.created, tap.offloads_read, tap.offloads_write)?;
    let set_mtu = |mtu| uplink::set_mtu(&conf.ifname, conf.netns.as_deref(), mtu);
    let before = mtu.map(set_mtu).transpose()?;
    // Last: what fails leaves no interface behind, and removes none.
    if let Some(on) = conf.persist
        && let Err(error) = set_persist(&tap.queues[0], &conf.ifname, on)
    {
        // The error is the first one.
        before.map(set_mtu);
        return Err(error);
    }
    Ok(port)
}

/// Sets whether the interface of a queue stays when it is closed; returns whether it did before.
pub fn set_persist(queue: &OwnedFd, ifname: &str, on: bool) -> Result<bool, TapError> {
    uplink::set_persist(queue, on).map_err(|error| {
        let what = format!("set the persistence of interface `{ifname}`");
        TapError::Os { what, error }
    })
}

/// Uses the queues of a TAP that the parent process passed.
pub fn inherit(fds: Vec<OwnedFd>) -> Result<TapPort, TapError> {
    let tap = uplink::inherit(fds)?;
    port(&tap.queues, false, tap.offloads, tap.offloads)
}

fn port(
    queues: &[Arc<OwnedFd>],
    created: bool,
    reads: Offloads,
    writes: Offloads,
) -> Result<TapPort, TapError> {
    let wrap = |fd: &Arc<OwnedFd>| TapFd::new(Arc::clone(fd), Batching::Auto);
    let pairs = queues.iter().map(|fd| pair(fd, wrap, reads, writes));
    let pairs = pairs.collect::<Result<_, _>>()?;
    Ok(TapPort { pairs, created, offloads: reads, removed: false, is_packet: false })
}

/// Opens packet sockets on the interface of a port or, from another process, takes them over.
/// New ones are blocked from the start if `blocked`.
pub fn packet(
    conf: &AfPacket,
    handed: Option<Vec<OwnedFd>>,
    blocked: bool,
) -> Result<TapPort, TapError> {
    let queues = match handed {
        Some(queues) => queues.into_iter().map(Arc::new).collect(),
        None => uplink::open_packet(&PacketOptions {
            name: conf.ifname.clone(),
            netns: conf.netns.clone(),
            queues: NonZeroU16::new(conf.queues).unwrap_or(NonZeroU16::MIN),
            blocked,
        })?,
    };
    let wrap = |fd: &Arc<OwnedFd>| TapFd::packet(Arc::clone(fd));
    let pairs = queues.iter().map(|fd| pair(fd, wrap, Offloads::ALL, PACKET_OFFLOADS));
    let pairs = pairs.collect::<Result<_, _>>()?;
    let removed = queues.iter().any(|q| uplink::packet_link(q.as_fd()) == PacketLink::Removed);
    Ok(TapPort { pairs, created: false, offloads: PACKET_OFFLOADS, removed, is_packet: true })
}

/// Takes over the TAP of a port from another process.
pub fn adopt(conf: &Tap, fds: Vec<OwnedFd>, created: bool) -> Result<TapPort, TapError> {
    let tap = uplink::adopt(&conf.ifname, fds)?;
    let port = port(&tap.queues, created, tap.offloads, tap.offloads)?;
    Ok(TapPort { removed: tap.removed, ..port })
}

/// A TAP's queues and requested offloads, as the control thread keeps them.
pub struct TapQueues {
    pub fds: Vec<Arc<OwnedFd>>,
    ingress: Vec<Arc<Mutex<TapIngress>>>,
    pub created: bool,
    /// Whether they are packet sockets.
    pub is_packet: bool,
    /// Of packet sockets: when to check whether the interface, which is down, is up again.
    pub check_at: Option<Instant>,
    /// Offloads that the kernel supports for frames from here.
    all: Offloads,
    /// Offloads requested from the kernel.
    pub offloads: Offloads,
}

impl TapQueues {
    pub fn new(tap: &TapPort) -> Self {
        Self {
            fds: tap.pairs.iter().map(|p| Arc::clone(&p.fd)).collect(),
            ingress: tap.pairs.iter().map(|p| Arc::clone(&p.ingress)).collect(),
            created: tap.created,
            is_packet: tap.is_packet,
            check_at: None,
            all: tap.offloads,
            offloads: tap.offloads,
        }
    }

    /// Has each queue's first frames read into memory from `allocate`, where it returns any.
    pub fn set_memory(&self, allocate: impl Fn(usize) -> Option<Private>) {
        for ingress in &self.ingress {
            if let Some(memory) = allocate(GRANTABLE * TapIngress::BUFFER_LEN) {
                ingress.lock().set_memory(memory);
            }
        }
    }

    /// The ingress of a queue.
    pub fn ingress(&self, queue: usize) -> &Arc<Mutex<TapIngress>> {
        &self.ingress[queue]
    }

    /// State of the interface, of packet sockets.
    pub fn link(&self) -> PacketLink {
        uplink::packet_link(self.fds[0].as_fd())
    }

    /// Has the kernel drop all frames for packet sockets, or no longer. Those that wait are
    /// dropped.
    pub fn set_blocked(&self, blocked: bool) -> std::io::Result<()> {
        for (fd, ingress) in self.fds.iter().zip(&self.ingress) {
            uplink::set_packet_blocked(fd.as_fd(), blocked)?;
            ingress.lock().discard();
        }
        Ok(())
    }

    /// Has the kernel deliver frames to packet sockets; those that wait stay.
    pub fn unblock(&self) -> std::io::Result<()> {
        self.fds.iter().try_for_each(|fd| uplink::unblock_packet(fd.as_fd()))
    }

    /// Frames of each queue that were read and not delivered.
    pub fn unsent(&self) -> Vec<Vec<(VnetHdr, Vec<u8>)>> {
        let of = |ingress: &Arc<Mutex<TapIngress>>| ingress.lock().unsent();
        self.ingress.iter().map(of).collect()
    }

    /// Takes over such frames of another process.
    pub fn restore_unsent(&self, frames: &[Vec<(VnetHdr, Vec<u8>)>]) {
        for (ingress, frames) in self.ingress.iter().zip(frames) {
            ingress.lock().restore_unsent(frames);
        }
    }

    /// Requests from the kernel the present offloads again: opening the interface once more has
    /// requested all.
    pub fn restore_offloads(&self) -> std::io::Result<()> {
        if self.offloads == self.all || self.is_packet {
            return Ok(());
        }
        uplink::request_offloads(&*self.fds[0], &self.offloads).map(drop)
    }

    /// Requests from the kernel the offloads in `accepted` by the only receiver; the kernel then
    /// does the others itself, and no frame needs work in the switch.
    pub fn follow(&mut self, accepted: &Offloads) -> std::io::Result<()> {
        let want = self.all.and(accepted);
        // A packet socket has no such request: the switch does what its receiver does not.
        if want == self.offloads || self.is_packet {
            return Ok(());
        }
        self.offloads = uplink::request_offloads(&*self.fds[0], &want)?;
        for ingress in &self.ingress {
            ingress.lock().set_offloads(self.offloads);
        }
        Ok(())
    }
}

/// Options for opening the TAP of `conf`.
pub fn options(conf: &Tap) -> TapOptions {
    TapOptions {
        name: conf.ifname.clone(),
        netns: conf.netns.clone(),
        queues: NonZeroU16::new(conf.queues).unwrap_or(NonZeroU16::MIN),
        create: if conf.of_vif { Create::Always } else { Create::IfMissing },
        up: !conf.of_vif,
        mtu: conf.mtu.map(u32::from),
        mac: conf.of_vif.then_some(VIF_MAC),
        queue_len: None,
    }
}

fn pair(
    fd: &Arc<OwnedFd>,
    wrap: impl Fn(&Arc<OwnedFd>) -> TapFd,
    reads: Offloads,
    writes: Offloads,
) -> Result<TapPair, TapError> {
    let ingress_stats = Arc::new(IngressStats::default());
    let egress_stats = Arc::new(EgressStats::default());
    let ingress = TapIngress::new(wrap(fd), reads, Arc::clone(&ingress_stats));
    let ingress = ingress
        .map_err(|error| TapError::Os { what: "allocate memory for frames".into(), error })?;
    let egress = TapEgress::new(wrap(fd), writes, Arc::clone(&egress_stats));
    Ok(TapPair {
        ingress: Arc::new(Mutex::new(Lock::Ingress, ingress)),
        ingress_stats,
        egress: Arc::new(Mutex::new(Lock::Egress, egress)),
        egress_stats,
        fd: Arc::clone(fd),
    })
}
