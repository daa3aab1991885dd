//! Connections to the control socket ([0025](../../../../docs/design/0025-http-api.md)).
//!
//! The control thread serves them between other events and never waits for one: each holds at most
//! one request and one reply, for a bounded time, and all replies together a bounded memory.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use api::event::{STREAMS_MAX, Waiting};
use api::http::{Incoming, Received, Response, Session};
use api::routes::{Routed, Server, methods, route};
use api::{Problem, Request};
use serde_json::{Value, json};

use super::why::Why;
use super::{Event, System};
use crate::capture;

/// Maximum number of clients; a further one replaces one of the user with the most.
const CLIENTS_MAX: usize = 64;
/// Maximum time for a client to send a request, to read a reply, or to close.
const CLIENT_TIME: Duration = Duration::from_secs(10);
/// Most bytes of replies that wait for all clients together. Beyond, the slowest is disconnected.
const UNREAD_MAX: usize = 32 << 20;

/// A client of the control socket.
pub(super) struct Client {
    session: Session,
    /// Its process, when it connected.
    peer: os::Peer,
    /// Since when it has been waited for, or idle.
    since: Instant,
    /// It receives events.
    events: Option<Waiting>,
    /// It waits for the reply to its request.
    why: Option<Why>,
    /// Its next request is received when it has read its last reply.
    is_behind: bool,
}

/// All clients, and what was refused.
#[derive(Default)]
pub(super) struct Clients {
    all: HashMap<u64, Client>,
    requests: u64,
    refused: BTreeMap<u16, u64>,
    closed_slow: u64,
    closed_for_others: u64,
    pub(super) events: u64,
    pub(super) events_lost: u64,
}

impl Client {
    /// When it is disconnected unless it sends, reads or closes.
    fn ends(&self) -> Option<Instant> {
        let waits = self.is_behind || self.session.is_waiting();
        let waits = waits && self.events.is_none() && self.why.is_none();
        waits.then(|| self.since + CLIENT_TIME)
    }
}

impl Clients {
    /// Counters for `ctl show`.
    pub(super) fn show(&self) -> Value {
        let refused = self.refused.iter().map(|(status, n)| (status.to_string(), *n));
        json!({
            "connections": self.all.len(),
            "streams": self.streams(),
            "requests": self.requests,
            "refused": refused.collect::<BTreeMap<_, _>>(),
            "closed_slow": self.closed_slow,
            "closed_for_others": self.closed_for_others,
            "events": self.events,
            "events_lost": self.events_lost,
        })
    }

    /// Number of clients that receive events.
    pub(super) fn streams(&self) -> usize {
        self.all.values().filter(|client| client.events.is_some()).count()
    }

    /// Number of clients that wait for the reply to their request.
    pub(super) fn whys(&self) -> usize {
        self.all.values().filter(|client| client.why.is_some()).count()
    }

    /// A client whose reply is due, and its request.
    pub(super) fn take_why(&mut self, now: Instant) -> Option<(u64, Why)> {
        let mut all = self.all.iter_mut();
        all.find_map(|(token, client)| Some((*token, client.why.take_if(|why| why.at <= now)?)))
    }

    /// Time at which the next one is disconnected, or replied to.
    pub(super) fn due(&self) -> Option<Instant> {
        let whys = self.all.values().filter_map(|client| client.why.as_ref()).map(|why| why.at);
        self.all.values().filter_map(Client::ends).chain(whys).min()
    }

    /// The client to close for another one: of the user with the most clients, the one that has
    /// been idle or waited for longest.
    fn least(&self) -> Option<u64> {
        let mut users = HashMap::<u32, usize>::new();
        self.all.values().for_each(|client| *users.entry(client.peer.uid).or_default() += 1);
        let rank = |client: &Client| {
            let of_user = users.get(&client.peer.uid).copied().unwrap_or(0);
            (usize::MAX - of_user, client.events.is_some(), client.since)
        };
        self.all.iter().min_by_key(|(_, client)| rank(client)).map(|(token, _)| *token)
    }

    /// The client with the most unread bytes, if all have too many.
    fn over_budget(&self) -> Option<u64> {
        let unread = |client: &Client| client.session.unread();
        let all: usize = self.all.values().map(unread).sum();
        let most = self.all.iter().max_by_key(|(_, client)| unread(client));
        most.filter(|_| all > UNREAD_MAX).map(|(token, _)| *token)
    }

    pub(super) fn count_refusal(&mut self, problem: &Problem) {
        *self.refused.entry(problem.status).or_default() += 1;
    }
}

