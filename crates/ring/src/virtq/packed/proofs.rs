//! Of every position in every ring. A position is counted from the start of a lap with the wrap
//! bit clear: `slot + size * wrap`, of twice the size.

use super::*;

fn any_pos(size: u16) -> Pos {
    Pos { slot: kani::any_where(|slot| *slot < size), wrap: kani::any() }
}

fn any_size() -> u16 {
    kani::any_where(|size| (1..=SIZE_MAX).contains(size))
}

fn count(pos: Pos, size: u16) -> u32 {
    u32::from(pos.slot) + u32::from(size) * u32::from(pos.wrap)
}

/// The entries from one position to another, in the ring's direction.
fn distance(from: Pos, to: Pos, size: u16) -> u32 {
    let (from, to) = (count(from, size), count(to, size));
    if from <= to { to - from } else { to + 2 * u32::from(size) - from }
}

#[kani::proof]
fn every_position_moves_through_the_ring_and_back() {
    let size = any_size();
    let start = any_pos(size);
    let n = kani::any_where(|n| *n <= size);
    let mut pos = start;
    pos.advance(n, size);
    assert!(pos.slot < size);
    assert!(distance(start, pos, size) == u32::from(n));
    assert!(pos.offset() + DESC_LEN <= usize::from(size) * DESC_LEN);
    pos.rewind(n, size);
    assert!(pos == start);
}

#[kani::proof]
fn every_word_of_a_position_is_decoded_or_outside_the_ring() {
    let (size, bits) = (any_size(), kani::any());
    match Pos::from_bits(bits, size) {
        Some(pos) => assert!(pos.slot < size && pos.bits() == bits),
        None => assert!(bits % (1 << 15) >= size),
    }
}

/// A descriptor belongs to one side; what either wrote in one lap says nothing in the next.
#[kani::proof]
fn every_descriptor_is_of_one_side_and_of_one_lap() {
    let (flags, slot): (u16, u16) = kani::any();
    let [now, before] = [false, true].map(|wrap| Pos { slot, wrap });
    let owners = [now.is_available(flags), now.is_used(flags)];
    let lapsed = [before.is_available(flags), before.is_used(flags)];
    assert!([owners, lapsed].as_flattened().iter().filter(|is| **is).count() == 1);
    for pos in [now, before] {
        assert!(pos.is_available(pos.available_bits()) && pos.is_used(pos.used_bits()));
    }
}

/// The event word's owner is notified if the peer passed it, from a position in the ring.
#[kani::proof]
fn every_event_is_wanted_exactly_if_it_was_passed() {
    let size = any_size();
    let (now, event) = (any_pos(size), any_pos(size));
    let moved = kani::any_where(|moved| (1..size).contains(moved));
    let passed = distance(event, now, size);
    let wanted = is_passed(event.bits(), now, moved, size);
    assert!(wanted == (1..=u32::from(moved)).contains(&passed));
    assert!(is_passed(kani::any(), now, kani::any_where(|moved| *moved >= size), size));
}
