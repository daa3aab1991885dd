//! Multicast groups of a vif: the list by which the back end filters, sent over a tx ring.

use std::time::{Duration, Instant};

use ring::xen::Multicast;
use switch::fdb::Mac;

use super::Target;
use crate::ring::{Half, Malformed};
use crate::tx::Tx;

/// Most addresses of a list: no known back end keeps more.
const GROUPS_MAX: usize = 64;
/// Longest wait for the answers. Frames wait that long.
pub const ANSWER_MAX: Duration = Duration::from_secs(5);
/// Interval of polls for answers: with smart poll there may be no event.
const POLL_EVERY: Duration = Duration::from_millis(1);

/// Parses the value of `multicast=`.
pub fn parse(value: &str) -> Result<Vec<[u8; 6]>, String> {
    let mut groups = Vec::new();
    for part in value.split('+') {
        let bad = |why: &str| format!("multicast: '{part}' {why}");
        let mac: Result<Mac, _> = part.parse();
        let Ok(Mac(mac)) = mac else {
            return Err(bad(
                "is not a MAC address; use multicast=01:00:5e:00:00:fb+33:33:00:00:00:01",
            ));
        };
        if mac == [0xff; 6] {
            return Err(bad("is broadcast, which is always received; omit it"));
        }
        if mac[0] & 1 == 0 {
            return Err(bad("is not a multicast address: its first byte is even; omit it"));
        }
        if groups.contains(&mac) {
            return Err(bad("is listed twice; list it once"));
        }
        groups.push(mac);
    }
    if groups.len() > GROUPS_MAX {
        let n = groups.len();
        return Err(format!(
            "multicast: {n} addresses, but back ends accept at most {GROUPS_MAX}; list fewer, or \
             omit multicast= to receive all"
        ));
    }
    Ok(groups)
}

/// The requested groups of a vif, and the back end's state of them.
pub struct Groups {
    /// The vif, for messages.
    at: String,
    wanted: Vec<[u8; 6]>,
    /// The list must be sent.
    due: bool,
    /// The list was sent before, on these rings.
    sent_before: bool,
    /// Groups that the back end refused.
    pub refused: Vec<[u8; 6]>,
}

impl Groups {
    pub fn new(target: &Target) -> Self {
        let (at, wanted) = (target.to_string(), target.multicast.clone());
        Self { at, wanted, due: false, sent_before: false, refused: Vec::new() }
    }

    /// Whether no group is requested.
    pub fn is_empty(&self) -> bool {
        self.wanted.is_empty()
    }

    /// Makes the list due: the back end does not have it, or may have been restarted.
    pub fn set_due(&mut self) {
        self.due = !self.wanted.is_empty();
    }

    /// Sends the list, if due, and waits for the answers.
    pub fn send(&mut self, tx: &mut Tx) -> Result<(), Malformed> {
        if !std::mem::take(&mut self.due) {
            return Ok(());
        }
        // The back end may already have the list, and xen-netback lists an address twice.
        let again = std::mem::replace(&mut self.sent_before, true);
        let change = |mac: &[u8; 6]| {
            let del = again.then_some(Multicast::Del(*mac));
            del.into_iter().chain([Multicast::Add(*mac)])
        };
        let changes: Vec<_> = self.wanted.iter().flat_map(change).collect();
        let (refused, answered) = send_changes(tx, &changes)?;
        match self.news(refused, answered) {
            Some(news) => tracing::warn!("{}: {news}", self.at),
            None if self.refused.is_empty() => {
                tracing::info!("{}: the back end has the list of multicast groups", self.at);
            }
            None => {}
        }
        Ok(())
    }

    /// A message about these answers, unless they are the same as before.
    fn news(&mut self, refused: Vec<[u8; 6]>, answered: bool) -> Option<String> {
        let n = self.wanted.len();
        let before = std::mem::replace(&mut self.refused, refused);
        if !answered {
            return Some(format!(
                "the back end did not confirm {n} multicast groups in time and may drop their \
                 frames; if this persists, omit multicast="
            ));
        }
        if self.refused.is_empty() || self.refused == before {
            return None;
        }
        let names: Vec<_> = self.refused.iter().map(|mac| Mac(*mac).to_string()).collect();
        Some(format!(
            "the back end's multicast list is full: of {n} groups it drops frames for {}; list \
             fewer, or omit multicast= to receive all",
            names.join(", ")
        ))
    }
}

/// Sends changes as the ring has room, also without frames. Returns refused additions, and whether
/// all changes were answered.
fn send_changes(tx: &mut Tx, changes: &[Multicast]) -> Result<(Vec<[u8; 6]>, bool), Malformed> {
    let (deadline, mut sent) = (Instant::now() + ANSWER_MAX, 0);
    loop {
        tx.reclaim()?;
        let Half::XenTx(xen) = &mut tx.ring.half else { unreachable!("a vif's") };
        let before = sent;
        sent += changes[sent..].iter().take_while(|change| xen.queue.change(**change)).count();
        let answered = sent == changes.len() && !xen.queue.is_changing();
        if answered || Instant::now() >= deadline {
            return Ok((xen.queue.take_refused(), answered));
        }
        if sent > before {
            tx.ring.publish();
            tx.ring.kick();
        }
        std::thread::sleep(POLL_EVERY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(n: u8) -> String {
        (0..n).map(|n| format!("01:00:5e:00:00:{n:02x}")).collect::<Vec<_>>().join("+")
    }

    #[test]
    fn too_long_lists_are_rejected() {
        assert_eq!(parse(&list(64)).unwrap().len(), 64);
        let error = parse(&list(65)).unwrap_err();
        assert!(error.contains("65 addresses") && error.contains("list fewer"), "{error}");
    }

    #[test]
    fn a_full_list_is_logged_once() {
        let target = Target::parse(&format!("0,multicast={}", list(3)), true).unwrap();
        let mut groups = Groups::new(&target);
        let [first, .., last] = groups.wanted[..] else { panic!("three") };
        assert_eq!(groups.news(vec![], true), None);
        let news = groups.news(vec![first, last], true).unwrap();
        let names = "of 3 groups it drops frames for 01:00:5e:00:00:00, 01:00:5e:00:00:02;";
        assert!(news.contains(names) && news.contains("list fewer"), "{news}");
        assert_eq!(groups.news(vec![first, last], true), None, "the same refusals again");
        assert!(groups.news(vec![last], true).is_some(), "other refusals");
        assert!(
            groups
                .news(vec![], false)
                .unwrap()
                .contains("did not confirm 3 multicast groups in time")
        );
    }
}
