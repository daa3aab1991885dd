//! Workers of one switch, each in a thread with a CPU of its own, and the guests in the threads of
//! their workers: N workers need N CPUs, and guests take none from them.

use std::sync::{Arc, Barrier};
use std::time::Instant;

use ring::virtq::Features;
use rustix::thread::{CpuSet, sched_setaffinity};
use switch::forward::Mode;

use super::guests::{self, FRAMES};
use super::worker::{Clock, Terms, Worker, receiver};

/// Pairs of guests in all, as in the original study of several threads.
const PAIRS: usize = 10;
/// Numbers of workers, as far as there are CPUs.
const WORKERS: [usize; 5] = [1, 2, 4, 8, 10];

/// So many workers, with the same pairs in all.
pub struct Scale {
    pub name: String,
    workers: Vec<Worker>,
    /// Of each turn, time for each frame of all workers together, in ns.
    pub results: Vec<f64>,
}

impl Scale {
    /// All numbers of workers that this machine has CPUs for, of names with these words.
    pub fn all(words: &[String], layout: &str, features: Features, len: u16) -> Vec<Self> {
        let counts = WORKERS.into_iter().filter(|count| *count <= cpus());
        let named = counts.map(|count| (count, format!("{layout} switch workers-{count} {len}")));
        let named = named.filter(|(_, name)| words.iter().all(|word| name.contains(word)));
        named.map(|(count, name)| Self::new(name, count, features, len)).collect()
    }

    fn new(name: String, count: usize, features: Features, len: u16) -> Self {
        let lane = |pair| guests::virtio_to(receiver(pair), features, 1024, len);
        let mut workers: Vec<Vec<_>> = (0..count).map(|_| Vec::new()).collect();
        let least = PAIRS / count;
        let mut pair = 0;
        for (i, pairs) in workers.iter_mut().enumerate() {
            for _ in 0..least + usize::from(i < PAIRS % count) {
                pairs.push((lane(pair), lane(pair)));
                pair += 1;
            }
        }
        let workers = Worker::several(Mode::Switch, workers, Terms::spin(Clock::Real));
        Self { name, workers, results: Vec::new() }
    }

    /// Each worker forwards its part of `turn` frames.
    pub fn turn(&mut self, turn: u64) {
        let count = self.workers.len();
        let (begin, each) = (Arc::new(Barrier::new(count + 1)), turn / PAIRS as u64);
        let workers = self.workers.drain(..).enumerate();
        let threads = workers.map(|(cpu, mut worker)| {
            let begin = Arc::clone(&begin);
            std::thread::spawn(move || {
                pin(cpu);
                begin.wait();
                let pairs = worker.guests.len() / 2;
                for _ in 0..each / FRAMES as u64 {
                    // The first guest of each pair sends.
                    worker.guests.iter_mut().step_by(2).for_each(|guests| guests.send());
                    worker.wake();
                    worker.run_frames((FRAMES * pairs) as u64);
                    let senders = worker.guests.iter_mut().step_by(2);
                    let arrived: usize = senders.map(|guests| guests.take()).sum();
                    assert_eq!(arrived, FRAMES * pairs, "all arrive");
                }
                worker
            })
        });
        let threads: Vec<_> = threads.collect();
        begin.wait();
        let start = Instant::now();
        let done = threads.into_iter().map(|thread| thread.join().expect("no panic"));
        self.workers.extend(done);
        let frames = each / FRAMES as u64 * (FRAMES * PAIRS) as u64;
        self.results.push(start.elapsed().as_nanos() as f64 / frames as f64);
    }
}

fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).expect("a CPU of this machine");
}

/// Number of CPUs of this machine, also if this program is on one of them.
fn cpus() -> usize {
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    let ranges = online.trim().split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(last.parse::<usize>().ok()? + 1 - first.parse::<usize>().ok()?)
    });
    ranges.sum::<usize>().max(1)
}
