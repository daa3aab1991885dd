//! Effect of a flooder on other ports, in virtual time: one worker serves eight light ports and one
//! that always has frames, by deficit round-robin, as in the program.
//!
//! A light port is served for its whole demand if that is less than its share of the worker's time,
//! otherwise for its share. Its single frame waits for the flooder once: for a quantum, and for the
//! last burst's excess over it. On an otherwise idle worker this is many times the wait without the
//! flooder, which is almost 0; if light ports wait for each other, floods of small frames less than
//! double the wait.

#[path = "common/random.rs"]
mod random;

use std::collections::VecDeque;

use switch::fair::{QUANTUM, Share};
use switch::frame::BURST_MAX;
use switch::time::Ns;

use random::Random;

const QUIET: usize = 8;
const POLL_NS: u64 = 100;
const LENGTH_NS: u64 = 500_000_000;

/// Load of each light port: frames per train, period and cost in ns; trains at random times.
#[derive(Clone, Copy, Debug)]
struct Load {
    frames: u64,
    period_ns: u64,
    frame_ns: u64,
}

impl Load {
    /// Part of the worker's time for all light ports together.
    fn part(self) -> f64 {
        (QUIET as u64 * self.frames * self.frame_ns) as f64 / self.period_ns as f64
    }
}

struct Port {
    share: Share,
    /// Arrival time of each waiting frame.
    frames: VecDeque<u64>,
    next_ns: u64,
    served_ns: u64,
    asked_ns: u64,
    late: Vec<u64>,
}

/// How ports take turns.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turns {
    ByShare,
    /// Each while it has frames, up to this many bursts: deliberately wrong, to show in the test.
    Bursts(u32),
}

struct Seen {
    /// The least time that a light port was served, relative to its demand, and to the total.
    served: f64,
    share: f64,
    flooder_ns: u64,
    p50: u64,
    p99: u64,
    max: u64,
}

impl Port {
    fn come(&mut self, load: Load, now: u64, random: &mut Random) {
        while self.next_ns <= now {
            self.frames.extend((0..load.frames).map(|_| self.next_ns));
            self.asked_ns += load.frames * load.frame_ns;
            // Between half a period and one and a half: the mean is the period.
            self.next_ns += load.period_ns / 2 + random.within(load.period_ns);
        }
    }

    /// Runs one burst; returns its end.
    fn burst(&mut self, load: Load, now: u64) -> u64 {
        let frames = self.frames.len().min(BURST_MAX);
        self.late.extend(self.frames.drain(..frames).map(|came| now - came));
        let took = frames as u64 * load.frame_ns;
        self.served_ns += took;
        now + POLL_NS + took
    }
}

/// Runs light ports alone, or with one that floods with frames of this cost in ns.
fn run(load: Load, flood_frame_ns: Option<u64>, turns: Turns) -> Seen {
    let mut random = Random(1);
    let port = |next_ns| Port {
        share: Share::default(),
        frames: VecDeque::new(),
        next_ns,
        served_ns: 0,
        asked_ns: 0,
        late: Vec::new(),
    };
    let mut ports: Vec<Port> = (0..QUIET).map(|_| port(random.within(load.period_ns))).collect();
    let mut flooder = flood_frame_ns.map(|_| Share::default());
    let (mut now, mut flooder_ns) = (0, 0);
    while now < LENGTH_NS {
        for port in &mut ports {
            port.share.grant(1, 1);
            let mut bursts = 0;
            while turns != Turns::ByShare || port.share.has_credit() {
                port.come(load, now, &mut random);
                let (empty, began) = (port.frames.is_empty(), now);
                now = port.burst(load, now);
                bursts += 1;
                if empty || matches!(turns, Turns::Bursts(most) if bursts >= most) {
                    break;
                }
                port.share.charge(Ns::new(now - began));
            }
        }
        let Some(share) = &mut flooder else { continue };
        share.grant(1, 1);
        let took = POLL_NS + BURST_MAX as u64 * flood_frame_ns.unwrap_or(0);
        let mut bursts = 0;
        while match turns {
            Turns::ByShare => share.has_credit(),
            Turns::Bursts(most) => bursts < most,
        } {
            share.charge(Ns::new(took));
            now += took;
            flooder_ns += took;
            bursts += 1;
        }
    }
    let mut late: Vec<u64> = ports.iter().flat_map(|port| port.late.iter().copied()).collect();
    late.sort_unstable();
    let at = |per_cent: usize| late[(late.len() - 1) * per_cent / 100];
    let least = |part: fn(&Port) -> f64| ports.iter().map(part).fold(f64::MAX, f64::min);
    let served = least(|port| port.served_ns as f64 / port.asked_ns as f64);
    let share = least(|port| port.served_ns as f64) / now as f64;
    Seen { served, share, flooder_ns, p50: at(50), p99: at(99), max: at(100) }
}

