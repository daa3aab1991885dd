//! `ctl upgrade`: hands the switch to a new process
//! ([0026](../../../../docs/design/0026-upgrade.md)).
//!
//! The new process is started with one end of a socket pair as its standard input. Until the last
//! message everything can fail, and this process keeps running.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use api::config::ConfigText;
use os::{Listener, receive_state, send_state};
use serde_json::{Value, json};
use switch::forward::{EgressQueue, HeldCopy};
use switch::time::Ns;
use switch::tuning::Drain;
use switch::vnet::VnetHdr;
use vhost_user::backend::{Exported, export_fd};

use super::handover::{
    Address, Counters, Frame, GO, Handed, ListenerState, Offer, PortHanded, PortOffer, Reply,
    VERSION, decode, encode, put,
};
use super::stream::StreamHanded;
use super::takeover::LEFT_BY;
use super::vifs as xen;
use super::{Attach, Hypervisor, PortState, RunError, System, XenBus};

/// Longest time for the new process to get ready. `ctl` waits for a little longer.
const PREPARE_MAX: Duration = Duration::from_secs(8);
/// Longest time for workers to end their rounds.
const FREEZE_MAX: Duration = Duration::from_secs(1);
/// Longest time for the new process to accept the rest.
pub(super) const ACCEPT_MAX: Duration = Duration::from_secs(1);

/// The program of this process, as it was at the start: its file may be replaced meanwhile.
pub(super) fn program() -> PathBuf {
    std::env::current_exe().unwrap_or_else(|_| "pvswitch".into())
}

/// A process that is started to take over; killed unless it did.
struct Next {
    child: u32,
    /// Under a service manager: the process that the child has started, and has left.
    left: Option<u32>,
    socket: OwnedFd,
    program: PathBuf,
    took_over: bool,
}

impl Drop for Next {
    fn drop(&mut self) {
        if !self.took_over {
            self.left.into_iter().chain([self.child]).for_each(|pid| drop(os::end_program(pid)));
        }
    }
}

/// The command that starts the next version, for the helper.
pub(super) fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    command.args(["run", "--takeover"]);
    // The watchdog's pings come from the new process.
    command.env_remove("WATCHDOG_PID").env_remove(LEFT_BY);
    command
}

/// Name of the next version at the helper.
pub(super) const NEXT: &str = "next";

impl Next {
    fn start(program: &Path) -> Result<Self, RunError> {
        let failed = |error: std::io::Error| failed(program, &error);
        let (socket, theirs) = os::socketpair().map_err(failed)?;
        let name = program.to_str().ok_or(std::io::ErrorKind::InvalidFilename.into());
        let child = os::start_program(NEXT, name.map_err(failed)?, theirs).map_err(failed)?;
        Ok(Self { child: child.pid, left: None, socket, program: program.into(), took_over: false })
    }

    fn pid(&self) -> u32 {
        self.left.unwrap_or(self.child)
    }

    fn send(&self, what: &[u8], fds: &[BorrowedFd<'_>], limit: Duration) -> Result<(), RunError> {
        let sent = send_state(self.socket.as_fd(), VERSION, what, fds, Instant::now() + limit);
        sent.map_err(|error| failed(&self.program, &error))
    }

    /// Waits until it can continue.
    fn ready(&mut self, limit: Duration) -> Result<(), RunError> {
        let end = Instant::now() + limit;
        loop {
            let received = receive_state(self.socket.as_fd(), VERSION, end);
            let reply = received.and_then(|(bytes, _)| Ok(decode::<Reply>(&bytes)?.0));
            match reply {
                Ok(Reply::Ready) => return Ok(()),
                Ok(Reply::Started(pid)) => self.left = Some(pid),
                Ok(Reply::Failed(why)) => return Err(failed(&self.program, &why)),
                Err(error) => return Err(failed(&self.program, &error)),
            }
        }
    }
}

fn failed(program: &Path, why: &dyn Display) -> RunError {
    RunError::Request(format!(
        "{} did not take over: {why}; this switch keeps running, nothing was changed",
        program.display()
    ))
}

impl System {
    /// Starts `program` and hands the switch to it. After success this process must exit without
    /// another change.
    ///
    /// # Errors
    /// It did not start or refused; this process keeps running as before.
    pub(super) fn upgrade(&mut self, program: Option<&Path>) -> Result<Value, RunError> {
        let program = program.unwrap_or(&self.program).to_path_buf();
        self.pause_local();
        let handed_over = self.hand_over(&program);
        if handed_over.is_err() {
            self.resume_local();
            self.accept_http(true);
            // The other process has requested all offloads of TAPs from the kernel.
            self.restore_offloads();
        }
        handed_over
    }

    /// Ends after the switch was handed over. Nothing is undone: sockets, interfaces and rings are
    /// the other process's.
    pub(super) fn leave(&mut self) -> ! {
        self.finish_http();
        self.manager.wait_until_moved();
        std::process::exit(0)
    }

