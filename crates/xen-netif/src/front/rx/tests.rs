use ring::xen::{BackRx, Extra, Gso, RxResponse, gso_type, rx_flag};
use switch::poll::{Action, Costs, Policy, Poller};
use switch::time::{Instant, Ns};

use super::super::tx::tests::{ALL, page};
use super::*;

/// Both rings of a queue in the front half, and the back half of its rx ring.
fn pair() -> (RxQueue, TxQueue, BackRx, Area) {
    let [ours, theirs] = page();
    let [tx_page, _] = page();
    let rx = RxQueue::new(ours, (0..256).collect());
    let tx = TxQueue::new(tx_page, (256..257).collect(), 1, &ALL);
    (rx, tx, BackRx::attach(theirs.clone()).unwrap(), theirs)
}

fn respond(back: &mut BackRx, flags: u16, offset: u16, status: i16) {
    back.available().unwrap();
    let id = back.take().unwrap().id;
    back.put(RxResponse { id, offset, flags, status });
}

fn offer_all(rx: &mut RxQueue, packet: &mut RxPacket) {
    for slot in packet.slots.drain(..) {
        rx.post(slot.request.id);
    }
    rx.publish();
}

#[test]
fn a_packet_of_several_pages_is_shown_with_its_offloads() {
    for (kind, gso_type, at) in [(gso_type::TCPV4, GSO_TCPV4, 34), (gso_type::TCPV6, GSO_TCPV6, 54)]
    {
        let (mut rx, _, mut back, _) = pair();
        let more = rx_flag::MORE_DATA;
        respond(&mut back, more | rx_flag::EXTRA_INFO | rx_flag::CSUM_BLANK, 0, 4096);
        back.available().unwrap();
        back.take().unwrap();
        back.put_extra(Extra::Gso(Gso { size: 1448, kind, features: 0 }), false);
        respond(&mut back, 0, 16, 1000);
        back.publish();
        let mut packet = RxPacket::new();
        assert_eq!(rx.take(&mut packet, 64), Ok(true));
        assert_eq!((packet.len, packet.gso.unwrap().size), (5096, 1448));
        let pages: Vec<_> = packet.slots.iter().map(|s| (s.request.id, s.offset, s.len)).collect();
        assert_eq!(pages, [(0, 0, 4096), (2, 16, 1000)], "the page under the extra is not data");
        // Ethernet, IPv4 or IPv6, and TCP.
        let mut head = [0; 80];
        if kind == gso_type::TCPV4 {
            head[12..24].copy_from_slice(&[8, 0, 0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6]);
        } else {
            head[12..22].copy_from_slice(&[0x86, 0xdd, 0x60, 0, 0, 0, 0, 20, 6, 64]);
        }
        let want = VnetHdr { flags: NEEDS_CSUM, gso_type, gso_size: 1448, ..VnetHdr::NONE };
        let want = VnetHdr { csum_start: at, csum_offset: 16, ..want };
        assert_eq!(vnet_hdr(&packet, &head), Some(want));
        offer_all(&mut rx, &mut packet);
        assert_eq!(back.available(), Ok(256), "all pages are posted");
    }
}

#[test]
fn invalid_packets_are_counted_by_cause_and_their_pages_posted_again() {
    let (mut rx, _, mut back, raw) = pair();
    let mut packet = RxPacket::new();
    respond(&mut back, 0, 0, -1);
    respond(&mut back, 0, 4000, 97);
    respond(&mut back, 0, 0, 13);
    for i in 0..20 {
        respond(&mut back, if i < 19 { rx_flag::MORE_DATA } else { 0 }, 0, 60);
    }
    respond(&mut back, rx_flag::EXTRA_INFO, 0, 60);
    back.take().unwrap();
    back.put_extra(Extra::Gso(Gso { size: 0, kind: gso_type::TCPV4, features: 0 }), false);
    respond(&mut back, rx_flag::EXTRA_INFO, 0, 60);
    back.take().unwrap();
    back.put_extra(Extra::McastAdd([0; 6]), false);
    // An unknown type, which our back half never writes.
    raw.store_u64(64 + 8 * 26, 9);
    respond(&mut back, 0, 0, 60);
    back.publish();
    assert_eq!(rx.take(&mut packet, 64), Ok(true));
    assert_eq!(packet.slots.len(), 1, "later packets are received");
    let one = RxDrops { status: 1, crosses_page: 1, slots: 1, extra: 1, gso: 1, short: 1, csum: 0 };
    assert_eq!((rx.drops, rx.drops.total()), (one, 6));
    assert!(rx.has_reposted(), "their pages are to be published");
    offer_all(&mut rx, &mut packet);
    assert_eq!(back.available(), Ok(256));
}

