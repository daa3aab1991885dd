//! State shared by the queues of one vif: its link, its rate, its multicast list, its MTU.

use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};

use shm::sync::{Lock, Mutex};
use switch::time::{Instant, Ns};

/// Maximum length of a guest's multicast list, as in Linux's netback.
const MULTICAST_MAX: usize = 64;
/// Minimum burst at any rate: two GSO frames of maximum size.
const BURST_BYTES_MIN: u64 = 131_072;
/// A rate-limited guest is polled again when it may send for this much more time, if the bucket
/// holds that much.
const DUE_MIN: Ns = Ns::from_ms(1);
/// Maximum time until it is polled again, at any rate: its rate may have changed by then.
const DUE_MAX: Ns = Ns::from_secs(1);

/// Rate limit of a guest: `rate` in its back end's directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Bytes per interval.
    pub bytes: u64,
    /// The interval, in microseconds; not 0.
    pub usecs: u64,
}

impl Rate {
    /// Parses `BYTES,USECS` from xenstore. Zero or invalid values mean no limit.
    pub fn parse(text: &str) -> Option<Self> {
        let (bytes, usecs) = text.split_once(',')?;
        let rate = Self { bytes: bytes.trim().parse().ok()?, usecs: usecs.trim().parse().ok()? };
        (rate.bytes > 0 && rate.usecs > 0).then_some(rate)
    }
}

/// A token bucket, shared by all queues of the guest.
#[derive(Debug)]
struct Bucket {
    rate: Rate,
    tokens: u64,
    /// Time up to which tokens were added.
    filled: Instant,
}

impl Bucket {
    fn interval(&self) -> Ns {
        Ns::from_us(self.rate.usecs)
    }

    fn most(&self) -> u64 {
        self.rate.bytes.max(BURST_BYTES_MIN)
    }

    /// Takes `len` tokens; the error is the time to ask again.
    fn take(&mut self, len: u64, now: Instant) -> Result<(), Instant> {
        let interval = self.interval().get();
        let new = (now - self.filled).scale(self.rate.bytes, interval).get();
        // Time that makes no whole byte is kept for the next time.
        if new > 0 {
            self.filled += Ns::new(new).scale(interval, self.rate.bytes);
            self.tokens = self.tokens.saturating_add(new).min(self.most());
        }
        match self.tokens.checked_sub(len) {
            Some(rest) => self.tokens = rest,
            None => return Err(self.due(len, now)),
        }
        Ok(())
    }

    /// Time at which there are tokens for `len` bytes, or for `DUE_MIN` if that is later: a
    /// wake-up per packet would cost more than the packets.
    fn due(&self, len: u64, now: Instant) -> Instant {
        let interval = u128::from(self.interval().get());
        let bytes = u128::from(self.rate.bytes);
        let batch = (bytes * u128::from(DUE_MIN.get()) / interval).min(u128::from(self.most() / 2));
        let missing = batch.max(len.into()).saturating_sub(self.tokens.into());
        let ns = u64::try_from((missing * interval).div_ceil(bytes)).unwrap_or(u64::MAX);
        (self.filled + Ns::new(ns)).min(now + DUE_MAX)
    }
}

/// State shared by the queues of one vif. Set by the control thread or by the guest's requests.
#[derive(Debug)]
pub struct Vif {
    limited: AtomicBool,
    bucket: Mutex<Option<Bucket>>,
    filtering: AtomicBool,
    multicast: Mutex<Vec<[u8; 6]>>,
    /// The list is not known: nothing is filtered.
    lost: AtomicBool,
    /// 0: not set.
    mtu: AtomicU16,
    /// No frames pass in either direction.
    down: AtomicBool,
}

impl Default for Vif {
    fn default() -> Self {
        Self::new()
    }
}

impl Vif {
    /// Link up, no limit, no filter.
    pub fn new() -> Self {
        Self {
            limited: AtomicBool::new(false),
            bucket: Mutex::new(Lock::XenRate, None),
            filtering: AtomicBool::new(false),
            multicast: Mutex::new(Lock::XenMulticast, Vec::new()),
            lost: AtomicBool::new(false),
            mtu: AtomicU16::new(0),
            down: AtomicBool::new(false),
        }
    }

