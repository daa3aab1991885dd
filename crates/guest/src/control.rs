//! The control socket of our own guest: returns counters and changes policies at run time.
//!
//! The guest's own thread serves it, between two rounds, when nothing is armed: a policy never
//! changes during a sleep, and no lock is needed. Without `--control` there is no socket.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io::BufReader;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use api::PerQueue;
use api::control::{MALFORMED, REQUEST_MAX, Received, Request, failure, receive, reply, write};
use api::set::{Change, Target, changes};
use os::{Carries, Listener};
use rustix::event::{Timespec, epoll};
use serde_json::{Value, json};
use switch::poll::Policy;

use crate::error::Error;
use crate::guest::{Guest, now_ns};
use crate::report::Report;
use crate::settings::policy;

/// Most clients at once; others wait.
const CLIENTS_MAX: usize = 16;
/// Interval at which a guest that never sleeps serves clients, in ns.
const SERVE_EVERY_NS: u64 = 10_000_000;
/// Back-off after a failed accept, in ns.
const BACK_OFF_NS: u64 = 1_000_000_000;
/// Token of the listener.
const LISTENER: u64 = 0;

/// A guest's control socket. Readable when a client needs service.
pub struct Control {
    epoll: OwnedFd,
    server: RefCell<Server>,
}

struct Server {
    /// The command that owns it: `nic` or `gen`.
    who: &'static str,
    queues: u16,
    started_ns: u64,
    listener: Listener,
    /// Whether the listener is in the epoll set.
    listens: bool,
    /// End of the listener's back-off.
    listens_at: u64,
    /// When clients are served next, even if none ended a sleep.
    serves_at: u64,
    clients: HashMap<u64, BufReader<UnixStream>>,
    next_token: u64,
    /// Policies changed so far; they are applied after a reconnect.
    poll: PerQueue<Policy>,
    kick: PerQueue<Policy>,
}

impl Control {
    /// Listens at `path`, if given, for a guest with this number of queue pairs.
    pub fn listen(
        path: Option<&Path>,
        who: &'static str,
        queues: u16,
    ) -> Result<Option<Self>, Error> {
        let Some(path) = path else { return Ok(None) };
        let listener = Listener::bind_private(path, Carries::Stream).map_err(Error::Control)?;
        let server = Server {
            who,
            queues,
            started_ns: now_ns(),
            listener,
            listens: false,
            listens_at: 0,
            serves_at: 0,
            clients: HashMap::new(),
            next_token: LISTENER + 1,
            poll: PerQueue::default(),
            kick: PerQueue::default(),
        };
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(std::io::Error::from)?;
        let control = Self { epoll, server: RefCell::new(server) };
        control.serve(now_ns(), true, None);
        Ok(Some(control))
    }

    /// Serves clients, between two rounds; `ready`: the last sleep found the socket readable.
    pub fn serve(&self, now: u64, ready: bool, mut guest: Option<&mut Guest>) {
        let mut server = self.server.borrow_mut();
        if !ready && now < server.serves_at {
            return;
        }
        server.serves_at = now + SERVE_EVERY_NS;
        server.listen(&self.epoll, now);
        let mut events = Vec::with_capacity(CLIENTS_MAX + 1);
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let buffer = rustix::buffer::spare_capacity(&mut events);
        // If interrupted, the next call finds the same events.
        let _ = epoll::wait(&self.epoll, buffer, Some(&at_once));
        for event in &events {
            let event: &epoll::Event = event;
            match event.data.u64() {
                LISTENER => server.accept(&self.epoll, now),
                token => server.serve(token, guest.as_deref_mut()),
            }
        }
    }

    /// Applies earlier policy changes to a newly connected guest.
    pub fn apply(&self, guest: &mut Guest) {
        let server = self.server.borrow();
        for (queue, poll) in each(&server.poll) {
            guest.set_policies(queue, Some(poll), None);
        }
        for (queue, kick) in each(&server.kick) {
            guest.set_policies(queue, None, Some(kick));
        }
    }
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

/// The policy of all queue pairs, then those of single ones.
fn each(policies: &PerQueue<Policy>) -> impl Iterator<Item = (Option<usize>, Policy)> + '_ {
    let all = policies.all().map(|policy| (None, policy));
    all.into_iter().chain(policies.ones().map(|(queue, policy)| (Some(queue), policy)))
}