/// Cost of a flooder's frames in ns: of 60 bytes, of 9000 bytes.
const FLOODS: [u64; 2] = [60, 1_500];
/// Single frames; trains that use a third of the worker's time, and most of it.
const LONE: Load = Load { frames: 1, period_ns: 100_000, frame_ns: 60 };
const TRAINS: Load = Load { frames: 32, period_ns: 200_000, frame_ns: 300 };
const BUSY: Load = Load { frames: 64, period_ns: 200_000, frame_ns: 300 };
/// More than the worker's time.
const TOO_MUCH: Load = Load { frames: 64, period_ns: 120_000, frame_ns: 300 };

/// Runs without and with a flooder; prints both.
fn beside(load: Load, flood_frame_ns: u64) -> (Seen, Seen) {
    let alone = run(load, None, Turns::ByShare);
    let beside = run(load, Some(flood_frame_ns), Turns::ByShare);
    let part = load.part() * 100.0;
    println!("light ports need {part:.0} %, a flood of {flood_frame_ns} ns per frame:");
    for (name, seen) in [("alone", &alone), ("beside", &beside)] {
        let Seen { served, share, flooder_ns, p50, p99, max } = seen;
        println!("  {name:6} p50 {p50}, p99 {p99}, max {max} ns; served {served:.3} of it,");
        println!("         {share:.3} of all; flooder {} %", 100 * flooder_ns / LENGTH_NS);
    }
    (alone, beside)
}

#[test]
fn light_ports_get_their_demand_or_their_share() {
    for flood in FLOODS {
        for load in [LONE, TRAINS, BUSY] {
            let (_, beside) = beside(load, flood);
            assert!(beside.served > 0.99, "{load:?}");
        }
        let (_, beside) = beside(TOO_MUCH, flood);
        assert!(beside.share > 0.97 / (QUIET + 1) as f64);
    }
}

#[test]
fn a_single_frame_waits_for_one_turn_of_the_flooder() {
    for flood in FLOODS {
        let (alone, beside) = beside(LONE, flood);
        // Its last burst starts within the quantum.
        let turn = QUANTUM.get() + POLL_NS + BURST_MAX as u64 * flood;
        assert!(beside.max <= alone.max + turn, "{} {} {turn}", beside.max, alone.max);
    }
}

#[test]
fn light_ports_that_wait_for_each_other_wait_less_than_twice_as_long() {
    for load in [TRAINS, BUSY] {
        let (alone, beside) = beside(load, FLOODS[0]);
        assert!(beside.p99 < 2 * alone.p99, "{} {}", beside.p99, alone.p99);
    }
}

#[test]
fn canary_turns_by_bursts_are_neither_fair_nor_short() {
    let turns = Turns::Bursts(8);
    assert!(run(TOO_MUCH, Some(FLOODS[1]), turns).share < 0.9 / (QUIET + 1) as f64);
    let (alone, beside) = (run(BUSY, None, turns), run(BUSY, Some(FLOODS[0]), turns));
    assert!(beside.p99 > 2 * alone.p99, "{} {}", beside.p99, alone.p99);
    let lone = run(LONE, Some(FLOODS[1]), turns);
    assert!(lone.max > QUANTUM.get() + POLL_NS + BURST_MAX as u64 * FLOODS[1]);
}