    fn hand_over(&mut self, program: &Path) -> Result<Value, RunError> {
        let began = Instant::now();
        let mut next = Next::start(program)?;
        let mut fds = Exported::default();
        let offer = self.offer(&mut fds);
        let known = offer.addresses.iter().copied().collect();
        next.send(&encode(&offer, &[]), &fds.fds, PREPARE_MAX)?;
        next.ready(PREPARE_MAX.saturating_sub(began.elapsed()))?;
        self.accept_http(false);
        let frozen = self.pool.freeze(FREEZE_MAX);
        let frozen = frozen.ok_or_else(|| failed(program, &"a worker is stuck in its round"))?;
        let mut bytes = Vec::new();
        let handed = self.handed(&known, &mut bytes);
        next.send(&encode(&handed, &bytes), &[], ACCEPT_MAX)?;
        next.ready(ACCEPT_MAX)?;
        // As late as possible: whoever was informed takes the other's end for that of the switch.
        self.report_move(next.pid(), program).map_err(|error| {
            failed(program, &format!("the service manager or keeper does not read: {error}"))
        })?;
        if let Err(error) = next.send(GO, &[], ACCEPT_MAX) {
            drop(frozen);
            let _ = self.report_move(std::process::id(), &self.program.clone());
            return Err(error);
        }
        // From here on the rings are the other's: workers stay at the gate until this process ends.
        std::mem::forget(frozen);
        next.took_over = true;
        let pid = next.pid();
        tracing::info!("handed over to process {pid} ({})", program.display());
        self.publish(api::event::Event::Upgrade { pid });
        self.handed_over = true;
        self.stop = true;
        Ok(json!({ "pid": pid, "program": program.display().to_string() }))
    }

    /// All that does not change while this thread waits.
    fn offer<'a>(&'a self, fds: &mut Exported<'a>) -> Offer {
        let (offer, buses) = (self.switch_offer(fds), &self.xen);
        let activated = self.inherited.activated.iter();
        let activated = activated.map(|(name, fd)| (name.clone(), export_fd(fds, fd.as_fd())));
        let activated = activated.collect();
        let mut ports: Vec<_> = self.ports.values().collect();
        ports.sort_by_key(|state| state.port.id.0);
        Offer {
            ports: ports.into_iter().map(|state| port_offer(state, buses, fds, true)).collect(),
            addresses: self.learned(),
            keep: self.keep.as_ref().and_then(|keep| keep.export(fds)),
            activated,
            ..offer
        }
    }

    /// All of the switch itself. Of ports of the configuration, those that `xen:auto` found,
    /// and their TAPs, it has names and ids.
    pub(super) fn switch_offer<'a>(&'a self, fds: &mut Exported<'a>) -> Offer {
        let known = |state: &&PortState| {
            self.config.port(&state.spec.name).is_some()
                || xen::is_found(&state.attach)
                || state.wired.is_some()
        };
        let mut ports: Vec<_> = self.ports.values().filter(known).map(bare).collect();
        ports.sort_by_key(|port| port.id);
        let left = self.options.duration.map(|all| all.saturating_sub(self.clock().elapsed()));
        let http = self.http.as_ref();
        Offer {
            pid: std::process::id(),
            config: ConfigText::from(&self.config),
            file: self.options.origin.file.clone(),
            command_line: ConfigText::from(&self.options.origin.command_line),
            include: self.options.include.clone(),
            duration_left_ms: left.map(|left| left.as_millis() as u64),
            control: self.control.as_ref().map(|listener| listener_state(listener, fds)),
            http_unix: http.and_then(|h| h.socket.as_ref()).map(|l| listener_state(l, fds)),
            http_tcp: http.and_then(|h| h.tcp.as_ref()).map(|fd| export_fd(fds, fd.as_fd())),
            made_ns: os::monotonic().as_nanos() as u64,
            costs_ns: {
                let costs = self.pool.common.costs;
                [costs.wake, costs.wake_late, costs.nap, costs.nap_late].map(Ns::get)
            },
            flow_key: Some(self.pool.common.flow_key),
            keep: None,
            activated: Vec::new(),
            ports,
            addresses: Vec::new(),
        }
    }

    pub(super) fn learned(&self) -> Vec<Address> {
        let entries = self.fdb.entries(self.now_s()).into_iter().filter(|e| !e.is_static);
        entries.map(|e| (e.mac.0, e.vlan, e.port.0)).collect()
    }

    /// What workers, which are frozen, changed. Bytes of frames are added to `bytes`.
    fn handed(
        &mut self,
        known: &std::collections::HashSet<Address>,
        bytes: &mut Vec<u8>,
    ) -> Handed {
        let stopped_ns = os::monotonic().as_nanos() as u64;
        let new = |address: &Address| !known.contains(address);
        let addresses = self.learned().into_iter().filter(new).collect();
        let now_s = self.now_s();
        let mut senders = Vec::new();
        for state in self.ports.values() {
            for (queue, ingress) in (0..).zip(&state.ingress) {
                senders.push((std::sync::Arc::as_ptr(&ingress.stats), (state.port.id.0, queue)));
            }
        }
        let buses = &self.xen;
        let mut ports: Vec<_> = self.ports.values_mut().collect();
        ports.sort_by_key(|state| state.port.id.0);
        let ports = ports.into_iter().map(|state| {
            let held = |queue: &EgressQueue| {
                let frames = queue.held_copies();
                frames.iter().map(|copy| held_frame(copy, &senders, bytes)).collect()
            };
            let held = state.port.egress.iter().map(held).collect();
            let unsent = match &state.attach {
                Attach::Tap(tap) => tap.unsent(),
                Attach::Stream(stream) => {
                    let frames = stream.unsent().into_iter();
                    vec![frames.map(|frame| (VnetHdr::NONE, frame)).collect()]
                }
                _ => Vec::new(),
            };
            let unsent = unsent.into_iter().map(|frames| {
                frames.into_iter().map(|(hdr, frame)| add(bytes, &hdr, &frame, None)).collect()
            });
            let unsent = unsent.collect();
            let stream = match &state.attach {
                Attach::Stream(stream) => stream.handed(bytes),
                _ => StreamHanded::default(),
            };
            let positions = match &mut state.attach {
                Attach::VhostUser(vhost) => vhost.connection.as_mut(),
                _ => None,
            };
            let positions = positions.map(|c| c.backend_mut().positions()).unwrap_or_default();
            let xdp = match &state.attach {
                Attach::Xdp(xdp) => xdp.handed(),
                _ => Vec::new(),
            };
            let vif = match &state.attach {
                Attach::Xen(port) => xen::positions(buses, port),
                _ => None,
            };
            let flows = put(bytes, &state.port.export_flows(now_s));
            // Last: the above may call a guest, which is counted.
            let ingress = state.ingress.iter().map(|queue| counters(queue.stats.all())).collect();
            let egress = state.port.egress.iter().map(|q| counters(q.stats.all())).collect();
            let name = state.spec.name.clone();
            PortHanded { name, positions, vif, ingress, egress, held, unsent, stream, xdp, flows }
        });
        let ports = ports.collect();
        Handed { stopped_ns, ports, addresses }
    }
}

