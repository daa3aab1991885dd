//! Of every event index; the published ones are counted, not compared as they wrap.

use super::*;

#[kani::proof]
fn every_event_index_is_passed_exactly_if_it_is_among_the_published() {
    let (event, old, new): (u16, u16, u16) = kani::any();
    let count = |from: u16, to: u16| (u32::from(to) + (1 << 16) - u32::from(from)) % (1 << 16);
    let moved = count(old, new);
    // The first after the event index was the `nth` published one.
    let nth = (count(old, event) + 1) % (1 << 16);
    let [old, new] = [old, new].map(Idx::<u16>::new);
    let passed = need_event(Untrusted::<Idx<u16>>::index(event), new, old);
    assert!(passed == (1..=moved).contains(&nth));
}

#[kani::proof]
fn every_word_is_split_into_its_bits() {
    let word: u64 = kani::any();
    assert!(u64::from(lo16(word)) == word % (1 << 16) && u64::from(lo32(word)) == word % (1 << 32));
}
