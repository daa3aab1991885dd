//! Shares of one worker's time by weight, among floods.

use super::*;

/// Always has frames; each burst takes this long.
pub struct Flood(pub Duration);

impl Transmits for Flood {
    fn burst(
        &mut self,
        max: usize,
        _: switch::time::Instant,
        _: &mut Burst<'static>,
        _: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault> {
        spin(self.0);
        Ok(max)
    }

    fn arm(&mut self) -> bool {
        false
    }
}

#[test]
fn equal_floods_are_served_by_weight() {
    let pool = pool(1, Placement::Single, COSTS);
    // The third port has two queues that share its weight; the length of bursts does not matter.
    let floods = [(0, 0, 1, 4), (1, 0, 3, 4), (2, 0, 3, 9), (2, 1, 3, 4)];
    let stats: Vec<Arc<IngressStats>> = floods.map(|_| Arc::default()).to_vec();
    for ((port, queue, weight, us), stats) in floods.into_iter().zip(&stats) {
        let tuning = Arc::new(Tuning::new(Policy::Event));
        tuning.set_weight(weight);
        let source = Source::new(PortId(port), queue, Arc::clone(stats), tuning);
        let ingress = Arc::new(Mutex::new(Lock::Ingress, Fake(Flood(Duration::from_micros(us)))));
        let token = token(PortId(port), queue, false);
        pool.serve(Served { token, source, ingress, kick: None, notifies: true });
    }
    let served = || stats.iter().map(|stats| stats.served_ns.get()).collect::<Vec<_>>();
    let end = Instant::now() + Duration::from_secs(60);
    while served().contains(&0) {
        assert!(Instant::now() < end, "not all are served");
        std::thread::sleep(Duration::from_millis(1));
    }
    let before = served();
    // Time that the CPU took from a queue is compensated in later rounds.
    let mut parts = vec![1; floods.len()];
    let is_by_weight = |parts: &[u64]| {
        [(1, 3.0), (2, 1.5), (3, 1.5)].into_iter().all(|(i, times)| {
            let ratio = parts[i] as f64 / parts[0] as f64;
            (times * 0.75..times * 1.33).contains(&ratio)
        })
    };
    while parts.iter().any(|ns| *ns < 50_000_000) || !is_by_weight(&parts) {
        assert!(Instant::now() < end, "{parts:?}");
        std::thread::sleep(Duration::from_millis(10));
        parts = served().iter().zip(&before).map(|(now, before)| now - before).collect();
    }
    pool.stop();
}
