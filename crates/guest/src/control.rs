//! The control socket of our own guest: returns counters and changes policies at run time.
//!
//! The guest's own thread serves it, between two rounds, when nothing is armed: a policy never
//! changes during a sleep, and no lock is needed. Without `--control` there is no socket.

use std::cell::RefCell;
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use api::file::Invalid;
use api::http::{Incoming, Received, Response, Session};
use api::routes::{Routed, Server as Side, methods, route};
use api::set::{Change, Target, changes};
use api::{PerQueue, Problem, Request};
use os::{Carries, Epoll, Listener, Permissions};
use serde_json::{Map, Value, json};
use switch::poll::Policy;
use switch::time::{Instant, Ns};

use crate::error::Error;
use crate::guest::{Guest, now};
use crate::report::Report;
use crate::settings::policy;

/// Most clients at once; others wait.
const CLIENTS_MAX: usize = 16;
/// Interval at which a guest that never sleeps serves clients.
const SERVE_INTERVAL: Ns = Ns::from_ms(10);
/// Back-off after a failed accept.
const BACK_OFF: Ns = Ns::from_secs(1);
/// Token of the listener.
const LISTENER: u64 = 0;

/// A guest's control socket. Readable when a client needs service.
pub struct Control {
    epoll: Epoll,
    server: RefCell<Server>,
}

