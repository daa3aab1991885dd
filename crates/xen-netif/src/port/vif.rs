//! What the queues of one vif share: its link, its rate, its multicast list, its MTU.

use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Mutex, PoisonError};

/// Longest multicast list of a guest, as in Linux's netback.
const MULTICAST_MAX: usize = 64;
/// What may be sent at once however low the rate: a whole GSO frame, twice.
const BURST_BYTES_MIN: u64 = 131_072;
/// A guest that may not send is looked at again with this much more to send, in ns, if the bucket
/// holds that much.
const DUE_NS_MIN: u128 = 1_000_000;
/// And in this time, in ns, however low its rate: by then it may have another.
const DUE_NS_MAX: u64 = 1_000_000_000;

/// How much a guest may send: `rate` in its back end's directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Bytes for each interval.
    pub bytes: u64,
    /// The interval, in microseconds; not 0.
    pub usecs: u64,
}

impl Rate {
    /// From xenstore: `BYTES,USECS`. Zero of either, or anything else, is no limit.
    pub fn parse(text: &str) -> Option<Self> {
        let (bytes, usecs) = text.split_once(',')?;
        let rate = Self { bytes: bytes.trim().parse().ok()?, usecs: usecs.trim().parse().ok()? };
        (rate.bytes > 0 && rate.usecs > 0).then_some(rate)
    }
}

/// A token bucket. One for all queues, or a guest would get its rate as often as it has queues.
#[derive(Debug)]
struct Bucket {
    rate: Rate,
    tokens: u64,
    /// Up to when tokens were handed out, in ns.
    filled_ns: u64,
}

impl Bucket {
    fn most(&self) -> u64 {
        self.rate.bytes.max(BURST_BYTES_MIN)
    }

    /// Takes `len` tokens, or says when to ask again, in ns.
    fn take(&mut self, len: u64, now_ns: u64) -> Result<(), u64> {
        let elapsed = u128::from(now_ns.saturating_sub(self.filled_ns));
        let interval_ns = u128::from(self.rate.usecs) * 1000;
        let new = elapsed * u128::from(self.rate.bytes) / interval_ns;
        // Time that makes no whole byte is kept for the next time.
        if new > 0 {
            let used = new * interval_ns / u128::from(self.rate.bytes);
            self.filled_ns += u64::try_from(used).unwrap_or(u64::MAX);
            let new = u64::try_from(new).unwrap_or(u64::MAX);
            self.tokens = self.tokens.saturating_add(new).min(self.most());
        }
        match self.tokens.checked_sub(len) {
            Some(rest) => self.tokens = rest,
            None => return Err(self.due(len, now_ns)),
        }
        Ok(())
    }

    /// When there are tokens for `len` bytes; or for what comes in `DUE_NS_MIN`, if that is more:
    /// a wake-up for each packet would cost more than the packets.
    fn due(&self, len: u64, now_ns: u64) -> u64 {
        let interval_ns = u128::from(self.rate.usecs) * 1000;
        let bytes = u128::from(self.rate.bytes);
        let batch = (bytes * DUE_NS_MIN / interval_ns).min(u128::from(self.most() / 2));
        let missing = batch.max(len.into()).saturating_sub(self.tokens.into());
        let ns = u64::try_from((missing * interval_ns).div_ceil(bytes)).unwrap_or(u64::MAX);
        self.filled_ns.saturating_add(ns).min(now_ns.saturating_add(DUE_NS_MAX))
    }
}

/// What the queues of one vif share. Set by the control thread, or by the guest's own requests.
#[derive(Debug, Default)]
pub struct Vif {
    limited: AtomicBool,
    bucket: Mutex<Option<Bucket>>,
    filtering: AtomicBool,
    multicast: Mutex<Vec<[u8; 6]>>,
    /// 0: none was set.
    mtu: AtomicU16,
    /// Nothing passes, either way.
    down: AtomicBool,
}

impl Vif {
    /// Link up, no limit, no filter.
    pub fn new() -> Self {
        Self::default()
    }

