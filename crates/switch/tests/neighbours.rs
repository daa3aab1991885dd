//! Effect of a flooder on other ports, in virtual time: one worker, driven by the program's
//! scheduler, serves eight light ports and one that always has frames.
//!
//! A light port is served for its whole demand if that is less than its share of the worker's time,
//! otherwise for its share. While its queue is polled, its single frame waits for the flooder once:
//! for a quantum, and for the last burst's excess over it. On an otherwise idle worker this is many
//! times the wait without the flooder, which is almost 0; if light ports wait for each other,
//! floods of small frames less than double the wait. Where queues sleep, as under `adaptive`,
//! frames wait for the next poll of kicks besides: alone, their kick would have woken the worker.

#[path = "common/random.rs"]
mod random;
#[path = "common/virtual_worker.rs"]
mod virtual_worker;

use std::collections::VecDeque;
use std::rc::Rc;

use switch::fair::QUANTUM;
use switch::forward::Table;
use switch::frame::BURST_MAX;
use switch::poll::{Costs, Policy};
use switch::schedule::{BurstResult, POLL_KICKS_INTERVAL};
use switch::time::{Instant, Ns};

use random::Random;
use virtual_worker::{
    Clock, Guest, Hands, Kicks, Mistake, POLL, POLL_KICKS, Queue, Shared, Worker, served,
};

const QUIET: usize = 8;
const LENGTH: Ns = Ns::from_ms(250);

/// Load of each light port: frames per train, period and time of a frame; trains at random times.
#[derive(Clone, Copy, Debug)]
struct Load {
    frames: u64,
    period: Ns,
    frame: Ns,
}

impl Load {
    /// Part of the worker's time for all light ports together.
    fn part(self) -> f64 {
        (QUIET as u64 * self.frames * self.frame.get()) as f64 / self.period.get() as f64
    }
}

/// A light port, or with `load` `None` one that always has frames.
struct Port {
    load: Option<Load>,
    /// Time of a frame.
    frame: Ns,
    random: Random,
    kicks: Kicks,
    /// Arrival time of each waiting frame.
    frames: VecDeque<Instant>,
    next: Instant,
    served: Ns,
    asked: Ns,
    late: Vec<u64>,
}

impl Port {
    fn new(load: Option<Load>, frame: Ns, seed: u64) -> Self {
        let mut random = Random(seed);
        let first = load.map_or(0, |load| random.within(load.period.get()));
        Self {
            load,
            frame,
            random,
            kicks: Kicks::default(),
            frames: VecDeque::new(),
            next: Instant::from_ns(first),
            served: Ns::ZERO,
            asked: Ns::ZERO,
            late: Vec::new(),
        }
    }

    /// Adds the trains that came by `now`.
    fn come(&mut self, load: Load, now: Instant) {
        while self.next <= now {
            self.kicks.frame_came(self.next, !self.frames.is_empty());
            self.frames.extend((0..load.frames).map(|_| self.next));
            self.asked += load.frames * load.frame;
            // Between half a period and one and a half: the mean is the period.
            self.next += load.period / 2 + Ns::new(self.random.within(load.period.get()));
        }
    }

    /// Takes up to `max` frames; returns their number.
    fn take(&mut self, max: usize, now: Instant) -> usize {
        let Some(load) = self.load else { return max };
        self.come(load, now);
        let frames = self.frames.len().min(max);
        self.late.extend(self.frames.drain(..frames).map(|came| (now - came).get()));
        frames
    }
}

impl Guest for Port {
    fn serve(&mut self, _: &Queue<Self>, max: usize, hands: &mut Hands<'_>) -> BurstResult {
        let frames = self.take(max, hands.clock.now());
        let took = frames as u64 * self.frame;
        self.served += took;
        hands.clock.pass(POLL + took);
        BurstResult { frames, ..BurstResult::default() }
    }

    fn arm(&mut self, disarms: bool, clock: &Clock) -> bool {
        clock.pass(POLL);
        let Some(load) = self.load else { return false };
        self.come(load, clock.now());
        if self.frames.is_empty() || !disarms {
            self.kicks.arm();
        }
        self.frames.is_empty()
    }

    fn disarm(&mut self) {
        self.kicks.disarm();
    }

    fn kick_at(&self) -> Instant {
        self.kicks.at(self.next, !self.frames.is_empty())
    }

    fn take_kick(&mut self) {
        let came = self.kick_at();
        if let Some(load) = self.load {
            self.come(load, came);
        }
        self.kicks.take();
    }
}

struct Seen {
    /// The least time that a light port was served, relative to its demand, and to the total.
    served: f64,
    share: f64,
    flooder: Ns,
    p50: u64,
    p99: u64,
    max: u64,
}

/// Runs light ports alone, or with one that floods with frames of this time each.
fn run(load: Load, flood_frame: Option<Ns>, policy: Policy, mistake: Mistake) -> Seen {
    let mut worker = Worker::new(0, Costs::TYPICAL, Table::new(), Clock::default());
    worker.mistake = mistake;
    let mut add = |port: usize, guest: Port| {
        let served = served(port as u16, 0, policy, guest);
        let guest = Rc::clone(&served.of);
        worker.scheduler.add(served, Instant::START);
        guest
    };
    let light = |port| Port::new(Some(load), load.frame, port as u64 + 1);
    let ports: Vec<Shared<Port>> = (0..QUIET).map(|port| add(port, light(port))).collect();
    let flooder = flood_frame.map(|frame| add(QUIET, Port::new(None, frame, 0)));
    worker.run_until(Instant::START + LENGTH);
    let now = worker.clock.now() - Instant::START;
    let mut late: Vec<u64> = ports.iter().flat_map(|port| port.borrow().late.clone()).collect();
    late.sort_unstable();
    let at = |per_cent: usize| late[(late.len() - 1) * per_cent / 100];
    let part = |time: Ns, of: Ns| time.get() as f64 / of.get() as f64;
    let least = |part: &dyn Fn(&Port) -> f64| {
        ports.iter().map(|port| part(&port.borrow())).fold(f64::MAX, f64::min)
    };
    Seen {
        served: least(&|port| part(port.served, port.asked)),
        share: least(&|port| part(port.served, now)),
        flooder: flooder.map_or(Ns::ZERO, |port| port.borrow().served),
        p50: at(50),
        p99: at(99),
        max: at(100),
    }
}

