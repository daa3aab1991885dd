//! A panic ends the process, whichever thread it is in. If the switch is kept, the next one closes
//! the connections of the ports that the thread was serving, and of no others
//! ([0044](../../../../docs/design/0044-panics.md)).

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use api::PORTS_MAX;
use os::StateFile;

use super::keep::{PANICKED, PANICS};
use super::takeover::Source;
use super::{Attach, Event, System};

/// How long a port is held down after its first panic, longer than what counts as a quick end of
/// the process; then twice as long each time.
const HOLD: Duration = Duration::from_secs(2);
/// Longest time.
const HOLD_MAX: Duration = Duration::from_secs(64);
/// After this time without a panic, a port's next one is its first.
const FORGET: Duration = Duration::from_secs(600);

/// Bytes of a port's history: number of panics in a row, and the second of the last one.
const HISTORY: usize = 8;

/// Reads which ports the previous process was serving when it panicked, and for how long each is to
/// be held down; adds to the histories.
pub(super) fn read(
    live: &StateFile,
    ids: &BTreeSet<u16>,
    now: Duration,
) -> BTreeMap<u16, Duration> {
    let mut marks = [0; PORTS_MAX as usize];
    live.marks(PANICKED, &mut marks);
    let panicked = ids.iter().filter(|id| marks.get(usize::from(**id)).is_some_and(|m| *m != 0));
    let hold = panicked.map(|id| {
        let at = PANICS + HISTORY as u64 * u64::from(*id);
        let mut history = [0; HISTORY];
        live.marks(at, &mut history);
        let [count, last_s] =
            [0, 4].map(|at| u32::from_le_bytes(std::array::from_fn(|i| history[at + i])));
        let is_new = now.saturating_sub(Duration::from_secs(last_s.into())) >= FORGET;
        let before = if is_new { 0 } else { count };
        let history =
            [before.saturating_add(1).to_le_bytes(), (now.as_secs() as u32).to_le_bytes()];
        let _ = live.mark(at, &history.concat());
        (*id, HOLD.saturating_mul(1 << before.min(16)).min(HOLD_MAX))
    });
    let hold = hold.collect();
    let _ = live.mark(PANICKED, &[0; PORTS_MAX as usize]);
    hold
}

/// Copies the histories to the marks of the next process.
pub(super) fn carry(from: &StateFile, to: &StateFile) {
    let mut histories = vec![0; HISTORY * usize::from(PORTS_MAX)];
    from.marks(PANICS, &mut histories);
    let _ = to.mark(PANICS, &histories);
}

impl System {
    /// Has a panic of any thread end the process, once the ports that it was serving are marked;
    /// also in the marks of the previous process, which count until ours are stored.
    pub(super) fn end_on_panic(&self, before: Option<StateFile>) {
        let own = self.keep.as_ref().map(|keep| keep.live.as_fd().try_clone_to_owned());
        let own = own.and_then(Result::ok).map(StateFile::open);
        let live: Vec<_> = own.into_iter().chain(before).collect();
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            for port in switch::serving::ports() {
                let at = PANICKED + u64::from(port.0);
                live.iter().for_each(|live| drop(live.mark(at, &[1])));
            }
            report(panic);
            std::process::abort();
        }));
    }

    /// After a panic: the ports that were being served get no peer for a while. It would probably
    /// end this process, too.
    pub(super) fn hold_down(&mut self, source: &Source) {
        let Source::Store(left) = source else { return };
        for (id, time) in &left.panicked {
            let Some(state) = self.ports.values_mut().find(|state| state.port.id.0 == *id) else {
                continue;
            };
            let name = state.spec.name.clone();
            let at = Instant::now() + *time;
            let what = "the switch panicked while it served this port";
            let until = match &mut state.attach {
                Attach::VhostUser(_) | Attach::Stream(_) => {
                    format!("; its peer may connect again in {} s", time.as_secs())
                }
                Attach::Xen(_) => format!("; its vif is set up again in {} s", time.as_secs()),
                _ => String::new(),
            };
            tracing::error!(port = name, "{what}; please report the lines above{until}");
            if let Some(errors) = state.attach.errors_mut() {
                errors.count("panic", what.into());
            }
            let Some(end) = state.attach.endpoint_mut() else { continue };
            if end.connects() {
                end.retry = Some(at);
            } else {
                self.suspend_until(Event::Listener(name), at);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_that_panic_again_are_held_down_for_longer() {
        let live = StateFile::new().unwrap();
        let ids = BTreeSet::from([2, 4095]);
        let panic = |live: &StateFile, id: u16, at_s: u64| {
            live.mark(PANICKED + u64::from(id), &[1]).unwrap();
            let held = read(live, &ids, Duration::from_secs(at_s));
            held.into_iter().map(|(id, time)| (id, time.as_secs())).collect::<Vec<_>>()
        };
        let held = [1000, 1005, 1010, 1020, 1040, 1080, 1150, 1300].map(|at| panic(&live, 2, at));
        assert_eq!(held, [2, 4, 8, 16, 32, 64, 64, 64].map(|time| vec![(2, time)]));
        // Another one has its own history; one that is not a port any more has none.
        assert_eq!(panic(&live, 4095, 1301), [(4095, 2)]);
        assert_eq!(panic(&live, 7, 1302), []);
        // The next process has the histories.
        let next = StateFile::new().unwrap();
        carry(&live, &next);
        assert_eq!(panic(&next, 4095, 1303), [(4095, 4)]);
        assert_eq!(panic(&next, 2, 1300 + FORGET.as_secs()), [(2, 2)]);
        assert!(read(&next, &ids, Duration::from_secs(2000)).is_empty(), "marks are read once");
    }
}
