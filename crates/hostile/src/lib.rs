//! Hostile peers: one [`Case`] for each kind of invalid behaviour, and the code that runs it.
//!
//! ```text
//!   cases() ──▶ Case ── play ──▶ virtio::wire::Raw   a front-end that sends arbitrary messages
//!                            └─▶ xen::guest::Guest   a Xen domain with arbitrary rings and keys
//! ```
//! A case is only the attacker: it connects, misbehaves until its time is over, and counts what it
//! did ([`Tally`]). The switch may end its connection: that is expected and not an error. The cost
//! of an attack for others is measured by the lab's study `hostile`.
//!
//! Each case names its [`source`](Case::source): an observed attack, or the advisory of the
//! affected implementation. [`NOT_A_PEERS`] lists the advisories that no peer of a switch can
//! cause, and why.
#![forbid(unsafe_code)]

mod race;
mod table;
mod virtio;
mod xen;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

pub use self::table::{NOT_A_PEERS, cases, cases_of};

/// Interface that an attacker uses.
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
    /// All variants.
    pub const ALL: [Self; 4] = [Self::Split, Self::Packed, Self::Socket, Self::Xen];

    /// Name in the command line and in results.
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
        found.ok_or_else(|| format!("{s}: unknown ring: expected split, packed, socket or xen"))
    }
}

/// Attacker who can run a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// The driver in a guest, behind any front-end.
    Guest,
    /// A front-end process, or any process that may connect to its socket.
    FrontEnd,
    /// A Xen domain.
    Domain,
}

impl Who {
    /// Name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Guest => "guest",
            Self::FrontEnd => "front-end",
            Self::Domain => "domain",
        }
    }
}

/// One kind of invalid behaviour.
pub struct Case {
    /// Its name: lower case, words joined by `-`.
    pub name: &'static str,
    /// Attacker who can run it.
    pub who: Who,
    /// Description in one line.
    pub what: &'static str,
    /// Sources: advisories, and rows of the issue that requested the suite.
    pub source: &'static [&'static str],
    /// Interfaces it applies to.
    pub rings: &'static [Ring],
    /// Most ports that it uses; fewer are accepted.
    pub ports: u16,
    /// The attacker must receive frames: others have to send it some.
    pub receives: bool,
    play: fn(&mut Attack<'_>) -> Result<(), Error>,
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// Reason why an attacker could not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The switch accepted no connection, or none reached the state that the case needs.
    #[error("{0}: the switch accepts no connection, or none reaches the state this case needs")]
    NoConnection(PathBuf),
    /// A system call failed.
    #[error("system call failed: {0}")]
    Os(#[from] std::io::Error),
}

impl From<rustix::io::Errno> for Error {
    fn from(error: rustix::io::Errno) -> Self {
        Self::Os(error.into())
    }
}

/// Counters of an attacker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Attempts: messages, chains, or rounds of a flood.
    pub attempts: u64,
    /// Connections made.
    pub connections: u64,
    /// Connections that the switch ended.
    pub ended: u64,
    /// Requests that the switch refused.
    pub refused: u64,
    /// Connections that did not reach the state that the case needs.
    pub turned_away: u64,
    /// Changes of the memory table, or of grants, while rings ran.
    pub swaps: u64,
    /// Frames that arrived with parts of two versions: they were rewritten while they were copied.
    pub torn: u64,
    /// Frames that arrived with an address other than the one that was looked up: never legal.
    pub mixed: u64,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, more: Self) {
        self.attempts += more.attempts;
        self.connections += more.connections;
        self.ended += more.ended;
        self.refused += more.refused;
        self.turned_away += more.turned_away;
        self.swaps += more.swaps;
        self.torn += more.torn;
        self.mixed += more.mixed;
    }
}

/// Target and duration of an attack.
pub struct Attack<'a> {
    /// Sockets, or directories of vifs: one for each port, at least one.
    pub targets: Vec<PathBuf>,
    /// Interface to use.
    pub ring: Ring,
    /// MAC address of the attacker.
    pub mac: [u8; 6],
    /// MAC address it sends frames to.
    pub peer: [u8; 6],
    /// End of the attack.
    pub until: Instant,
    /// Returns false to end the attack now.
    pub running: &'a dyn Fn() -> bool,
    /// Counters so far.
    pub tally: Tally,
    began: Option<Instant>,
}

/// Longest wait for the first connection to reach the state a case needs: the switch delays a peer
/// that reconnects often, and the duration starts after that.
const FIRST_MAX: Duration = Duration::from_secs(10);

impl<'a> Attack<'a> {
    /// Creates an attack that lasts `time` from its first connection on.
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

    /// Whether to continue waiting for a connection.
    fn may_wait(&self) -> bool {
        let first = self.began.is_some_and(|began| began.elapsed() < FIRST_MAX);
        self.on() || first && (self.running)()
    }

    /// Starts the clock: the first connection reached the required state.
    fn begin(&mut self) {
        if let Some(began) = self.began.take() {
            self.until += began.elapsed();
        }
    }

    /// Whether time is left.
    fn on(&self) -> bool {
        Instant::now() < self.until && (self.running)()
    }

    /// Excludes preparation since `from` from the duration, before the first attempt.
    fn exclude_setup(&mut self, from: Instant) {
        if self.tally.attempts == 0 {
            self.until += from.elapsed();
        }
    }

    /// Sleeps for `time`, at most the time left.
    fn rest(&self, time: Duration) {
        let left = self.until.saturating_duration_since(Instant::now());
        if (self.running)() {
            std::thread::sleep(time.min(left));
        }
    }

    /// Target of the first port.
    fn target(&self) -> PathBuf {
        self.targets.first().cloned().unwrap_or_default()
    }
}

impl Case {
    /// Runs the case until `attack` is over.
    ///
    /// # Errors
    /// [`Error`] if nothing could be tried.
    pub fn play(&self, attack: &mut Attack<'_>) -> Result<(), Error> {
        (self.play)(attack)
    }
}
