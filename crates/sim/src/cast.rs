//! The guests of a run.

use std::sync::Arc;

use switch::forward::Mode;

use crate::flawed::Mistake;
use crate::guest::{Attached, Guest, Kind, Link, Role};
use crate::hypervisor::Hypervisor;
use crate::random::Random;

/// The guests of a run, and how they are connected.
pub(crate) struct Cast {
    pub guests: Vec<Guest>,
    pub links: Vec<Link>,
    pub hypervisor: Arc<Hypervisor>,
    /// A preferred destination, slow and with few receive buffers.
    pub hub: Option<usize>,
    pub mode: Mode,
}

impl Cast {
    pub fn new(mistake: Mistake, random: &mut Random) -> Self {
        let count = random.within(3..7) as usize;
        let mixed = random.one_in(2);
        let hub = random.one_in(2).then(|| random.index(count));
        let hypervisor = Hypervisor::new(mistake);
        let made = (0..count).map(|i| {
            let is_hub = hub == Some(i);
            let attached = if mixed { attached(random) } else { Attached::Virtio };
            let kind = if is_hub { Kind::Slow } else { kind(i, attached, random) };
            let role = Role { attached, kind, few_buffers: is_hub };
            Guest::new(i, role, &hypervisor, mistake, random)
        });
        let (guests, links): (Vec<Guest>, Vec<Link>) = made.unzip();
        let is_tap = |guest: &Guest| guest.attached == Attached::Tap;
        // Only the cross-connect has direct reads, which TAPs support.
        let cross = random.one_in(if guests.iter().any(is_tap) { 3 } else { 5 });
        let mode = if cross { Mode::Cross } else { Mode::Switch };
        Self { guests, links, hypervisor, hub, mode }
    }
}

fn attached(random: &mut Random) -> Attached {
    match random.within(0..3) {
        0 => Attached::Virtio,
        1 => Attached::Xen,
        _ => Attached::Tap,
    }
}

/// Random behaviour of guest `i`. At least two guests are honest, and so is the host.
fn kind(i: usize, attached: Attached, random: &mut Random) -> Kind {
    match random.within(0..8) {
        0 | 1 if i >= 2 && attached != Attached::Tap => Kind::Hostile,
        2 => Kind::Slow,
        3 => Kind::Stalled,
        _ => Kind::Honest,
    }
}

/// An honest guest that can send to a stalling one, and that one.
pub(crate) fn stalling(guests: &[Guest], mode: Mode) -> Option<(usize, usize)> {
    // A stalled TAP is not reported: it does not notify of room.
    let is_stalled = |guest: &Guest| guest.kind == Kind::Stalled && guest.attached != Attached::Tap;
    let stalled = guests.iter().position(is_stalled)?;
    let sends = |i: &usize| guests[*i].is_honest() && (mode == Mode::Switch || *i == stalled ^ 1);
    let from = (0..guests.len()).filter(|i| *i != stalled).find(sends)?;
    Some((from, stalled))
}