    /// Limits the guest's sending rate; the bucket starts full.
    pub fn set_rate(&self, rate: Option<Rate>) {
        let mut bucket = self.bucket.lock();
        *bucket = rate.map(|rate| Bucket { rate, tokens: 0, filled: Instant::START });
        if let Some(bucket) = bucket.as_mut() {
            bucket.tokens = bucket.most();
        }
        self.limited.store(rate.is_some(), Ordering::Release);
    }

    /// Charges a frame of `len` bytes that is sent now.
    ///
    /// # Errors
    /// The frame may not be sent now; retry at this time.
    #[inline]
    pub(super) fn charge(&self, len: u16, now: Instant) -> Result<(), Instant> {
        if !self.limited.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut bucket = self.bucket.lock();
        bucket.as_mut().map_or(Ok(()), |bucket| bucket.take(len.into(), now))
    }

    /// Refunds a frame of `len` bytes that is sent later.
    #[cold]
    pub(super) fn refund(&self, len: u16) {
        let mut bucket = self.bucket.lock();
        if let Some(bucket) = bucket.as_mut() {
            bucket.tokens = bucket.tokens.saturating_add(len.into()).min(bucket.most());
        }
    }

    /// `request-multicast-control`: only listed multicast is delivered. The list is separate:
    /// addresses may be added before the key is read.
    pub fn filter_multicast(&self, on: bool) {
        self.filtering.store(on, Ordering::Release);
    }

    /// Adds an address; false: the list is full.
    pub(super) fn add_multicast(&self, mac: [u8; 6]) -> bool {
        let mut list = self.multicast.lock();
        if list.contains(&mac) {
            return true;
        }
        if list.len() == MULTICAST_MAX {
            return false;
        }
        list.push(mac);
        true
    }

    /// Removes an address, if it is listed.
    pub(super) fn del_multicast(&self, mac: [u8; 6]) {
        let mut list = self.multicast.lock();
        list.retain(|m| *m != mac);
    }

    /// The list of addresses, for another process.
    pub fn multicast(&self) -> Vec<[u8; 6]> {
        self.multicast.lock().clone()
    }

    /// Sets the list that another process had.
    pub fn set_multicast(&self, mut list: Vec<[u8; 6]>) {
        list.truncate(MULTICAST_MAX);
        *self.multicast.lock() = list;
    }

    /// Notes that the list is not known.
    pub fn lose_multicast(&self) {
        self.lost.store(true, Ordering::Release);
    }

    /// Whether multicast is filtered.
    #[inline]
    pub(super) fn is_filtering(&self) -> bool {
        self.filtering.load(Ordering::Acquire) && !self.lost.load(Ordering::Acquire)
    }

    /// Whether a frame to `mac` is to be delivered. Broadcast always is.
    pub(super) fn accepts(&self, mac: [u8; 6]) -> bool {
        let group = mac[0] & 1 != 0 && mac != [0xff; 6];
        !group || self.multicast.lock().contains(&mac)
    }

    /// Enables or disables all frames. While disabled, frames of the guest are taken and dropped.
    pub fn set_link(&self, up: bool) {
        self.down.store(!up, Ordering::Release);
    }

    /// Whether frames may pass; initially true.
    #[inline]
    pub fn has_link(&self) -> bool {
        !self.down.load(Ordering::Acquire)
    }

    /// Sets the maximum length of a packet after the Ethernet header, in bytes; 0: no limit.
    pub fn set_mtu(&self, mtu: u16) {
        self.mtu.store(mtu, Ordering::Relaxed);
    }