struct Server {
    /// The command that owns it: `nic` or `gen`.
    who: &'static str,
    queues: u16,
    started: Instant,
    listener: Listener,
    /// Whether the listener is in the epoll set.
    listens: bool,
    /// End of the listener's back-off.
    listens_at: Instant,
    /// When clients are served next, even if none ended a sleep.
    serves_at: Instant,
    clients: HashMap<u64, Session>,
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
        let listener = Listener::bind(path, Carries::Stream, &Permissions::OWNER);
        let listener = listener.map_err(Error::Control)?;
        let server = Server {
            who,
            queues,
            started: now(),
            listener,
            listens: false,
            listens_at: Instant::START,
            serves_at: Instant::START,
            clients: HashMap::new(),
            next_token: LISTENER + 1,
            poll: PerQueue::default(),
            kick: PerQueue::default(),
        };
        let epoll = Epoll::new()?;
        let control = Self { epoll, server: RefCell::new(server) };
        control.serve(now(), true, None);
        Ok(Some(control))
    }

    /// Serves clients, between two rounds; `ready`: the last sleep found the socket readable.
    pub fn serve(&self, now: Instant, ready: bool, mut guest: Option<&mut Guest>) {
        let mut server = self.server.borrow_mut();
        if !ready && now < server.serves_at {
            return;
        }
        server.serves_at = now + SERVE_INTERVAL;
        server.listen(&self.epoll, now);
        // After an error, the next call finds the same events.
        for ready in self.epoll.wait(Some(Duration::ZERO)).unwrap_or_default() {
            match ready.tag {
                LISTENER => server.accept(&self.epoll, now),
                token => server.serve(&self.epoll, token, guest.as_deref_mut()),
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
    fn listen(&mut self, epoll: &Epoll, now: Instant) {
        let wants = self.clients.len() < CLIENTS_MAX && now >= self.listens_at;
        if wants != self.listens {
            let done = match wants {
                true => epoll.add(self.listener.as_fd(), LISTENER),
                false => epoll.remove(self.listener.as_fd()),
            };
            self.listens = if done.is_ok() { wants } else { self.listens };
        }
    }

    fn accept(&mut self, epoll: &Epoll, now: Instant) {
        let stream = match self.listener.accept() {
            Ok(Some(socket)) => UnixStream::from(socket),
            Ok(None) => return,
            Err(error) => {
                tracing::warn!("{error}");
                self.listens_at = now + BACK_OFF;
                return self.listen(epoll, now);
            }
        };
        let token = self.next_token;
        self.next_token += 1;
        if epoll.add(stream.as_fd(), token).is_ok() {
            self.clients.insert(token, Session::new(stream));
            self.listen(epoll, now);
        }
    }

    /// Replies to one request of a client: frames and other clients are served before its next.
    /// One that does not read its reply is disconnected: frames must not wait.
    fn serve(&mut self, epoll: &Epoll, token: u64, guest: Option<&mut Guest>) {
        let Some(mut client) = self.clients.remove(&token) else { return };
        let response = match client.receive() {
            Received::Request(incoming) => match route(Side::Guest, &incoming) {
                Ok(routed) => Some(self.respond(&routed, guest)),
                Err(problem) => Some(self.refusal(problem, &incoming)),
            },
            // Its reply is written.
            Received::Invalid(_) | Received::Nothing => None,
            Received::Closed => return,
        };
        // Closing the descriptor removes it from the epoll set.
        if response.is_some_and(|response| !client.reply(&response)) || client.unread() > 0 {
            return;
        }
        // What it sent ahead is already received: its socket is reported because it is writable.
        if epoll.change(client.stream().as_fd(), token, true, client.has_more()).is_ok() {
            self.clients.insert(token, client);
        }
    }

    /// The reply to a request that no operation of a guest is for.
    fn refusal(&self, mut problem: Problem, incoming: &Incoming) -> Response {
        if problem.field.as_deref() == Some("path") {
            let (at, who) = (self.listener.path().display(), self.who);
            let remedy = "use stats, or set [QUEUE] poll=POLICY kick=POLICY";
            problem.detail += &format!("; {at} is that of pvswitch {who}: {remedy}");
            problem.remedy = remedy.into();
        }
        let mut response = Response::from(&problem);
        if problem.status == 405
            && let Some(methods) = methods(Side::Guest, &incoming.target)
        {
            response.headers.push(("Allow", methods));
        }
        response
    }

    fn respond(&mut self, routed: &Routed, guest: Option<&mut Guest>) -> Response {
        let result = match &routed.request {
            Request::Stats => Ok(self.stats(guest)),
            Request::Set { settings } => self.set(None, settings, guest),
            Request::SetPair { queue, settings } => self.set(Some(*queue), settings, guest),
            // The table has no other operation of guests.
            _ => Ok(api::openapi::document(Side::Guest)),
        };
        match result {
            Ok(value) => routed.operation.respond(&value),
            Err(problem) => Response::from(&problem),
        }
    }

    fn stats(&self, guest: Option<&mut Guest>) -> Value {
        let uptime = now() - self.started;
        let connected = guest.is_some();
        let counted = guest.map(|guest| Report::new(guest, uptime.into()).json());
        let mut value = counted.unwrap_or_else(|| json!({ "queues": [] }));
        value["guest"] = self.who.into();
        value["connected"] = connected.into();
        value["uptime_ns"] = uptime.get().into();
        value
    }

    /// Changes policies: all of them, or none if one is invalid.
    fn set(
        &mut self,
        queue: Option<u16>,
        settings: &Map<String, Value>,
        guest: Option<&mut Guest>,
    ) -> Result<Value, Problem> {
        let last = self.queues - 1;
        if let Some(queue) = queue.filter(|queue| *queue > last) {
            let detail = match last {
                0 => format!("'{queue}': there is one queue pair, number 0"),
                _ => format!("'{queue}': name a queue pair, 0 to {last}, or none for all of them"),
            };
            return Err(Problem::new(404, detail, format!("use 0 to {last}")).at("path.queue"));
        }
        let queue = queue.map(usize::from);
        let (mut poll, mut kick) = (None, None);
        let invalid = |Invalid { key, what }: Invalid| {
            let at = key.map_or_else(|| "body".into(), |key| format!("body.{key}"));
            Problem::new(422, what, "use a policy listed in docs/settings.md").at(at)
        };
        for Change { entry, value } in changes(Target::Driver, settings).map_err(invalid)? {
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
        Ok(Value::Null)
    }
}
