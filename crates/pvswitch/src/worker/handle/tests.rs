use std::sync::Weak;

use switch::poll::Policy;
use switch::schedule::{COMMANDS_MAX, Command as OfQueue, token};
use switch::tuning::Tuning;

use super::*;

/// Weak references to descriptors, to count those that are open.
#[derive(Default)]
struct Kicks(Vec<Weak<OwnedFd>>);

impl Kicks {
    fn new_one(&mut self) -> Option<KickFd> {
        let kick = Arc::new(os::eventfd().unwrap());
        self.0.push(Arc::downgrade(&kick));
        self.0.retain(|kick| kick.strong_count() > 0);
        Some(kick)
    }

    fn open(&self) -> usize {
        self.0.iter().filter(|kick| kick.strong_count() > 0).count()
    }
}

impl Commands {
    /// Has a queue served, as if its worker's handle were asked.
    fn serve(&mut self, port: u16, queue: u16, kick: Option<KickFd>) {
        let tuning = Arc::new(Tuning::new(Policy::Event));
        let source = Source::new(PortId(port), queue, Arc::default(), tuning);
        let ingress = Arc::new(Mutex::new(Lock::Ingress, uplink::NullIngress));
        let token = token(PortId(port), queue, false);
        let served = Served { token, source, ingress, kick, notifies: true }.placed(1);
        drop(self.queues.begin(token, Begin::Serve(served)));
    }
}

/// Issue 14, row 10: a peer that starts, kicks and stops rings in a loop, faster than the worker
/// runs commands, lengthens its list only by the number of rings, and no unused descriptor stays in
/// it.
#[test]
fn pending_commands_and_descriptors_of_a_port_are_bounded() {
    const QUEUES: u16 = 16;
    let (mut pending, mut kicks) = (Commands::default(), Kicks::default());
    let port = Arc::new(Port::new(PortId(7), "p".into(), Vec::new()));
    for _ in 0..300 {
        for queue in 0..QUEUES {
            let (rx, tx) = (token(port.id, queue, true), token(port.id, queue, false));
            pending.serve(7, queue, kicks.new_one());
            let watched = Watched { port: Arc::clone(&port), queue, kick: kicks.new_one() };
            drop(pending.queues.begin(rx, Begin::Watch(rx, watched)));
            for token in [rx, tx] {
                pending.queues.kick(token);
                pending.queues.poll(token);
                pending.drop_queue(token);
            }
            pending.queues.give_away(tx, 1);
            pending.retry = true;
        }
        // Started again with other descriptors, twice.
        for queue in 0..QUEUES {
            pending.serve(7, queue, kicks.new_one());
            pending.serve(7, queue, kicks.new_one());
        }
        let queues = usize::from(QUEUES);
        assert_eq!((pending.queues.len(), kicks.open()), (2 * queues, queues));
    }
    let commands = pending.take(usize::MAX);
    // For each queue: drop, serve, give away.
    assert!(commands.len() <= 2 * usize::from(QUEUES) * 3 + 1, "{}", commands.len());
    let drops =
        commands.iter().filter(|command| matches!(command, Command::Queue(OfQueue::Drop(_))));
    assert_eq!((drops.count(), kicks.open()), (2 * usize::from(QUEUES), 16));
    drop(commands);
    assert_eq!((pending.is_empty(), kicks.open()), (true, 0));
}

/// Issue 14, row 10.
#[test]
fn commands_of_many_queues_are_run_in_batches_and_none_is_lost() {
    let mut pending = Commands::default();
    const QUEUES: u16 = 500;
    for port in 0..QUEUES {
        pending.serve(port, 0, None);
        pending.queues.kick(token(PortId(port), 0, false));
    }
    let mut begun = Vec::new();
    while !pending.is_empty() {
        let commands = pending.take(COMMANDS_MAX);
        let new = commands.iter().filter_map(|command| match command {
            Command::Queue(OfQueue::Begin(Begin::Serve(served))) => Some(served.source.port.0),
            _ => None,
        });
        let before = begun.len();
        begun.extend(new);
        assert!(begun.len() - before <= COMMANDS_MAX && commands.len() <= 2 * COMMANDS_MAX);
    }
    assert_eq!(begun, (0..QUEUES).collect::<Vec<_>>());
}

#[test]
fn rules_of_a_port_apply_before_its_queues_are_served() {
    let mut pending = Commands::default();
    pending.queues.poll(1);
    pending.tenants = Some(None);
    let rules = Tenants::new(vec![Some(Arc::default())]);
    pending.queues.set_table(Arc::new(Table::new()));
    // The latest only, even if the worker runs few commands at once.
    pending.tenants = Some(rules.clone());
    let first = pending.take(1);
    let [Command::Tenants(Some(taken)), Command::Queue(OfQueue::Poll(1))] = &first[..] else {
        panic!("rules come first")
    };
    assert!(Arc::ptr_eq(taken, rules.as_ref().unwrap()));
    assert!(matches!(&pending.take(9)[..], [Command::Queue(OfQueue::Table(_))]));
}