    /// Maximum length of a packet after the Ethernet header, in bytes; 0: no limit.
    pub fn mtu(&self) -> u16 {
        self.mtu.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_has_the_toolstacks_format() {
        assert_eq!(Rate::parse("125000,50000"), Some(Rate { bytes: 125_000, usecs: 50_000 }));
        assert_eq!(Rate::parse(" 1 , 2 "), Some(Rate { bytes: 1, usecs: 2 }));
        let too_long = "1,18446744073709551616";
        for none in ["", ",", "0,0", "1,0", "0,1", "x,1", "1", "1,2,3", "-1,5", too_long] {
            assert_eq!(Rate::parse(none), None, "{none}");
        }
    }

    #[test]
    fn rate_holds_over_time_for_all_queues_together() {
        let vif = Vif::new();
        assert!((0..10_000).all(|_| vif.charge(u16::MAX, Instant::START).is_ok()), "no limit");
        vif.set_rate(Some(Rate { bytes: 1_000_000, usecs: 1_000_000 }));
        let mut sent = 0;
        for us in 0..3_000_000_u64 {
            sent += u64::from(us % 7 == 0 && vif.charge(1000, Instant::from_ns(us * 1000)).is_ok())
                * 1000;
        }
        // Three seconds of tokens, and a full bucket at the start.
        assert!((3_999_000..=4_001_000).contains(&sent), "{sent}");
        vif.set_rate(None);
        assert!((0..100).all(|_| vif.charge(u16::MAX, Instant::START).is_ok()));
    }

    #[test]
    fn largest_frame_passes_at_the_lowest_rate() {
        let vif = Vif::new();
        vif.set_rate(Some(Rate { bytes: 1, usecs: 1 }));
        assert!(
            vif.charge(u16::MAX, Instant::START).is_ok()
                && vif.charge(u16::MAX, Instant::START).is_ok()
        );
        // Two bytes remained.
        let after = Instant::from_ns(65_533_000);
        assert_eq!(vif.charge(u16::MAX, Instant::START), Err(after));
        assert_eq!(vif.charge(u16::MAX, after), Ok(()));
        // One byte per hour: polled again within a second, because the rate may have changed.
        vif.set_rate(Some(Rate { bytes: 1, usecs: 3_600_000_000 }));
        assert!(
            vif.charge(u16::MAX, Instant::START).is_ok()
                && vif.charge(u16::MAX, Instant::START).is_ok()
        );
        assert_eq!(vif.charge(60, Instant::from_ns(5)), Err(Instant::from_ns(1_000_000_005)));
    }

    #[test]
    fn rate_is_reached_with_few_polls() {
        for (bytes, usecs) in [(125_000_000, 1_000_000), (125_000, 100), (1_250, 50_000)] {
            let vif = Vif::new();
            vif.set_rate(Some(Rate { bytes, usecs }));
            let (mut now, mut sent, mut looks) = (Instant::START, 0, 0);
            while now < Instant::START + Ns::from_secs(2) {
                match vif.charge(1500, now) {
                    Ok(()) => sent += 1500,
                    Err(due) => {
                        assert!(due > now, "or it would be polled indefinitely");
                        (now, looks) = (due, looks + 1);
                    }
                }
            }
            let want = 2_000_000 * bytes / usecs;
            let most = bytes.max(BURST_BYTES_MIN);
            assert!((want..=want + 2 * most).contains(&sent), "{bytes}: {sent}, not {want}");
            let naps = (want / (most / 2)).max(2_000);
            // Tokens left from the previous poll shorten a nap a little.
            assert!(looks <= naps * 102 / 100 + 1, "{bytes}: {looks}");
        }
    }

    #[test]
    fn multicast_addresses_added_before_the_filter_stay() {
        let (vif, mac) = (Vif::new(), [1, 0, 0x5e, 0, 0, 9]);
        assert!(vif.add_multicast(mac) && !vif.is_filtering());
        vif.filter_multicast(true);
        assert!(vif.is_filtering() && vif.accepts(mac) && !vif.accepts([1, 0, 0x5e, 0, 0, 8]));
        // Off and on again: Linux's netback also keeps the list until the guest disconnects.
        vif.filter_multicast(false);
        vif.filter_multicast(true);
        assert!(vif.accepts(mac));
    }

    #[test]
    fn multicast_list_is_bounded_and_broadcast_needs_no_entry() {
        let vif = Vif::new();
        vif.filter_multicast(true);
        let mac = |n| [1, 0, 0x5e, 0, 0, n];
        assert!((0..64).all(|n| vif.add_multicast(mac(n))));
        assert!(!vif.add_multicast(mac(64)) && vif.add_multicast(mac(3)), "full, but known");
        assert!(vif.accepts(mac(63)) && !vif.accepts(mac(64)));
        assert!(vif.accepts([0xff; 6]) && vif.accepts([2, 0, 0, 0, 0, 1]));
        vif.del_multicast(mac(63));
        assert!(!vif.accepts(mac(63)) && vif.add_multicast(mac(64)));
    }
}
