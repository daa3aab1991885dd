//! Peers that misbehave: one [`Case`] for each way to do so, and what plays it.
//!
//! ```text
//!   cases() ──▶ Case ── play ──▶ virtio::wire::Raw   a front-end that says whatever a case wants
//!                            └─▶ xen::guest::Guest   a domain of Xen's that does
//! ```
//! A case is only the attacker: it connects, misbehaves until its time is over, and counts what it
//! did ([`Tally`]). That the switch ends its connection is an expected outcome and no error. What
//! an attack costs others is measured by the lab's study `hostile`.
//!
//! Each case names its [`source`](Case::source): a way in that was seen, or the advisory of the
//! implementation that had it. [`NOT_A_PEERS`] lists the advisories that no peer of a switch can
//! cause, and why.
#![forbid(unsafe_code)]

mod table;
mod virtio;
mod xen;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

pub use self::table::{NOT_A_PEERS, cases};

/// What an attacker misbehaves on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ring {
    /// Split virtqueues.
    Split,
    /// Packed virtqueues.
    Packed,
    /// The vhost-user socket: messages, memory and descriptors.
    Socket,
    /// Xen's rings, and xenstore.
    Xen,
}

impl Ring {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Split, Self::Packed, Self::Socket, Self::Xen];

    /// As the command line and results have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Split => "split",
            Self::Packed => "packed",
            Self::Socket => "socket",
            Self::Xen => "xen",
        }
    }
}

impl fmt::Display for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Ring {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|ring| ring.name() == s);
        found.ok_or_else(|| format!("{s}: no such ring; there are split, packed, socket and xen"))
    }
}

/// Who can do it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// The driver in a guest alone, behind any front-end.
    Guest,
    /// A front-end process, or whoever may connect to its socket.
    FrontEnd,
    /// A domain of Xen's.
    Domain,
}

impl Who {
    /// As results have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Guest => "guest",
            Self::FrontEnd => "front-end",
            Self::Domain => "domain",
        }
    }
}

/// One way to misbehave.
pub struct Case {
    /// Its name: lower case, words joined by `-`.
    pub name: &'static str,
    /// Who can do it.
    pub who: Who,
    /// What is done, in one line.
    pub what: &'static str,
    /// Where it comes from: advisories, and rows of the issue that asked for the suite.
    pub source: &'static [&'static str],
    /// What it applies to.
    pub rings: &'static [Ring],
    /// Ports that it takes part with, at most; it does with fewer.
    pub ports: u16,
    /// It is about frames that the attacker is to receive: others have to send it some.
    pub receives: bool,
    play: fn(&mut Attack<'_>) -> Result<(), Error>,
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// Why an attacker could not even begin.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The switch did not take a connection, or let none get as far as the case needs.
    #[error("{0}: the switch takes no connection there, or none gets as far as this case needs")]
    NoConnection(PathBuf),
    /// The system refused.
    #[error("the system refused: {0}")]
    Os(#[from] std::io::Error),
}

impl From<rustix::io::Errno> for Error {
    fn from(error: rustix::io::Errno) -> Self {
        Self::Os(error.into())
    }
}

/// What an attacker did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Times it misbehaved: a message, a chain, a round of a flood.
    pub attempts: u64,
    /// Connections it made.
    pub connections: u64,
    /// Connections that the switch ended.
    pub ended: u64,
    /// Requests that the switch refused.
    pub refused: u64,
    /// Connections that got no further than the switch wanted.
    pub turned_away: u64,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, more: Self) {
        self.attempts += more.attempts;
        self.connections += more.connections;
        self.ended += more.ended;
        self.refused += more.refused;
        self.turned_away += more.turned_away;
    }
}

/// Where and how long an attacker works.
pub struct Attack<'a> {
    /// Sockets, or directories of vifs: one for each port, one at least.
    pub targets: Vec<PathBuf>,
    /// What it misbehaves on.
    pub ring: Ring,
    /// Its address.
    pub mac: [u8; 6],
    /// Whom it sends frames to.
    pub peer: [u8; 6],
    /// When it is over.
    pub until: Instant,
    /// False: it is to end now.
    pub running: &'a dyn Fn() -> bool,
    /// What it did so far.
    pub tally: Tally,
    began: Option<Instant>,
}

/// Longest wait until the first connection is as far as a case needs it: the switch lets a peer
/// that flapped wait, and time is counted from then on.
const FIRST_MAX: Duration = Duration::from_secs(10);

impl<'a> Attack<'a> {
    /// One that lasts for `time` from its first connection on, and has done nothing yet.
    pub fn new(
        targets: Vec<PathBuf>,
        ring: Ring,
        time: Duration,
        running: &'a dyn Fn() -> bool,
    ) -> Self {
        let (mac, peer) = ([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
        let (until, tally) = (Instant::now() + time, Tally::default());
        Self { targets, ring, mac, peer, until, running, tally, began: Some(Instant::now()) }
    }

    /// Whether it goes on waiting for a connection.
    fn waits(&self) -> bool {
        let first = self.began.is_some_and(|began| began.elapsed() < FIRST_MAX);
        self.on() || first && (self.running)()
    }

    /// The first connection is as far as it has to be.
    fn begins(&mut self) {
        if let Some(began) = self.began.take() {
            self.until += began.elapsed();
        }
    }

    /// Whether there is time left.
    fn on(&self) -> bool {
        Instant::now() < self.until && (self.running)()
    }

    /// What was done since `from` was to get ready: before the first attempt it is not counted.
    fn got_ready(&mut self, from: Instant) {
        if self.tally.attempts == 0 {
            self.until += from.elapsed();
        }
    }

    /// Lets some time pass, no more than is left.
    fn rest(&self, time: Duration) {
        let left = self.until.saturating_duration_since(Instant::now());
        if (self.running)() {
            std::thread::sleep(time.min(left));
        }
    }

    /// What its first port is.
    fn target(&self) -> PathBuf {
        self.targets.first().cloned().unwrap_or_default()
    }
}

impl Case {
    /// Plays it until `attack` is over.
    ///
    /// # Errors
    /// [`Error`]: nothing could be tried at all.
    pub fn play(&self, attack: &mut Attack<'_>) -> Result<(), Error> {
        (self.play)(attack)
    }
}

/// The cases for a ring, in order.
pub fn cases_of(ring: Ring) -> impl Iterator<Item = &'static Case> {
    cases().filter(move |case| case.rings.contains(&ring))
}
