//! Commands that wait for a worker.

use std::collections::{HashMap, VecDeque};

/// Maximum number of queues whose commands a worker carries out between two rounds: frames are not
/// delayed by a peer that starts and stops its rings in a loop.
pub const COMMANDS_MAX: usize = 64;

/// A command about one queue, or a new table of ports. `B` is what a worker begins to serve or to
/// watch, `T` the table.
#[derive(Clone, Debug)]
pub enum Command<B, T> {
    /// Begins to serve or to watch a queue.
    Begin(B),
    /// Stops serving or watching the queue with this token.
    Drop(u64),
    /// Gives a queue to another worker.
    GiveAway(u64, usize),
    /// Polls a queue whose settings were changed.
    Poll(u64),
    /// Delivers a kick that did not arrive by the queue's descriptor.
    Kick(u64),
    /// Replaces the table.
    Table(T),
}

/// Commands of one queue, in the order in which they are carried out.
#[derive(Clone, Debug)]
struct OfQueue<B> {
    drop: bool,
    begin: Option<B>,
    away: Option<usize>,
    poll: bool,
    kick: bool,
}

impl<B> Default for OfQueue<B> {
    fn default() -> Self {
        Self { drop: false, begin: None, away: None, poll: false, kick: false }
    }
}

#[derive(Clone, Debug)]
enum Next {
    Queue(u64),
    Table(u64),
}

/// Pending commands of a worker. Later commands of a queue replace earlier ones, so a peer that
/// starts and stops its queues in a loop neither lengthens the list nor keeps more in it than its
/// queues have.
#[derive(Clone, Debug)]
pub struct Commands<B, T> {
    order: VecDeque<Next>,
    of: HashMap<u64, OfQueue<B>>,
    /// The latest table, and its number.
    table: Option<T>,
    tables: u64,
}

impl<B, T> Default for Commands<B, T> {
    fn default() -> Self {
        Self { order: VecDeque::new(), of: HashMap::new(), table: None, tables: 0 }
    }
}

impl<B, T> Commands<B, T> {
    /// Has a worker begin to serve or to watch the queue with this token. Returns what it was to
    /// begin before.
    pub fn begin(&mut self, token: u64, begin: B) -> Option<B> {
        self.of(token).begin.replace(begin)
    }

    /// Has a worker stop serving or watching a queue. Returns what it was to begin: it never will,
    /// and counts as served and stopped.
    pub fn drop_queue(&mut self, token: u64) -> Option<B> {
        let of = self.of(token);
        std::mem::replace(of, OfQueue { drop: true, ..OfQueue::default() }).begin
    }

    /// Has a queue given to another worker.
    pub fn give_away(&mut self, token: u64, to: usize) {
        self.of(token).away = Some(to);
    }

    /// Has a queue polled, even if its policy is waiting.
    pub fn poll(&mut self, token: u64) {
        self.of(token).poll = true;
    }

    /// Delivers a kick.
    pub fn kick(&mut self, token: u64) {
        self.of(token).kick = true;
    }

    /// Replaces the table. Queues of commands before this one are served with an older table or
    /// this one, those after it with this one.
    pub fn set_table(&mut self, table: T) {
        self.table = Some(table);
        self.tables += 1;
        self.order.push_back(Next::Table(self.tables));
    }

    fn of(&mut self, token: u64) -> &mut OfQueue<B> {
        let order = &mut self.order;
        self.of.entry(token).or_insert_with(|| {
            order.push_back(Next::Queue(token));
            OfQueue::default()
        })
    }

    /// Takes the next commands, in order: those of at most `queues` queues.
    pub fn take(&mut self, queues: usize) -> Vec<Command<B, T>> {
        let mut commands = Vec::new();
        for _ in 0..queues {
            let token = match self.order.pop_front() {
                Some(Next::Queue(token)) => token,
                Some(Next::Table(n)) => {
                    // Only the latest table counts.
                    let table = self.table.take_if(|_| n == self.tables);
                    commands.extend(table.map(Command::Table));
                    continue;
                }
                None => break,
            };
            let Some(OfQueue { drop, begin, away, poll, kick }) = self.of.remove(&token) else {
                continue;
            };
            commands.extend(drop.then_some(Command::Drop(token)));
            commands.extend(begin.map(Command::Begin));
            commands.extend(away.map(|to| Command::GiveAway(token, to)));
            commands.extend(poll.then_some(Command::Poll(token)));
            commands.extend(kick.then_some(Command::Kick(token)));
        }
        commands
    }

    /// Whether none is pending.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Number of queues and tables with pending commands.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Queues that the worker is about to begin, in any order.
    pub fn beginning(&self) -> impl Iterator<Item = &B> {
        self.of.values().filter_map(|of| of.begin.as_ref())
    }

    /// Whether the worker is about to stop serving or watching the queue with this token.
    pub fn will_drop(&self, token: u64) -> bool {
        self.of.get(&token).is_some_and(|of| of.drop)
    }

    /// Whether the worker is about to poll the queue with this token.
    pub fn will_poll(&self, token: u64) -> bool {
        self.of.get(&token).is_some_and(|of| of.poll)
    }
}