impl Server {
    /// Adds the listener to the epoll set while there is room for clients, else removes it.
    fn listen(&mut self, epoll: &OwnedFd, now: u64) {
        let wants = self.clients.len() < CLIENTS_MAX && now >= self.listens_at;
        if wants != self.listens {
            let data = epoll::EventData::new_u64(LISTENER);
            let done = match wants {
                true => epoll::add(epoll, &self.listener, data, epoll::EventFlags::IN),
                false => epoll::delete(epoll, &self.listener),
            };
            self.listens = if done.is_ok() { wants } else { self.listens };
        }
    }

    fn accept(&mut self, epoll: &OwnedFd, now: u64) {
        let stream = match self.listener.accept() {
            Ok(Some(socket)) => UnixStream::from(socket),
            Ok(None) => return,
            Err(error) => {
                tracing::warn!("{error}");
                self.listens_at = now + BACK_OFF_NS;
                return self.listen(epoll, now);
            }
        };
        let token = self.next_token;
        self.next_token += 1;
        let data = epoll::EventData::new_u64(token);
        if epoll::add(epoll, &stream, data, epoll::EventFlags::IN).is_ok() {
            self.clients.insert(token, BufReader::with_capacity(REQUEST_MAX, stream));
            self.listen(epoll, now);
        }
    }

    /// Serves a client. One that does not read its reply is disconnected: frames must not wait.
    fn serve(&mut self, token: u64, mut guest: Option<&mut Guest>) {
        let Some(mut client) = self.clients.remove(&token) else { return };
        loop {
            let (answer, continues) = match receive(&mut client) {
                Received::Request(request) => {
                    (reply(self.respond(&request, guest.as_deref_mut())), true)
                }
                Received::Unknown(why) => (failure(&why), true),
                Received::Malformed => (failure(MALFORMED), false),
                Received::Nothing => break,
                Received::Closed => return,
            };
            if write(client.get_ref(), &answer).is_err() || !continues {
                // Closing the descriptor removes it from the epoll set.
                return;
            }
            if client.buffer().is_empty() {
                break;
            }
        }
        self.clients.insert(token, client);
    }

    fn respond(&mut self, request: &Request, guest: Option<&mut Guest>) -> Result<Value, String> {
        match request {
            Request::Stats => Ok(self.stats(guest)),
            Request::Set { target, settings } => self.set(target.as_deref(), settings, guest),
            other => {
                let (what, at) = (other.name(), self.listener.path().display());
                Err(format!(
                    "'{what}' is for a switch, and {at} is the socket of a guest (pvswitch {}): \
                     ask it for stats, or set [QUEUE] poll=POLICY kick=POLICY",
                    self.who
                ))
            }
        }
    }

    fn stats(&self, guest: Option<&mut Guest>) -> Value {
        let uptime_ns = now_ns() - self.started_ns;
        let connected = guest.is_some();
        let counted = guest.map(|guest| Report::new(guest, Duration::from_nanos(uptime_ns)).json());
        let mut value = counted.unwrap_or_else(|| json!({ "queues": [] }));
        value["guest"] = self.who.into();
        value["connected"] = connected.into();
        value["uptime_ns"] = uptime_ns.into();
        value
    }

    /// Changes policies: all of them, or none if one is invalid.
    fn set(
        &mut self,
        target: Option<&str>,
        settings: &[String],
        guest: Option<&mut Guest>,
    ) -> Result<Value, String> {
        let number = |queue: &str| {
            let last = self.queues - 1;
            let number = queue.parse().ok().filter(|n| *n <= usize::from(last));
            number.ok_or_else(|| match last {
                0 => format!("'{queue}': there is one queue pair, number 0"),
                _ => format!("'{queue}': name a queue pair, 0 to {last}, or none for all of them"),
            })
        };
        let queue = target.map(number).transpose()?;
        let (mut poll, mut kick) = (None, None);
        for Change { entry, value } in changes(Target::Driver, settings)? {
            let to = if entry.name == "poll" { &mut poll } else { &mut kick };
            *to = value.text().map(policy);
        }
        for (kept, new) in [(&mut self.poll, poll), (&mut self.kick, kick)] {
            match (queue, new) {
                (Some(queue), Some(new)) => kept.set_one(queue, new),
                (None, Some(new)) => *kept = PerQueue::from(new),
                (_, None) => {}
            }
        }
        if let Some(guest) = guest {
            guest.set_policies(queue, poll, kick);
        }
        Ok(json!({}))
    }
}