impl System {
    pub(super) fn accept_client(&mut self) {
        let Some(listener) = &self.control else { return };
        let stream = match listener.accept() {
            Ok(Some(socket)) => UnixStream::from(socket),
            Ok(None) => return,
            Err(error) => {
                tracing::warn!("{error}");
                return self.suspend(Event::ControlListener);
            }
        };
        // Without credentials nothing is permitted.
        let Ok(peer) = os::peer(stream.as_fd()) else { return };
        if self.clients.all.len() >= CLIENTS_MAX
            && let Some(token) = self.clients.least()
        {
            self.clients.closed_for_others += 1;
            self.drop_client(token);
        }
        if let Ok(token) = self.watch(stream.as_fd(), Event::Client) {
            let (session, since) = (Session::new(stream), Instant::now());
            let client = Client { session, peer, since, events: None, why: None, is_behind: false };
            self.clients.all.insert(token, client);
        }
    }

    fn drop_client(&mut self, token: u64) {
        if let Some(client) = self.clients.all.remove(&token) {
            self.close_client(token, &client);
        }
    }

    fn close_client(&mut self, token: u64, client: &Client) {
        let _ = self.epoll.remove(client.session.as_fd());
        self.tokens.remove(&token);
    }

    /// Disconnects clients that do not send the rest of a request, or do not read their replies.
    pub(super) fn drop_slow_clients(&mut self) {
        let now = Instant::now();
        let late = self.clients.all.iter().filter(|(_, c)| c.ends().is_some_and(|end| end <= now));
        for token in late.map(|(token, _)| *token).collect::<Vec<_>>() {
            let Some(mut client) = self.clients.all.remove(&token) else { continue };
            if client.session.is_partial() && !client.is_behind {
                let what = format!("the request was incomplete after {CLIENT_TIME:?}");
                let problem = Problem::new(408, what, "send the whole request at once");
                self.clients.count_refusal(&problem);
                client.session.end(&Response::from(&problem));
            }
            self.clients.closed_slow += 1;
            self.close_client(token, &client);
        }
    }

    /// Reads the data of a client and replies to its requests.
    pub(super) fn serve_client(&mut self, token: u64) {
        let Some(mut client) = self.clients.all.remove(&token) else { return };
        let keep = if client.why.is_some() {
            // Only its end is reported while it waits.
            false
        } else if client.events.is_some() {
            self.serve_stream(&mut client)
        } else if client.session.unread() > 0 {
            client.session.flush()
        } else if !client.session.is_ending() && !os::is_read(client.session.as_fd()) {
            // Its requests cost others nothing while it does not read what it gets for them.
            if self.await_read(&mut client, token) {
                self.clients.all.insert(token, client);
            } else {
                self.close_client(token, &client);
            }
            return;
        } else {
            self.serve_next(&mut client)
        };
        client.is_behind = false;
        // What it sends while it waits is read after the reply.
        let waits = client.why.is_some();
        let writes = !waits && (client.session.unread() > 0 || client.session.has_more());
        let reads = !waits && (client.session.unread() == 0 || client.events.is_some());
        if keep && self.epoll.change(client.session.as_fd(), token, reads, writes).is_ok() {
            self.clients.all.insert(token, client);
        } else {
            self.close_client(token, &client);
        }
        while let Some(token) = self.clients.over_budget() {
            self.clients.closed_slow += 1;
            self.drop_client(token);
        }
    }

    /// Replies to the request that a client waits for.
    pub(super) fn reply_later(&mut self, token: u64, response: &Response) {
        let Some(client) = self.clients.all.get_mut(&token) else { return };
        client.since = Instant::now();
        match client.session.reply(response) {
            true => self.serve_client(token),
            false => self.drop_client(token),
        }
    }

    /// Waits until a client has read its last reply. Returns whether the client stays.
    fn await_read(&self, client: &mut Client, token: u64) -> bool {
        // It may have read before this: that is why its socket is reported once in any case.
        let was_behind = std::mem::replace(&mut client.is_behind, true);
        was_behind || self.epoll.change_to_reads(client.session.as_fd(), token).is_ok()
    }

    /// Runs one request, if there is one: other clients are served before the next. Returns whether
    /// the client stays.
    fn serve_next(&mut self, client: &mut Client) -> bool {
        let was_waiting = client.session.is_waiting();
        match client.session.receive() {
            Received::Request(incoming) => {
                client.since = Instant::now();
                self.clients.requests += 1;
                self.serve_request(client, &incoming)
            }
            Received::Invalid(problem) => {
                client.since = Instant::now();
                self.clients.requests += 1;
                self.clients.count_refusal(&problem);
                true
            }
            Received::Nothing => {
                // The time of a request begins with its first byte.
                if !was_waiting {
                    client.since = Instant::now();
                }
                true
            }
            Received::Closed => false,
        }
    }

