//! Which worker serves each queue, and how queues move between workers.
//!
//! ```text
//!             place              give away                hand_over
//!   unassigned ──────▶ at worker ──────────▶ in flight ──────────────▶ at another worker
//!      ▲                   │ remove              │ remove
//!      └───────────────────┴─────────────────────┘  a later hand_over is refused
//! ```
//! There is one for all workers. Its owner keeps it under a lock, which is held until the command
//! that follows from a change was sent, so that commands to a queue arrive in order. A worker gives
//! a queue away by itself, by its load, or by a [`GiveAway`]: it stops serving the queue, and then
//! hands it over. So a queue is neither lost between two workers nor served by two.
//!
//! It sends no command, and holds no queue.

use std::collections::BTreeMap;

use crate::fdb::PortId;
use crate::port::QueueId;

/// Token that identifies a queue of a port to workers.
pub fn token(port: PortId, queue: u16, egress: bool) -> u64 {
    u64::from(port.0) << 32 | u64::from(queue) << 1 | u64::from(egress)
}

/// Queue of a [`token`], in its direction.
pub fn queue_id(token: u64) -> QueueId {
    QueueId { port: PortId((token >> 32) as u16), queue: (token as u32 >> 1) as u16 }
}

fn is_egress(token: u64) -> bool {
    token & 1 == 1
}

/// How queues are placed on workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Placement {
    /// One worker serves everything.
    Single,
    /// A port joins the worker with the fewest ports.
    Group,
    /// Each queue of each port goes to the next worker.
    PerPort,
    /// Queues move between workers by measured load.
    #[default]
    Balanced,
}

impl Assignment {
    /// The command to follow where the queue begins: to the worker that the placement chose.
    pub fn follow(self, token: u64) -> Option<GiveAway> {
        let Self { worker: from, chosen: to, .. } = self;
        (from != to).then_some(GiveAway { token, from, to })
    }
}

impl Placement {
    /// All placements, each at its number.
    pub const ALL: [Self; 4] = [Self::Single, Self::Group, Self::PerPort, Self::Balanced];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::Group => "group",
            Self::PerPort => "per-port",
            Self::Balanced => "balanced",
        }
    }

    /// The placement of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|placement| placement.name() == name)
    }

    /// Whether queues move by load between this number of workers.
    pub fn moves_by_load(self, workers: usize) -> bool {
        self == Self::Balanced && workers > 1
    }
}

/// Where a queue is served or watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Assignment {
    /// The worker; of a queue in flight, the one that gave it away.
    pub worker: usize,
    /// Number of its [`Assignments::place`]: an earlier queue of the same token has another one.
    pub generation: u64,
    /// The worker that the placement chose for it.
    chosen: usize,
}

/// A command to worker `from`: give a queue to worker `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GiveAway {
    /// The queue.
    pub token: u64,
    /// Its worker.
    pub from: usize,
    /// Its next worker, unless the placement changes before it is handed over.
    pub to: usize,
}

/// The worker of each queue.
#[derive(Clone, Debug, Hash)]
pub struct Assignments {
    workers: usize,
    placement: Placement,
    assignments: BTreeMap<u64, Assignment>,
    /// Workers of ingress queues that were removed: they may serve them for one more round.
    last: BTreeMap<u64, usize>,
    /// Number of placements of queues so far.
    generations: u64,
}

impl Assignments {
    /// Creates the table of `workers` workers, without queues.
    pub fn new(workers: usize, placement: Placement) -> Self {
        assert!(workers > 0, "queues need a worker");
        Self {
            workers,
            placement,
            assignments: BTreeMap::new(),
            last: BTreeMap::new(),
            generations: 0,
        }
    }

    /// How queues are placed.
    pub fn placement(&self) -> Placement {
        self.placement
    }

    /// The assignment of a queue, if any.
    pub fn assignment(&self, token: u64) -> Option<Assignment> {
        self.assignments.get(&token).copied()
    }

    /// The worker that serves or watches a queue; `None`: the queue is not assigned.
    pub fn worker(&self, token: u64) -> Option<usize> {
        self.assignments.get(&token).map(|assignment| assignment.worker)
    }

    /// Chooses a worker for a queue by the placement.
    fn choose(&self, token: u64) -> usize {
        let QueueId { port, queue } = queue_id(token);
        match self.placement {
            // Balanced starts on one worker; an overloaded worker gives queues away.
            Placement::Single | Placement::Balanced => 0,
            Placement::PerPort => (usize::from(port.0) + usize::from(queue)) % self.workers,
            Placement::Group => {
                let of_port = token >> 32 << 32..=token | u64::from(u32::MAX);
                if let Some((_, sibling)) = self.assignments.range(of_port).next() {
                    return sibling.chosen;
                }
                let port_of = |(token, assignment): (&u64, &Assignment)| {
                    (assignment.chosen, queue_id(*token).port.0)
                };
                let mut ports: Vec<_> = self.assignments.iter().map(port_of).collect();
                ports.sort_unstable();
                ports.dedup();
                let load = |w: &usize| ports.iter().filter(|(worker, _)| worker == w).count();
                (0..self.workers).min_by_key(load).unwrap_or(0)
            }
        }
    }