    /// Limits what the guest sends; a full bucket to begin with.
    pub fn set_rate(&self, rate: Option<Rate>) {
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        *bucket = rate.map(|rate| Bucket { rate, tokens: 0, filled_ns: 0 });
        if let Some(bucket) = bucket.as_mut() {
            bucket.tokens = bucket.most();
        }
        self.limited.store(rate.is_some(), Ordering::Release);
    }

    /// Pays for a frame of `len` bytes that is sent now.
    ///
    /// # Errors
    /// It may not be sent now; ask again at this time, in ns.
    #[inline]
    pub(super) fn pay(&self, len: u16, now_ns: u64) -> Result<(), u64> {
        if !self.limited.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        bucket.as_mut().map_or(Ok(()), |bucket| bucket.take(len.into(), now_ns))
    }

    /// Gives back what was paid for a frame of `len` bytes that is sent later.
    #[cold]
    pub(super) fn refund(&self, len: u16) {
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(bucket) = bucket.as_mut() {
            bucket.tokens = bucket.tokens.saturating_add(len.into()).min(bucket.most());
        }
    }

    /// `request-multicast-control`: only multicast that the guest asked for goes to it. The list
    /// is the guest's: it may name addresses before anyone saw its key.
    pub fn filter_multicast(&self, on: bool) {
        self.filtering.store(on, Ordering::Release);
    }

    /// Adds an address; false: the list is full.
    pub(super) fn add_multicast(&self, mac: [u8; 6]) -> bool {
        let mut list = self.multicast.lock().unwrap_or_else(PoisonError::into_inner);
        if list.contains(&mac) {
            return true;
        }
        if list.len() == MULTICAST_MAX {
            return false;
        }
        list.push(mac);
        true
    }

    /// Removes an address, if it is there.
    pub(super) fn del_multicast(&self, mac: [u8; 6]) {
        let mut list = self.multicast.lock().unwrap_or_else(PoisonError::into_inner);
        list.retain(|m| *m != mac);
    }

    /// Whether multicast is filtered.
    #[inline]
    pub(super) fn is_filtering(&self) -> bool {
        self.filtering.load(Ordering::Acquire)
    }

    /// Whether a frame to `mac` is wanted. Broadcast always is.
    pub(super) fn wants(&self, mac: [u8; 6]) -> bool {
        let group = mac[0] & 1 != 0 && mac != [0xff; 6];
        !group || self.multicast.lock().unwrap_or_else(PoisonError::into_inner).contains(&mac)
    }

    /// Whether frames may pass at all. What the guest sends otherwise is taken and dropped.
    pub fn set_link(&self, up: bool) {
        self.down.store(!up, Ordering::Release);
    }

    /// As [`set_link`](Self::set_link) had it; up at first.
    #[inline]
    pub fn has_link(&self) -> bool {
        !self.down.load(Ordering::Acquire)
    }

    /// Longest packet behind an Ethernet header, in bytes; 0: whatever there is.
    pub fn set_mtu(&self, mtu: u16) {
        self.mtu.store(mtu, Ordering::Relaxed);
    }

