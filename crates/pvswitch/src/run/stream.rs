//! Ports of peers with a socket: a stream in QEMU's framing, or a frame a datagram
//! ([0034](../../../../docs/design/0034-stream-ports.md)).

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use shm::sync::Mutex;
use switch::account::Charge;
use switch::fdb::PortId;
use switch::forward::{EgressQueue, Port, Source};
use switch::pair::Pair;
use switch::port::Ingress;
use switch::schedule::token;
use switch::stats::IngressStats;
use uplink::{DgramEgress, DgramIngress, End, Socket, StreamEgress, StreamIngress};
use vhost_user::backend::{Descriptors, Exported, export_fd};
use vhost_user::foreign::{self, ForeignFd};

use super::endpoint::Endpoint;
use super::handover::{Place, part, put};
use super::reload::{Leaving, Prepared};
use super::{Attach, PortState, RunError, System, passt};
use crate::spec::{Kind, PortSpec};
use crate::worker::Served;

pub(super) struct StreamPort {
    queues: Queues,
    pub(super) end: Endpoint,
    pub(super) connection: Option<Arc<ForeignFd>>,
}

/// Its queues, by type of socket.
enum Queues {
    Stream(Pair<StreamIngress, StreamEgress>),
    Dgram(Pair<DgramIngress, DgramEgress>),
}

impl Queues {
    fn egress(&self) -> EgressQueue {
        match self {
            Self::Stream(pair) => pair.egress_queue(),
            Self::Dgram(pair) => pair.egress_queue(),
        }
    }

    fn ingress(&self) -> (Arc<Mutex<dyn Ingress>>, &Arc<IngressStats>) {
        match self {
            Self::Stream(pair) => (pair.ingress.clone(), &pair.ingress_stats),
            Self::Dgram(pair) => (pair.ingress.clone(), &pair.ingress_stats),
        }
    }

    /// Stops them; returns why the connection ended, if it did by itself.
    fn disconnect(&self) -> Option<End> {
        match self {
            Self::Stream(pair) => {
                pair.egress.lock().disconnect();
                pair.ingress.lock().disconnect()
            }
            Self::Dgram(pair) => {
                pair.egress.lock().disconnect();
                pair.ingress.lock().disconnect()
            }
        }
    }
}

/// Bytes of a connection that this process has, and its peer or its frames' receivers have not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StreamHanded {
    /// Places of bytes read and not forwarded, and of bytes not sent yet, among those after the
    /// message.
    pub(super) unread: Place,
    pub(super) unsent: Place,
    /// Whether the connection has ended in a way that the next process cannot notice.
    pub(super) ended: bool,
}

impl StreamPort {
    /// The connection for another process; none if that will not have the bytes that this one has
    /// (`parts`): after a kill its peer must connect again.
    pub(super) fn export<'a>(&'a self, fds: &mut Exported<'a>, parts: bool) -> Option<u32> {
        let connection = self.connection.as_ref().filter(|_| parts)?;
        Some(export_fd(fds, connection.as_fd()))
    }

    /// The rest of a connection's state; its bytes are added to `bytes`. Workers are frozen.
    pub(super) fn handed(&self, bytes: &mut Vec<u8>) -> StreamHanded {
        let pair = match &self.queues {
            Queues::Stream(pair) => pair,
            Queues::Dgram(pair) => {
                let unsent = put(bytes, &pair.egress.lock().unsent());
                return StreamHanded { unsent, ..StreamHanded::default() };
            }
        };
        let ingress = pair.ingress.lock();
        let unread = put(bytes, ingress.unsent());
        let unsent = put(bytes, pair.egress.lock().unsent());
        StreamHanded { unread, unsent, ended: ingress.has_ended() }
    }

    /// Datagrams that were read and not forwarded.
    pub(super) fn unsent(&self) -> Vec<Vec<u8>> {
        match &self.queues {
            Queues::Dgram(pair) => pair.ingress.lock().unsent(),
            Queues::Stream(_) => Vec::new(),
        }
    }

    /// Takes over such datagrams of another process.
    pub(super) fn restore_unsent(&self, frames: &[Vec<u8>]) {
        if let Queues::Dgram(pair) = &self.queues {
            pair.ingress.lock().restore_unsent(frames);
        }
    }
}

impl System {
    pub(super) fn add_stream(
        &mut self,
        spec: &PortSpec,
        id: PortId,
        leaving: &Leaving,
    ) -> Result<Prepared, RunError> {
        let queues = match spec.kind {
            Kind::Dgram(_) => Queues::Dgram(Pair::new()),
            _ => Queues::Stream(Pair::new()),
        };
        let port = Arc::new(self.make_port(id, &spec.name, vec![queues.egress()]));
        let end = self.make_endpoint(spec, &port.account, leaving)?;
        let ingress = vec![self.ingress(spec, 0, queues.ingress().1)];
        let attach = Attach::Stream(Box::new(StreamPort { queues, end, connection: None }));
        Ok(Prepared::new(PortState::new(spec, port, ingress, attach)))
    }

    fn stream(&mut self, name: &str) -> Option<(&Arc<Port>, &mut StreamPort)> {
        let PortState { port, attach, .. } = self.ports.get_mut(name)?;
        match attach {
            Attach::Stream(stream) => Some((port, stream)),
            _ => None,
        }
    }