    /// Assigns a queue to a worker, which is to serve or watch it, and then to
    /// [give it away](Assignment::follow) if the placement chose another. Its earlier one, if it
    /// had one, was [removed](Self::remove).
    ///
    /// An ingress queue begins where it was served before. That worker may be in its last round
    /// with it: beside one that serves it already, it could take back the other's request for
    /// notifications (`tests/two_workers.rs`).
    pub fn place(&mut self, token: u64) -> Assignment {
        let chosen = self.choose(token);
        let worker = self.last.remove(&token).unwrap_or(chosen);
        self.generations += 1;
        let assignment = Assignment { worker, generation: self.generations, chosen };
        self.assignments.insert(token, assignment);
        assignment
    }

    /// Removes a queue; returns the worker that is to drop it. If the queue is in flight, that one
    /// has nothing to drop, and its [`hand_over`](Self::hand_over) is refused.
    pub fn remove(&mut self, token: u64) -> Option<usize> {
        let worker = self.assignments.remove(&token)?.worker;
        if !is_egress(token) {
            self.last.insert(token, worker);
        }
        Some(worker)
    }

    /// Requests the move of a queue by load, as another worker decided. `None`: the queue was
    /// removed meanwhile or is there already, or queues do not move by load any more.
    pub fn request_move(&self, token: u64, to: usize) -> Option<GiveAway> {
        let from = self.worker(token).filter(|from| *from != to)?;
        self.placement.moves_by_load(self.workers).then_some(GiveAway { token, from, to })
    }

    /// Moves a queue from worker `from`, which has stopped serving it, to worker `to`, or to the
    /// one that the placement chooses. Returns the worker that is to serve it. `None`: the queue of
    /// this `generation` was removed meanwhile; it is to be dropped.
    pub fn hand_over(
        &mut self,
        token: u64,
        generation: u64,
        from: usize,
        to: usize,
    ) -> Option<usize> {
        let is_it = |assignment: &&mut Assignment| {
            (assignment.generation, assignment.worker) == (generation, from)
        };
        let assignment = self.assignments.get_mut(&token).filter(is_it)?;
        if self.placement == Placement::Balanced {
            assignment.chosen = to;
        }
        assignment.worker = assignment.chosen;
        Some(assignment.worker)
    }

