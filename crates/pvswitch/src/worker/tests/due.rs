use std::time::Duration;

use shm::sync::{Lock, Mutex};

use super::*;
use switch::time::{Instant, Ns};

/// A queue with a due time and no kick.
struct Slow {
    every: Ns,
    next: Instant,
    /// Times of polls.
    looks: Vec<Instant>,
    found: usize,
}

impl Transmits for Slow {
    fn burst(
        &mut self,
        _: usize,
        now: Instant,
        _: &mut Burst<'static>,
        _: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault> {
        self.looks.push(now);
        if now < self.next {
            return Ok(0);
        }
        self.next = now + self.every;
        self.found += 1;
        Ok(1)
    }

    fn due(&self) -> Option<Instant> {
        Some(self.next)
    }
}

#[test]
fn worker_sleeps_until_a_queue_is_due() {
    let pool = pool(1, Placement::Single, Costs::TYPICAL);
    let slow = Arc::new(Mutex::new(
        Lock::Ingress,
        Fake(Slow {
            every: Ns::from_ms(20),
            next: Instant::START + Ns::from_ms(20),
            looks: Vec::new(),
            found: 0,
        }),
    ));
    let source = Source::new(
        PortId(0),
        0,
        Arc::new(IngressStats::default()),
        Arc::new(Tuning::new(Policy::Event)),
    );
    pool.serve(Served {
        token: token(PortId(0), 0, false),
        source,
        ingress: Arc::<Mutex<Fake<Slow>>>::clone(&slow),
        kick: None,
        notifies: true,
    });
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while slow.lock().0.found < 10 && std::time::Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    pool.stop();
    let slow = &slow.lock().0;
    assert!(slow.found >= 10, "polled when due");
    // Sleeps until a set time count as naps, however long; without one it sleeps before it gets a
    // queue.
    let stats = &pool.workers()[0].stats;
    let (naps, sleeps) = (&stats.naps, &stats.sleeps);
    let (naps, sleeps) = (naps.load(Ordering::SeqCst), sleeps.load(Ordering::SeqCst));
    assert!(naps >= 9 && sleeps <= 2, "{naps} naps, {sleeps} sleeps");
    // The first poll; then two each time: one that finds a frame, one before it sleeps.
    assert!(slow.looks.len() <= 2 * slow.found + 3, "and rarely otherwise: {:?}", slow.looks);
}