    /// Runs one request. Returns whether the client stays.
    fn serve_request(&mut self, client: &mut Client, incoming: &Incoming) -> bool {
        let routed = route(Server::Switch, incoming).and_then(|routed| {
            self.rights.check(&client.peer, &routed)?;
            Ok(routed)
        });
        let result = match &routed {
            Err(problem) => Err(problem.clone()),
            Ok(Routed { request: Request::Capture { name }, .. }) if incoming.method == "GET" => {
                match self.capture(name, client) {
                    // Another thread has the connection.
                    Ok(()) => return false,
                    Err(problem) => Err(problem),
                }
            }
            Ok(Routed { request: Request::Events, operation }) if incoming.method == "GET" => {
                match self.subscribe() {
                    Ok(()) => {
                        // What happened before is not for this client.
                        self.publish_changes();
                        self.watch_ports();
                        client.events = Some(Waiting::default());
                        return client.session.reply(&operation.respond(&Value::Null));
                    }
                    Err(problem) => Err(problem),
                }
            }
            Ok(Routed { request: Request::Why { name, seconds }, .. }) => {
                match self.begin_why(name, *seconds) {
                    Ok(why) => {
                        client.why = Some(why);
                        return true;
                    }
                    Err(problem) => Err(problem),
                }
            }
            // HEAD of a stream.
            Ok(Routed { request: Request::Capture { .. } | Request::Events, operation }) => {
                return client.session.reply(&operation.respond(&Value::Null));
            }
            Ok(routed) => {
                let result = self.respond(&routed.request);
                // Before the next request, which may undo it.
                self.publish_changes();
                result
            }
        };
        let response = match (&result, &routed) {
            (Ok(value), Ok(routed)) => routed.operation.respond(value),
            (Ok(_), Err(problem)) | (Err(problem), _) => self.refusal(problem, incoming),
        };
        let stays = client.session.reply(&response);
        self.end_reply();
        stays
    }

    fn refusal(&mut self, problem: &Problem, incoming: &Incoming) -> Response {
        self.clients.count_refusal(problem);
        let mut response = Response::from(problem);
        if problem.status == 405
            && let Some(methods) = methods(Server::Switch, &incoming.target)
        {
            response.headers.push(("Allow", methods));
        }
        response
    }

    /// Hands the connection over to a capture thread; it is no longer a client.
    fn capture(&self, name: &str, client: &Client) -> Result<(), Problem> {
        let state = self.port(name).map_err(|error| error.problem())?;
        if state.port.mirror.is_on() {
            let what = format!("port '{name}' is already being captured");
            let problem = Problem::new(409, what, "end the other capture first");
            return Err(problem.at("path.name").of(name));
        }
        let stream = client.session.stream().try_clone();
        let started =
            stream.and_then(|stream| capture::start(Arc::clone(&state.port), stream, self.clock()));
        started.map_err(|error| super::os("cannot capture")(error).problem())
    }

    /// Checks that there is room for another stream of events.
    fn subscribe(&self) -> Result<(), Problem> {
        if self.clients.streams() < STREAMS_MAX {
            return Ok(());
        }
        let what = format!("{STREAMS_MAX} clients receive events already, the maximum");
        Err(Problem::new(503, what, "close another stream first"))
    }

    /// Writes what waits for a client that receives events. Returns whether it stays.
    fn serve_stream(&mut self, client: &mut Client) -> bool {
        let Some(waiting) = &mut client.events else { return false };
        // What it sends is ignored; its end is not.
        if !client.session.is_open() || !client.session.flush() {
            return false;
        }
        let report = waiting.report(client.session.unread(), super::events::time_ms());
        client.session.write(report.as_bytes());
        client.session.flush()
    }

    /// Sends an event to each client that receives them.
    pub(super) fn send_event(&mut self, event: &api::event::Event, seq: u64, time_ms: u64) {
        if self.clients.streams() == 0 {
            return;
        }
        let text = event.text(seq, time_ms);
        let tokens: Vec<_> = self.clients.all.keys().copied().collect();
        for token in tokens {
            let Some(client) = self.clients.all.get_mut(&token) else { continue };
            let Some(waiting) = &mut client.events else { continue };
            let next = waiting.add(client.session.unread(), &text, seq, time_ms);
            match next.ends_with(&text) {
                true => self.clients.events += 1,
                false => self.clients.events_lost += 1,
            }
            client.session.write(next.as_bytes());
            let writes = client.session.flush();
            let unread = client.session.unread() > 0;
            if !writes || self.epoll.change(client.session.as_fd(), token, true, unread).is_err() {
                self.drop_client(token);
            }
        }
    }
}