#[test]
fn endless_invalid_packets_do_not_block_the_front_half() {
    let (mut rx, _, mut back, _) = pair();
    (0..100).for_each(|_| respond(&mut back, 0, 0, -1));
    back.publish();
    assert_eq!(rx.take(&mut RxPacket::new(), 64), Ok(false));
    assert_eq!(rx.drops.status, 64);
    assert!(rx.has_used());
}

#[test]
fn a_hostile_back_end_loses_the_ring() {
    for rsp_prod in [257_u32, u32::MAX, 1 << 31] {
        let (mut rx, _, _, raw) = pair();
        raw.store_u32(8, rsp_prod);
        let mut packet = RxPacket::new();
        assert!(rx.take(&mut packet, 64).is_err(), "{rsp_prod}");
        assert!(rx.take(&mut packet, 64).is_err(), "{rsp_prod}, permanently");
    }
    let (mut rx, _, mut back, raw) = pair();
    respond(&mut back, 0, 0, 60);
    respond(&mut back, 0, 0, 60);
    back.publish();
    assert_eq!(rx.take(&mut RxPacket::new(), 64), Ok(true));
    raw.store_u32(8, 0);
    let mut next = RxPacket::new();
    let verdicts = [rx.take(&mut next, 64), rx.take(&mut next, 64)];
    assert!(verdicts[1].is_err(), "rsp_prod decreased: {verdicts:?}");
}

/// Number of events that the front half gets in `ms` of virtual time, of which traffic (one packet
/// every 4 us) fills the first `busy_ms`, and the time of its last poll without an event.
fn events(policy: Policy, smart: bool, busy_ms: u64, ms: u64) -> (u64, Instant) {
    const STEP: u64 = 4_000;
    let (mut rx, tx, mut back, _) = pair();
    let mut packet = RxPacket::new();
    let mut poller = Poller::new(policy, Costs::TYPICAL, Instant::START);
    let (mut resting, mut asleep, mut events, mut last_look) =
        (Action::Poll, false, 0, Instant::START);
    let mut received = 0;
    for now in (0..ms * 1_000_000).step_by(STEP as usize).map(Instant::from_ns) {
        if now < Instant::START + Ns::from_ms(busy_ms) {
            respond(&mut back, 0, 0, 60);
            back.publish();
            let plain = back.notify_needed();
            let notify = if smart { back.smart_poll().claim() } else { plain };
            if notify {
                events += 1;
                if std::mem::take(&mut asleep) {
                    poller.wake(now);
                    resting = Action::Poll;
                }
            }
        }
        let due = match resting {
            Action::Poll => true,
            Action::Until(at) => at <= now,
            Action::Arm => false,
        };
        if asleep || !due {
            continue;
        }
        last_look = now;
        let mut frames = 0;
        while frames < poller.budget() && rx.take(&mut packet, 64).unwrap() {
            offer_all(&mut rx, &mut packet);
            frames += 1;
        }
        received += frames as u64;
        resting = poller.next(frames, now);
        if resting == Action::Arm {
            let armed = if smart { rx.stop_polling(&tx) } else { rx.arm() };
            asleep = armed == Armed::Armed;
            resting = if asleep { Action::Arm } else { Action::Poll };
        }
    }
    assert_eq!(received, busy_ms * 1_000_000 / STEP, "{policy}: all received");
    (events, last_look)
}

#[test]
fn smart_poll_saves_95_of_100_events_and_its_timer_stops() {
    let timer = Policy::Timer { hz: 1000 };
    let (plain, _) = events(Policy::Event, false, 400, 800);
    let (smart, last_look) = events(timer, true, 400, 800);
    assert_eq!(plain, 100_000, "one event per separate packet");
    assert!(smart * 20 <= plain, "{smart} of {plain} events remain");
    let idle_ms = last_look.periods(Ns::from_ms(1)) - 400;
    assert!((100..200).contains(&idle_ms), "the timer ran {idle_ms} ms after the last packet");
    // Without arming the event, as in the protocol, the result is the same with any peer.
    let (unarmed, last_look) = events(timer, false, 400, 800);
    assert!(unarmed * 20 <= plain, "{unarmed} of {plain} events remain");
    assert!(last_look.periods(Ns::from_ms(1)) - 400 < 200);
}

#[test]
fn a_response_before_the_flag_is_cleared_is_found() {
    let (mut rx, tx, mut back, _) = pair();
    let mut packet = RxPacket::new();
    back.smart_poll().set(true);
    assert_eq!(rx.take(&mut packet, 64), Ok(false));
    respond(&mut back, 0, 0, 60);
    back.publish();
    assert!(!back.smart_poll().claim(), "we are expected to poll: no event");
    assert_eq!(rx.stop_polling(&tx), Armed::WorkPending);
    assert_eq!(rx.take(&mut packet, 64), Ok(true));
    assert_eq!(rx.stop_polling(&tx), Armed::Armed);
    respond(&mut back, 0, 0, 60);
    back.publish();
    assert!(back.smart_poll().claim(), "the next one causes an event");
}