fn listener_state<'a>(listener: &'a Listener, fds: &mut Exported<'a>) -> ListenerState {
    let fd = export_fd(fds, listener.as_fd());
    ListenerState { fd, path: listener.path().into(), made: listener.made() }
}

fn bare(state: &PortState) -> PortOffer {
    let (name, id) = (state.spec.name.clone(), state.port.id.0);
    PortOffer { name, id, ..PortOffer::default() }
}

/// `parts`: also a connection in the middle of a message, whose rest the next process reads.
pub(super) fn port_offer<'a>(
    state: &'a PortState,
    buses: &'a BTreeMap<Hypervisor, XenBus>,
    fds: &mut Exported<'a>,
    parts: bool,
) -> PortOffer {
    let mut offer =
        PortOffer { faults: state.faults, drain: state.drain() != Drain::Off, ..bare(state) };
    (offer.blocked, offer.failovers) = (state.blocked, state.failovers);
    offer.interface_losses = state.interface_losses;
    if let Some(end) = state.attach.endpoint() {
        offer.listener = end.listener.as_ref().map(|listener| listener_state(listener, fds));
        offer.passt = end.passt.as_ref().map(|process| export_fd(fds, process.as_fd()));
        offer.connections = end.connections;
    }
    if let Some(errors) = state.attach.errors() {
        (offer.errors, offer.last_error) = errors.export();
    }
    match &state.attach {
        Attach::VhostUser(vhost) => {
            let connection = vhost.connection.as_ref();
            let connection = connection.filter(|c| parts || !c.is_within_message());
            offer.connection = connection.map(|connection| connection.export(fds));
        }
        Attach::Stream(stream) => offer.stream = stream.export(fds, parts),
        Attach::Tap(tap) => {
            let queues = tap.fds.iter().map(|fd| export_fd(fds, fd.as_fd()));
            offer.tap = Some((queues.collect(), tap.created));
            offer.wired.clone_from(&state.wired);
        }
        // After a kill nobody knows which chunks are free: they are opened again.
        Attach::Xdp(xdp) => offer.xdp = parts.then(|| xdp.offer(fds)),
        Attach::Xen(port) => offer.xen = xen::offer(buses, port, fds),
        Attach::Missing(_) | Attach::Null => {}
    }
    offer
}

pub(super) fn counters(all: impl Iterator<Item = (&'static str, u64)>) -> Counters {
    all.filter(|(_, value)| *value > 0).map(|(name, value)| (name.into(), value)).collect()
}

type Senders = [(*const switch::stats::IngressStats, (u16, u16))];

fn held_frame(copy: &HeldCopy, senders: &Senders, bytes: &mut Vec<u8>) -> Frame {
    let sender = copy.from.as_ref().map(std::sync::Arc::as_ptr);
    let from = senders.iter().find(|(stats, _)| Some(*stats) == sender).map(|(_, at)| *at);
    add(bytes, &copy.hdr, &copy.bytes, from)
}

/// Appends a frame to `bytes`.
fn add(bytes: &mut Vec<u8>, hdr: &VnetHdr, frame: &[u8], from: Option<(u16, u16)>) -> Frame {
    let (at, len) = put(bytes, frame);
    Frame { hdr: hdr.bytes(), at, len, from }
}
