//! Of every index, ring and distance; positions are counted without a wrap, in wider integers.

use super::*;

/// The mask of any ring whose size is a power of two, up to `max`.
fn any_mask(max: u32) -> u32 {
    let bits: u32 = kani::any_where(|bits| *bits < u32::BITS);
    let mask = u32::MAX >> bits >> 1;
    kani::assume(mask < max);
    mask
}

/// `a - b` of indices that wrap after `turn` entries.
fn distance(a: u64, b: u64, turn: u64) -> u64 {
    (a + turn - b) % turn
}

#[kani::proof]
fn every_index_moves_and_is_counted_with_the_wrap() {
    let (at, by): (u16, u16) = (kani::any(), kani::any());
    let idx = Idx::<u16>::new(at);
    assert!(u32::from(idx.plus(by).get()) == (u32::from(at) + u32::from(by)) % (1 << 16));
    assert!(idx.plus(by).minus(by) == idx && idx.plus(by).since(idx) == by);
    let mut next = idx;
    assert!(next.advance() == idx && next == idx.plus(1));

    let (at, by): (u32, u32) = (kani::any(), kani::any());
    let idx = Idx::<u32>::new(at);
    assert!(u64::from(idx.plus(by).get()) == (u64::from(at) + u64::from(by)) % (1 << 32));
    assert!(idx.plus(by).minus(by) == idx && idx.plus(by).since(idx) == by);
    let mut next = idx;
    assert!(next.advance() == idx && next == idx.plus(1));
}

/// In every ring of a legal size; offsets of entries stay in an array of as many.
#[kani::proof]
fn every_index_has_a_slot_and_the_next_one_follows() {
    let mask = any_mask(1 << 15);
    let (at, len): (u32, usize) = (kani::any(), kani::any_where(|len| *len <= 16));
    let wide = Idx::<u32>::new(at).slot(mask);
    let (at, mask) = (lo(at), lo(mask));
    let (slot, next) = (Idx::<u16>::new(at).slot(mask), Idx::<u16>::new(at).plus(1).slot(mask));
    assert!(wide == slot);
    assert!(slot.get() <= usize::from(mask));
    assert!(next.get() == if slot.get() == usize::from(mask) { 0 } else { slot.get() + 1 });
    let entries = usize::from(mask) + 1;
    assert!(slot.offset(len) + len <= entries * len);
}

fn lo(word: u32) -> u16 {
    u16::try_from(word % (1 << 16)).expect("it fits")
}

/// Whatever the peer wrote, whatever our index is, and whatever range is allowed.
#[kani::proof]
fn every_index_of_the_peer_counts_only_within_what_is_allowed() {
    let (from, seen, least, most): (u16, u16, u16, u16) = kani::any();
    let (ours, theirs) = (Idx::<u16>::new(from), Untrusted::<Idx<u16>>::index(seen));
    let ahead = distance(seen.into(), from.into(), 1 << 16);
    let allowed = u64::from(least) <= ahead && ahead <= u64::from(most);
    match theirs.check_since(ours, least..=most) {
        Ok(counted) => assert!(allowed && u64::from(counted) == ahead),
        Err(reported) => assert!(!allowed && reported == seen),
    }
    assert!(u64::from(theirs.hint_since(ours)) == ahead);
    assert!(u64::from(theirs.hint_until(ours)) == distance(from.into(), seen.into(), 1 << 16));

    let (from, seen, least, most): (u32, u32, u32, u32) = kani::any();
    let (ours, theirs) = (Idx::<u32>::new(from), Untrusted::<Idx<u32>>::index(seen));
    let ahead = distance(seen.into(), from.into(), 1 << 32);
    let allowed = u64::from(least) <= ahead && ahead <= u64::from(most);
    match theirs.check_since(ours, least..=most) {
        Ok(counted) => assert!(allowed && u64::from(counted) == ahead),
        Err(reported) => assert!(!allowed && reported == seen),
    }
    assert!(u64::from(theirs.hint_since(ours)) == ahead);
    assert!(u64::from(theirs.hint_until(ours)) == distance(from.into(), seen.into(), 1 << 32));
}

#[kani::proof]
fn every_number_of_the_peer_is_plain_only_below_its_end() {
    let (value, end): (u16, u16) = kani::any();
    match Untrusted::new(value).check_below(end) {
        Ok(plain) => assert!(plain == value && value < end),
        Err(reported) => assert!(reported == value && value >= end),
    }
}
