//! Fair shares of two workers' time among floods.

use super::weights::Flood;
use super::*;

/// Jain's index.
fn evenness(served: &[u64]) -> f64 {
    let sum: f64 = served.iter().map(|ns| *ns as f64).sum();
    let squares: f64 = served.iter().map(|ns| (*ns as f64).powi(2)).sum();
    sum * sum / (served.len() as f64 * squares)
}

/// Floods that start on the first of two workers, and the time that each was served.
struct Floods {
    pool: Arc<Pool>,
    stats: Vec<Arc<IngressStats>>,
}

impl Floods {
    fn new(count: usize) -> Self {
        let pool = pool(2, Placement::Balanced, COSTS);
        let stats: Vec<Arc<IngressStats>> = (0..count).map(|_| Arc::default()).collect();
        for (port, stats) in stats.iter().enumerate() {
            let port = PortId(port as u16);
            let tuning = Arc::new(Tuning::new(Policy::Event));
            let source = Source::new(port, 0, Arc::clone(stats), tuning);
            let flood = Fake(Flood(Duration::from_micros(3 + u64::from(port.0))));
            let ingress = Arc::new(Mutex::new(Lock::Ingress, flood));
            let token = token(port, 0, false);
            pool.serve(Served { token, source, ingress, kick: None, notifies: true });
        }
        Self { pool, stats }
    }

    fn served(&self) -> Vec<u64> {
        self.stats.iter().map(|stats| stats.served_ns.get()).collect()
    }

    fn moves(&self) -> u64 {
        let moves = |worker: &Arc<Handle>| worker.stats.moves.load(Ordering::Relaxed);
        self.pool.workers().iter().map(moves).sum()
    }
}

/// Issue 14, row 16: service is measured by the workers' clock, so both are fully loaded on any
/// machine.
#[test]
fn floods_on_two_workers_are_served_for_the_same_time() {
    // Even splits, and some where queues must take turns.
    for count in [2, 3, 5, 10, 11, 20] {
        let floods = Floods::new(count);
        let end = Instant::now() + Duration::from_secs(60);
        while floods.moves() == 0 || floods.served().contains(&0) {
            assert!(Instant::now() < end, "not all are served: {:?}", floods.served());
            std::thread::sleep(Duration::from_millis(1));
        }
        // Time that the CPU took from a queue is compensated later.
        let before = (floods.served(), floods.moves());
        loop {
            std::thread::sleep(Duration::from_millis(100));
            let after = floods.served();
            let served: Vec<u64> = after.iter().zip(&before.0).map(|(a, b)| a - b).collect();
            let (index, moves) = (evenness(&served), floods.moves() - before.1);
            let all_ns: u64 = served.iter().sum();
            if index >= 0.98 && all_ns > 1_500_000_000 {
                println!("{count} floods: {index:.4}, {moves} moves in {} ms", all_ns / 2_000_000);
                break;
            }
            assert!(Instant::now() < end, "{count} floods: {index}, {moves} moves, {served:?}");
        }
        floods.pool.stop();
    }
}