    /// Places every queue again. Returns the moves that follow; service continues meanwhile.
    pub fn set_placement(&mut self, placement: Placement) -> Vec<GiveAway> {
        self.placement = placement;
        let mut moves = Vec::new();
        for (token, assignment) in std::mem::take(&mut self.assignments) {
            let chosen = match placement {
                // Queues stay; load decides from now on.
                Placement::Balanced => assignment.worker,
                _ => self.choose(token),
            };
            self.assignments.insert(token, Assignment { chosen, ..assignment });
            // Egress queues are only watched; their worker does not matter.
            if chosen != assignment.worker && !is_egress(token) {
                moves.push(GiveAway { token, from: assignment.worker, to: chosen });
            }
        }
        moves
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ingress(port: u16, queue: u16) -> u64 {
        token(PortId(port), queue, false)
    }

    fn egress(port: u16, queue: u16) -> u64 {
        token(PortId(port), queue, true)
    }

    /// Assignments with both queues of a pair for each of `pairs`.
    fn assignments(workers: usize, placement: Placement, pairs: &[(u16, u16)]) -> Assignments {
        let mut assignments = Assignments::new(workers, placement);
        for (port, queue) in pairs {
            assignments.place(ingress(*port, *queue));
            assignments.place(egress(*port, *queue));
        }
        assignments
    }

    /// Carries out moves of queues whose assignments are of the first placement.
    fn carry_out(assignments: &mut Assignments, moves: &[GiveAway]) {
        for GiveAway { token, from, to } in moves {
            let assignment = assignments.assignment(*token).expect("it has an assignment");
            assert_eq!(assignments.hand_over(*token, assignment.generation, *from, *to), Some(*to));
        }
    }

    fn workers(assignments: &Assignments, pairs: &[(u16, u16)]) -> Vec<usize> {
        let worker =
            |(port, queue): &(u16, u16)| assignments.worker(ingress(*port, *queue)).unwrap();
        pairs.iter().map(worker).collect()
    }

    const PAIRS: [(u16, u16); 5] = [(0, 0), (0, 1), (1, 0), (5, 0), (5, 1)];

    #[test]
    fn token_names_its_queue() {
        for (port, queue) in [(0, 0), (1, 7), (u16::MAX, u16::MAX)] {
            for token in [ingress(port, queue), egress(port, queue)] {
                assert_eq!(queue_id(token), QueueId { port: PortId(port), queue });
            }
        }
    }

    #[test]
    fn new_queues_are_placed_by_the_placement() {
        for (placement, expected) in [
            (Placement::Single, [0, 0, 0, 0, 0]),
            (Placement::Balanced, [0, 0, 0, 0, 0]),
            (Placement::PerPort, [0, 1, 1, 1, 0]),
            // Ports count, not queues.
            (Placement::Group, [0, 0, 1, 0, 0]),
        ] {
            let assignments = assignments(2, placement, &PAIRS);
            assert_eq!(workers(&assignments, &PAIRS), expected, "{}", placement.name());
        }
    }

    /// Whatever was placed before: watched egress queues, which stay, and queues in flight do not
    /// decide where their port goes.
    #[test]
    fn change_of_the_placement_moves_queues_to_where_new_ones_would_be() {
        for before in Placement::ALL {
            for after in [Placement::Single, Placement::Group, Placement::PerPort] {
                let mut assignments = assignments(3, before, &PAIRS);
                let moves = assignments.set_placement(after);
                carry_out(&mut assignments, &moves);
                let expected = self::assignments(3, after, &PAIRS);
                let names = (before.name(), after.name());
                assert_eq!(workers(&assignments, &PAIRS), workers(&expected, &PAIRS), "{names:?}");
                // So does a queue that starts later, or again.
                assignments.remove(ingress(1, 0));
                let again = assignments.place(ingress(1, 0)).worker;
                assert_eq!(Some(again), expected.worker(ingress(1, 0)), "{names:?}");
            }
        }
    }

    #[test]
    fn queue_in_flight_follows_the_placement_set_meanwhile() {
        let mut assignments = assignments(3, Placement::Balanced, &PAIRS);
        let generation = assignments.assignment(ingress(1, 0)).unwrap().generation;
        let moves = assignments.set_placement(Placement::PerPort);
        let expected = GiveAway { token: ingress(1, 0), from: 0, to: 1 };
        assert!(moves.contains(&expected), "{moves:?}");
        // It was on its way to worker 2 by load.
        assert_eq!(assignments.hand_over(ingress(1, 0), generation, 0, 2), Some(1));
        // The command that was sent meanwhile finds no queue; nor is one handed over twice.
        assert_eq!(assignments.hand_over(ingress(1, 0), generation, 0, 1), None);
        assert_eq!(assignments.worker(ingress(1, 0)), Some(1));
    }

    #[test]
    fn queue_removed_in_flight_is_not_handed_over() {
        let mut assignments = assignments(2, Placement::Balanced, &PAIRS);
        let old = assignments.assignment(ingress(1, 0)).unwrap().generation;
        assert_eq!(assignments.remove(ingress(1, 0)), Some(0));
        assert_eq!(assignments.hand_over(ingress(1, 0), old, 0, 1), None);
        // Nor if its guest has started it again: on the same worker, which serves the new one.
        let new = assignments.place(ingress(1, 0));
        assert_eq!(assignments.hand_over(ingress(1, 0), old, 0, 1), None);
        assert_eq!(assignments.worker(ingress(1, 0)), Some(0));
        assert_eq!(assignments.hand_over(ingress(1, 0), new.generation, 0, 1), Some(1));
    }

    #[test]
    fn queue_that_starts_again_begins_where_it_was_and_follows_the_placement() {
        let mut assignments = assignments(2, Placement::PerPort, &PAIRS);
        assert_eq!(assignments.worker(ingress(1, 0)), Some(1));
        assignments.set_placement(Placement::Single);
        assert_eq!(assignments.remove(ingress(1, 0)), Some(1));
        let assignment = assignments.place(ingress(1, 0));
        let give = assignment.follow(ingress(1, 0)).unwrap();
        assert_eq!((assignment.worker, give.from, give.to), (1, 1, 0));
        carry_out(&mut assignments, &[give]);
        // Who watches for room has no part in that: it begins where it is to be.
        assert_eq!(assignments.remove(egress(1, 0)), Some(1));
        let assignment = assignments.place(egress(1, 0));
        assert_eq!((assignment.worker, assignment.follow(egress(1, 0))), (0, None));
        // Nor has a queue that starts for the first time.
        assert_eq!(assignments.place(ingress(7, 0)).follow(ingress(7, 0)), None);
    }

    #[test]
    fn moves_by_load_that_came_to_nothing_are_not_requested() {
        let mut assignments = assignments(2, Placement::Balanced, &PAIRS);
        let request = GiveAway { token: ingress(5, 0), from: 0, to: 1 };
        assert_eq!(assignments.request_move(ingress(5, 0), 1), Some(request));
        assert_eq!(assignments.request_move(ingress(5, 0), 0), None, "it is there");
        assert_eq!(assignments.request_move(ingress(9, 0), 1), None, "it is not assigned");
        assignments.set_placement(Placement::Single);
        assert_eq!(assignments.request_move(ingress(5, 0), 1), None, "load decides no more");
        let alone = self::assignments(1, Placement::Balanced, &PAIRS);
        assert!(!alone.placement().moves_by_load(1));
    }
}