    /// As [`set_mtu`](Self::set_mtu) had it.
    pub fn mtu(&self) -> u16 {
        self.mtu.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_is_read_as_the_toolstack_writes_it() {
        assert_eq!(Rate::parse("125000,50000"), Some(Rate { bytes: 125_000, usecs: 50_000 }));
        assert_eq!(Rate::parse(" 1 , 2 "), Some(Rate { bytes: 1, usecs: 2 }));
        let too_long = "1,18446744073709551616";
        for none in ["", ",", "0,0", "1,0", "0,1", "x,1", "1", "1,2,3", "-1,5", too_long] {
            assert_eq!(Rate::parse(none), None, "{none}");
        }
    }

    #[test]
    fn rate_holds_over_time_and_whatever_the_queues() {
        let vif = Vif::new();
        assert!((0..10_000).all(|_| vif.pay(u16::MAX, 0).is_ok()), "no limit");
        vif.set_rate(Some(Rate { bytes: 1_000_000, usecs: 1_000_000 }));
        let mut sent = 0;
        for us in 0..3_000_000_u64 {
            sent += u64::from(us % 7 == 0 && vif.pay(1000, us * 1000).is_ok()) * 1000;
        }
        // Three seconds' worth, and the bucket that was full.
        assert!((3_999_000..=4_001_000).contains(&sent), "{sent}");
        vif.set_rate(None);
        assert!((0..100).all(|_| vif.pay(u16::MAX, 0).is_ok()));
    }

    #[test]
    fn largest_frame_passes_at_the_lowest_rate() {
        let vif = Vif::new();
        vif.set_rate(Some(Rate { bytes: 1, usecs: 1 }));
        assert!(vif.pay(u16::MAX, 0).is_ok() && vif.pay(u16::MAX, 0).is_ok());
        // Two bytes were left.
        assert_eq!(vif.pay(u16::MAX, 0), Err(65_533_000));
        assert_eq!(vif.pay(u16::MAX, 65_533_000), Ok(()));
        // One byte an hour: looked at again within a second, for there may be another by then.
        vif.set_rate(Some(Rate { bytes: 1, usecs: 3_600_000_000 }));
        assert!(vif.pay(u16::MAX, 0).is_ok() && vif.pay(u16::MAX, 0).is_ok());
        assert_eq!(vif.pay(60, 5), Err(1_000_000_005));
    }

    #[test]
    fn rate_is_reached_by_looking_when_told_and_seldom() {
        for (bytes, usecs) in [(125_000_000, 1_000_000), (125_000, 100), (1_250, 50_000)] {
            let vif = Vif::new();
            vif.set_rate(Some(Rate { bytes, usecs }));
            let (mut now, mut sent, mut looks) = (0, 0, 0);
            while now < 2_000_000_000 {
                match vif.pay(1500, now) {
                    Ok(()) => sent += 1500,
                    Err(due) => {
                        assert!(due > now, "or it would be asked for ever");
                        (now, looks) = (due, looks + 1);
                    }
                }
            }
            let want = 2_000_000 * bytes / usecs;
            let most = bytes.max(BURST_BYTES_MIN);
            assert!((want..=want + 2 * most).contains(&sent), "{bytes}: {sent}, not {want}");
            let naps = (want / (most / 2)).max(2_000);
            // What was left of the last time shortens a nap a little.
            assert!(looks <= naps * 102 / 100 + 1, "{bytes}: {looks}");
        }
    }

    #[test]
    fn multicast_addresses_that_come_before_the_filter_stay() {
        let (vif, mac) = (Vif::new(), [1, 0, 0x5e, 0, 0, 9]);
        assert!(vif.add_multicast(mac) && !vif.is_filtering());
        vif.filter_multicast(true);
        assert!(vif.is_filtering() && vif.wants(mac) && !vif.wants([1, 0, 0x5e, 0, 0, 8]));
        // Off and on again: Linux's netback keeps the list, too, until the guest disconnects.
        vif.filter_multicast(false);
        vif.filter_multicast(true);
        assert!(vif.wants(mac));
    }

    #[test]
    fn multicast_list_is_bounded_and_broadcast_needs_no_entry() {
        let vif = Vif::new();
        vif.filter_multicast(true);
        let mac = |n| [1, 0, 0x5e, 0, 0, n];
        assert!((0..64).all(|n| vif.add_multicast(mac(n))));
        assert!(!vif.add_multicast(mac(64)) && vif.add_multicast(mac(3)), "full, but known");
        assert!(vif.wants(mac(63)) && !vif.wants(mac(64)));
        assert!(vif.wants([0xff; 6]) && vif.wants([2, 0, 0, 0, 0, 1]));
        vif.del_multicast(mac(63));
        assert!(!vif.wants(mac(63)) && vif.add_multicast(mac(64)));
    }
}