/// Time of a flooder's frames: of 60 bytes, of 9000 bytes.
const FLOODS: [Ns; 2] = [Ns::new(60), Ns::new(1_500)];
/// Single frames; trains that use a third of the worker's time, and most of it.
const LONE: Load = Load { frames: 1, period: Ns::from_us(100), frame: Ns::new(60) };
const TRAINS: Load = Load { frames: 32, period: Ns::from_us(200), frame: Ns::new(300) };
const BUSY: Load = Load { frames: 64, period: Ns::from_us(200), frame: Ns::new(300) };
/// More than the worker's time.
const TOO_MUCH: Load = Load { frames: 64, period: Ns::from_us(120), frame: Ns::new(300) };
/// Queues that are polled in each round, and those of the default policy, which sleep.
const POLICIES: [Policy; 2] = [Policy::Spin, Policy::ADAPTIVE];

/// Runs without and with a flooder; prints both.
fn beside(load: Load, flood_frame: Ns, policy: Policy) -> (Seen, Seen) {
    let alone = run(load, None, policy, Mistake::Not);
    let beside = run(load, Some(flood_frame), policy, Mistake::Not);
    let part = load.part() * 100.0;
    println!("{policy}: light ports need {part:.0} %, a flood of {flood_frame} per frame:");
    for (name, seen) in [("alone", &alone), ("beside", &beside)] {
        let Seen { served, share, flooder, p50, p99, max } = seen;
        println!("  {name:6} p50 {p50}, p99 {p99}, max {max} ns; served {served:.3} of it,");
        println!("         {share:.3} of all; flooder {} %", (*flooder * 100).times(LENGTH));
    }
    (alone, beside)
}

/// Longest turn of a flooder: its last burst starts within the quantum.
fn turn(flood_frame: Ns) -> Ns {
    QUANTUM + POLL + flood_frame * BURST_MAX as u64
}

#[test]
fn light_ports_get_their_demand_or_their_share() {
    for policy in POLICIES {
        for flood in FLOODS {
            for load in [LONE, TRAINS, BUSY] {
                let (_, beside) = beside(load, flood, policy);
                assert!(beside.served > 0.99, "{policy} {load:?}: {}", beside.served);
            }
            let (_, beside) = beside(TOO_MUCH, flood, policy);
            assert!(beside.share > 0.97 / (QUIET + 1) as f64, "{policy}: {}", beside.share);
        }
    }
}

#[test]
fn a_single_frame_waits_for_one_turn_of_the_flooder() {
    for flood in FLOODS {
        let (alone, beside) = beside(LONE, flood, Policy::Spin);
        let turn = (turn(flood) + POLL_KICKS).get();
        assert!(beside.max <= alone.max + turn, "{} {} {turn}", beside.max, alone.max);
    }
}

/// Kicks are polled between rounds, so that a frame just late for one poll waits until the round
/// in which the next is due ends, and then for the flooder's turn.
#[test]
fn a_single_frame_of_a_queue_that_sleeps_waits_for_a_poll_of_kicks_besides() {
    for flood in FLOODS {
        let (alone, beside) = beside(LONE, flood, Policy::ADAPTIVE);
        let most = (POLL_KICKS_INTERVAL + POLL_KICKS + turn(flood) * 2).get();
        assert!(beside.max <= alone.max + most, "{} {} {most}", beside.max, alone.max);
        assert!(beside.p50 > alone.p50, "{} {}", beside.p50, alone.p50);
    }
}

#[test]
fn light_ports_that_wait_for_each_other_wait_less_than_twice_as_long() {
    let poll = POLL_KICKS_INTERVAL + POLL_KICKS + turn(FLOODS[0]);
    for (policy, besides) in [(Policy::Spin, Ns::ZERO), (Policy::ADAPTIVE, poll)] {
        for load in [TRAINS, BUSY] {
            let (alone, beside) = beside(load, FLOODS[0], policy);
            let most = 2 * alone.p99 + besides.get();
            assert!(beside.p99 < most, "{policy}: {} {}", beside.p99, alone.p99);
        }
    }
}

/// If each burst is charged the same, whatever it took, ports take turns by bursts.
#[test]
fn canary_turns_by_bursts_are_neither_fair_nor_short() {
    let by_bursts = Mistake::ChargesFlat(QUANTUM / 8);
    for policy in POLICIES {
        let run = |load, flood| run(load, flood, policy, by_bursts);
        let unfair = run(TOO_MUCH, Some(FLOODS[1])).share;
        assert!(unfair < 0.9 / (QUIET + 1) as f64, "{policy}: {unfair}");
        let lone = run(LONE, Some(FLOODS[1])).max;
        assert!(lone > turn(FLOODS[1]).get() + POLL_KICKS.get(), "{policy}: {lone}");
    }
    let run = |load, flood| run(load, flood, Policy::Spin, by_bursts);
    let (alone, beside) = (run(BUSY, None), run(BUSY, Some(FLOODS[0])));
    assert!(beside.p99 > 2 * alone.p99, "{} {}", beside.p99, alone.p99);
}
