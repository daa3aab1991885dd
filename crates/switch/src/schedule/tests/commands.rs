//! Pending commands: replaced, taken in order and in batches, none lost.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::super::{COMMANDS_MAX, Command, Commands};

/// What is requested of a queue.
#[derive(Clone, Copy, Debug)]
enum Request {
    Begin,
    Drop,
    GiveAway(usize),
    Poll,
    Kick,
    Take(usize),
}

fn requests() -> impl Strategy<Value = Vec<(u64, Request)>> {
    let request = prop_oneof![
        Just(Request::Begin),
        Just(Request::Drop),
        (0..4_usize).prop_map(Request::GiveAway),
        Just(Request::Poll),
        Just(Request::Kick),
        (1..4_usize).prop_map(Request::Take),
    ];
    prop::collection::vec((0..4_u64, request), 0..80)
}

/// Queues served, by number of their beginning, if each command is carried out as it is taken.
#[derive(Default, PartialEq, Eq, Debug)]
struct Served(BTreeMap<u64, u32>);

impl Served {
    fn carry_out(&mut self, command: Command<(u64, u32), ()>, acted: &mut BTreeSet<u64>) {
        match command {
            Command::Begin((token, n)) => {
                // A queue is begun only once it is not served.
                assert_eq!(self.0.insert(token, n), None);
            }
            Command::Drop(token) => drop(self.0.remove(&token)),
            Command::GiveAway(token, _) | Command::Poll(token) | Command::Kick(token) => {
                acted.insert(token);
            }
            Command::Table(()) => unreachable!("there is none"),
        }
    }
}

proptest! {
    /// Whatever is replaced, the worker ends with the queues that the last requests left, and polls
    /// each queue that was to be polled since it was last dropped.
    #[test]
    fn replaced_commands_leave_what_all_of_them_would(requests in requests()) {
        let mut pending = Commands::default();
        let (mut worker, mut wanted) = (Served::default(), Served::default());
        let (mut acted, mut wanted_acts) = (BTreeSet::new(), BTreeSet::new());
        let mut begun = 0;
        for (token, request) in requests {
            match request {
                // As its users: a queue that is served is dropped first.
                Request::Begin if wanted.0.contains_key(&token) => {}
                Request::Begin => {
                    begun += 1;
                    prop_assert_eq!(pending.begin(token, (token, begun)), None);
                    wanted.0.insert(token, begun);
                }
                Request::Drop => {
                    let not_begun = pending.drop_queue(token);
                    let before = wanted.0.remove(&token);
                    // One that never begins is returned, and no other.
                    let is_served = worker.0.get(&token) == before.as_ref();
                    prop_assert_eq!(not_begun.map(|(_, n)| n), before.filter(|_| !is_served));
                    wanted_acts.remove(&token);
                    prop_assert!(pending.will_drop(token));
                }
                Request::GiveAway(to) => pending.give_away(token, to),
                Request::Poll => pending.poll(token),
                Request::Kick => pending.kick(token),
                Request::Take(most) => {
                    for command in pending.take(most) {
                        worker.carry_out(command, &mut acted);
                    }
                }
            }
            if matches!(request, Request::GiveAway(_) | Request::Poll | Request::Kick) {
                wanted_acts.insert(token);
            }
            prop_assert!(pending.len() <= 4);
        }
        while !pending.is_empty() {
            pending.take(COMMANDS_MAX).into_iter().for_each(|c| worker.carry_out(c, &mut acted));
        }
        prop_assert_eq!(worker, wanted);
        prop_assert!(acted.is_superset(&wanted_acts), "{:?} of {:?}", acted, wanted_acts);
    }
}

#[test]
fn only_the_latest_table_is_taken_at_its_place() {
    let mut pending: Commands<u8, &str> = Commands::default();
    pending.set_table("old");
    assert_eq!(pending.begin(7, 1), None);
    pending.set_table("new");
    pending.poll(8);
    let taken = pending.take(3);
    let [Command::Begin(1), Command::Table("new")] = &taken[..] else { panic!("{taken:?}") };
    assert!(matches!(&pending.take(1)[..], [Command::Poll(8)]));
    assert!(pending.is_empty());
}