    /// Starts a connection of a port.
    pub(super) fn attach_stream(&mut self, name: &str, socket: OwnedFd, charge: Option<Charge>) {
        let Some((port, stream)) = self.stream(name) else { return };
        let socket = ForeignFd::charged(socket, charge, &port.account);
        stream.connection = Some(Arc::new(socket));
        if let Err(error) = self.start_stream(name, &[], &[]) {
            tracing::error!(port = name, "cannot use its connection: {error}");
            return self.disconnect_stream(name, &error);
        }
        let Some((_, stream)) = self.stream(name) else { return };
        stream.end.log.info(format_args!("peer connected"));
        stream.end.begin();
        self.touch(name);
    }

    /// Has workers serve a port's connection. `unread` and `unsent` are bytes of the previous
    /// process.
    fn start_stream(&mut self, name: &str, unread: &[u8], unsent: &[u8]) -> Result<(), String> {
        let pool = Arc::clone(&self.pool);
        let Some(PortState { port, attach: Attach::Stream(stream), ingress, .. }) =
            self.ports.get_mut(name)
        else {
            return Ok(());
        };
        let Some(socket) = stream.connection.clone() else { return Ok(()) };
        let mut kick = Arc::clone(&socket) as Socket;
        let room = match &stream.queues {
            Queues::Stream(pair) => {
                // They have no use here, and would count against the limit of the process.
                os::refuse_descriptors(kick.as_fd());
                let read = pair.ingress.lock().connect(Arc::clone(&kick), unread);
                read.map_err(|fault| fault.to_string())?;
                pair.egress.lock().connect(socket, unsent)
            }
            Queues::Dgram(pair) => {
                // It reads what is sent to its own name.
                let own = stream.end.listener.as_ref().map(|own| own.as_fd().try_clone_to_owned());
                let own = own.ok_or("it has no name")?.map_err(|error| error.to_string())?;
                os::refuse_descriptors(own.as_fd());
                kick = Arc::new(ForeignFd::charged(own, None, &port.account));
                pair.ingress.lock().connect(Arc::clone(&kick));
                pair.egress.lock().connect(socket, unsent)
            }
        };
        let room = room.map_err(|error| error.to_string())?;
        port.set_active(1);
        let (queue, stats) = stream.queues.ingress();
        let source = Source::new(port.id, 0, Arc::clone(stats), Arc::clone(&ingress[0].tuning));
        let of = |egress| token(port.id, 0, egress);
        let kick = Some(kick);
        pool.serve(Served { token: of(false), source, ingress: queue, kick, notifies: true });
        pool.watch(of(true), Arc::clone(port), 0, Some(room));
        let id = port.id;
        self.follow(id);
        Ok(())
    }

    /// Ends a connection after a report of its ingress queue.
    pub(super) fn end_stream(&mut self, name: &str, why: &str) {
        let Some(PortState { port, attach: Attach::Stream(stream), faults, .. }) =
            self.ports.get_mut(name)
        else {
            return;
        };
        let end = stream.queues.disconnect();
        let cause = end.as_ref().and_then(End::cause);
        if let Some(cause) = cause {
            stream.end.errors.count(cause, why.into());
            *faults += 1;
        }
        if let Some(End::Descriptors(fds)) = end {
            foreign::close(fds, &port.account);
        }
        if cause.is_some() {
            let (port, cause) = (name.into(), why.into());
            self.publish(api::event::Event::Fault { port, cause });
        }
        self.end_connection(name, why, cause.is_some());
    }

    /// Ends a port's connection, if there is one; in client mode a retry is scheduled.
    pub(super) fn disconnect_stream(&mut self, name: &str, why: &str) {
        self.end_connection(name, why, false);
    }

    fn end_connection(&mut self, name: &str, why: &str, is_fault: bool) {
        let pool = Arc::clone(&self.pool);
        let Some((port, stream)) = self.stream(name) else { return };
        let Some(connection) = stream.connection.take() else { return };
        stream.end.end();
        let status = passt::end(&mut stream.end.passt);
        let status = status.map_or_else(String::new, |status| format!("; passt: {status}"));
        let line = format!("peer disconnected: {why}{status}");
        if is_fault {
            stream.end.log.warn(format_args!("{line}"));
        } else {
            stream.end.log.info(format_args!("{line}"));
        }
        port.set_active(0);
        port.end_epoch();
        let id = port.id;
        [false, true].into_iter().for_each(|egress| pool.drop_queue(token(id, 0, egress)));
        stream.queues.disconnect();
        // It is closed later, and not here: what its peer sent may block that.
        os::shutdown(connection.as_fd());
        self.touch(name);
        // The next peer has another address.
        self.fdb.flush_learned(id);
    }

    // ---- from another process ----

    /// Takes over the connection of a port.
    pub(super) fn import_stream(
        &mut self,
        name: &str,
        socket: u32,
        fds: &mut Descriptors,
    ) -> Result<(), String> {
        let Some((port, stream)) = self.stream(name) else {
            return Err("it has no stream socket".into());
        };
        let socket = fds.take(socket).map_err(|error| error.to_string())?;
        let charge = port.account.descriptors.charge(1).ok();
        stream.connection = Some(Arc::new(ForeignFd::charged(socket, charge, &port.account)));
        stream.end.resume();
        Ok(())
    }

    /// Continues where the other process stopped. Workers are frozen.
    pub(super) fn resume_stream(&mut self, name: &str, handed: &StreamHanded, bytes: &[u8]) {
        let resumed = match (part(handed.unread, bytes), part(handed.unsent, bytes)) {
            _ if handed.ended => Err("it had ended".into()),
            (Some(unread), Some(unsent)) => self.start_stream(name, unread, unsent),
            _ => Err("the other process handed over too few bytes".into()),
        };
        if let Err(why) = resumed {
            self.disconnect_stream(name, &why);
        }
    }
}
