//! Every interleaving of the two halves of Xen's rings, with loom:
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p pvswitch-ring --test loom_xen --release`
//!
//! Three models for each ring. `publish_take`: what one side published is whole when the other
//! sees it. `arm_requests`: the back half never sleeps on a request without having been notified.
//! `arm_responses`: the front half never sleeps on a response. Then smart poll: no response stays
//! behind while the front half is asleep and not notified. Canaries, the same models with a half
//! deliberately broken, must fail, or the models prove nothing.
#![cfg(loom)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use loom::sync::atomic::AtomicBool;
use loom::thread;
use ring::xen::{
    Armed, BackCtrl, BackRx, BackTx, CTRL_SLOT_LEN, CtrlRequest, CtrlResponse, FrontCtrl, FrontRx,
    FrontTx, Packet, RX_SLOT_LEN, RxPacket, RxRequest, RxResponse, SmartPoll, TX_SLOT_LEN,
    TxPacket, TxRequest, modelled_page, status,
};
use shm::Area;
use shm::sync::{Ordering, fence};

/// The indices wrap between the first and the second slot used.
const START: u32 = u32::MAX;
const REQ_PROD: usize = 0;
const REQ_EVENT: usize = 4;
const RSP_PROD: usize = 8;
const RSP_EVENT: usize = 12;

/// Operations of one ring that the models need: one request and one response.
trait Ring: 'static {
    type Front: Send + 'static;
    type Back: Send + 'static;
    fn page() -> Area;
    fn halves(page: &Area) -> (Self::Front, Self::Back);
    /// Makes request `i`, recognisable, not published.
    fn request(front: &mut Self::Front, i: u16);
    fn publish(front: &mut Self::Front) -> bool;
    /// Takes request `i` if it is published.
    fn take(back: &mut Self::Back, i: u16) -> bool;
    /// Answers the oldest request, `i`, and publishes; returns whether to notify.
    fn answer(back: &mut Self::Back, i: u16) -> bool;
    /// Takes response `i` if it is published.
    fn collect(front: &mut Self::Front, i: u16) -> bool;
    fn back_arm(back: &mut Self::Back) -> Armed;
    fn front_arm(front: &mut Self::Front) -> Armed;
    fn has_work(back: &Self::Back) -> bool;
    fn has_responses(front: &Self::Front) -> bool;
}

struct Tx;
struct Rx;
struct Ctrl;

impl Ring for Tx {
    type Front = FrontTx;
    type Back = BackTx;
    fn page() -> Area {
        modelled_page(2, TX_SLOT_LEN)
    }
    fn halves(page: &Area) -> (FrontTx, BackTx) {
        let front = FrontTx::starting_at(page.clone(), START);
        (front, BackTx::attach(page.clone()).unwrap())
    }
    fn request(front: &mut FrontTx, i: u16) {
        let gref = 1000 + u32::from(i);
        let first = TxRequest { gref, offset: i, flags: 0, id: i % 2, size: 60 + i };
        assert!(front.add(first, &[], &[]));
    }
    fn publish(front: &mut FrontTx) -> bool {
        front.publish();
        front.notify_needed()
    }
    fn take(back: &mut BackTx, i: u16) -> bool {
        let mut packet = TxPacket::new();
        let taken = back.take(&mut packet).unwrap();
        if taken.is_some() {
            assert_eq!(taken, Some(Packet::Frame));
            assert_eq!(packet.slots()[0].gref, 1000 + u32::from(i));
            assert_eq!(packet.len, 60 + i);
        }
        taken.is_some()
    }
    fn answer(back: &mut BackTx, _: u16) -> bool {
        back.put(status::OKAY);
        back.publish();
        back.notify_needed()
    }
    fn collect(front: &mut FrontTx, i: u16) -> bool {
        let response = front.take_response().unwrap();
        assert!(response.is_none_or(|r| r.id == i % 2 && r.status == status::OKAY));
        response.is_some()
    }
    fn back_arm(back: &mut BackTx) -> Armed {
        back.arm()
    }
    fn front_arm(front: &mut FrontTx) -> Armed {
        front.arm()
    }
    fn has_work(back: &BackTx) -> bool {
        back.has_work()
    }
    fn has_responses(front: &FrontTx) -> bool {
        front.has_responses()
    }
}

impl Ring for Rx {
    type Front = FrontRx;
    type Back = BackRx;
    fn page() -> Area {
        modelled_page(2, RX_SLOT_LEN)
    }
    fn halves(page: &Area) -> (FrontRx, BackRx) {
        let front = FrontRx::starting_at(page.clone(), START);
        (front, BackRx::attach(page.clone()).unwrap())
    }
    fn request(front: &mut FrontRx, i: u16) {
        assert!(front.post(RxRequest { id: i, gref: 1000 + u32::from(i) }));
    }
    fn publish(front: &mut FrontRx) -> bool {
        front.publish();
        front.notify_needed()
    }
    fn take(back: &mut BackRx, i: u16) -> bool {
        if back.available().unwrap() == 0 {
            return false;
        }
        assert_eq!(back.take(), Some(RxRequest { id: i, gref: 1000 + u32::from(i) }));
        true
    }
    fn answer(back: &mut BackRx, i: u16) -> bool {
        back.put(RxResponse { id: i, offset: 0, flags: 0, status: 60 + i as i16 });
        back.publish();
        back.notify_needed()
    }
    fn collect(front: &mut FrontRx, i: u16) -> bool {
        let mut packet = RxPacket::new();
        let taken = front.take(&mut packet).unwrap();
        if taken.is_some() {
            assert_eq!((taken, packet.len), (Some(Ok(())), 60 + u32::from(i)));
            assert_eq!(packet.slots[0].request.gref, 1000 + u32::from(i));
        }
        taken.is_some()
    }
    fn back_arm(back: &mut BackRx) -> Armed {
        back.arm(1)
    }
    fn front_arm(front: &mut FrontRx) -> Armed {
        front.arm()
    }
    fn has_work(back: &BackRx) -> bool {
        back.has_room(1)
    }
    fn has_responses(front: &FrontRx) -> bool {
        front.has_responses()
    }
}

impl Ring for Ctrl {
    type Front = FrontCtrl;
    type Back = BackCtrl;
    fn page() -> Area {
        modelled_page(2, CTRL_SLOT_LEN)
    }
    fn halves(page: &Area) -> (FrontCtrl, BackCtrl) {
        let front = FrontCtrl::starting_at(page.clone(), START);
        (front, BackCtrl::attach(page.clone()).unwrap())
    }
    fn request(front: &mut FrontCtrl, i: u16) {
        assert!(front.put(CtrlRequest { id: i, kind: 1, data: [u32::from(i); 3] }));
    }
    fn publish(front: &mut FrontCtrl) -> bool {
        front.publish();
        front.notify_needed()
    }
    fn take(back: &mut BackCtrl, i: u16) -> bool {
        let taken = back.take().unwrap();
        assert!(taken.is_none_or(|r| r.id == i && r.data == [u32::from(i); 3]));
        taken.is_some()
    }
    fn answer(back: &mut BackCtrl, i: u16) -> bool {
        back.put(CtrlResponse { id: i, kind: 1, status: 0, data: 60 + u32::from(i) });
        back.publish();
        back.notify_needed()
    }
    fn collect(front: &mut FrontCtrl, i: u16) -> bool {
        let taken = front.take().unwrap();
        assert!(taken.is_none_or(|r| r.id == i && r.data == 60 + u32::from(i)));
        taken.is_some()
    }
    fn back_arm(back: &mut BackCtrl) -> Armed {
        back.arm()
    }
    fn front_arm(front: &mut FrontCtrl) -> Armed {
        front.arm()
    }
    fn has_work(back: &BackCtrl) -> bool {
        back.has_work()
    }
    fn has_responses(front: &FrontCtrl) -> bool {
        front.has_responses()
    }
}

/// One request and response before the model branches, so that the ring is not fresh.
fn one_round<R: Ring>(front: &mut R::Front, back: &mut R::Back) {
    R::request(front, 9);
    let _ = R::publish(front);
    assert!(R::take(back, 9));
    let _ = R::answer(back, 9);
    assert!(R::collect(front, 9));
}

// ---- what is published is whole ----

fn publish_take<R: Ring>() {
    loom::model(|| {
        let page = R::page();
        let (mut front, mut back) = R::halves(&page);
        let peer = thread::spawn(move || {
            let mut served = 0;
            for _ in 0..2 {
                while R::take(&mut back, served) {
                    let _ = R::answer(&mut back, served);
                    served += 1;
                }
            }
            served
        });
        R::request(&mut front, 0);
        R::request(&mut front, 1);
        let _ = R::publish(&mut front);
        let mut got = 0;
        while R::collect(&mut front, got) {
            got += 1;
        }
        let served = peer.join().unwrap();
        while R::collect(&mut front, got) {
            got += 1;
        }
        assert_eq!(got, served);
        assert!(served == 0 || served == 2, "a burst becomes visible as a whole");
    });
}

#[test]
fn xen_tx_publish_take() {
    publish_take::<Tx>();
}

#[test]
fn xen_rx_publish_take() {
    publish_take::<Rx>();
}

#[test]
fn xen_ctrl_publish_take() {
    publish_take::<Ctrl>();
}

// ---- no wake-up is lost ----

/// How a half arms; the canaries substitute a broken version.
type Arm<H> = fn(&Area, &mut H) -> Armed;

fn arm_requests<R: Ring>(requests: u16, arm: Arm<R::Back>) {
    loom::model(move || {
        let page = R::page();
        let (mut front, mut back) = R::halves(&page);
        one_round::<R>(&mut front, &mut back);
        let peer = thread::spawn(move || {
            let mut taken = 0;
            loop {
                while R::take(&mut back, taken) {
                    taken += 1;
                }
                if arm(&page, &mut back) == Armed::Armed {
                    return taken;
                }
            }
        });
        let mut notified = false;
        for i in 0..requests {
            R::request(&mut front, i);
            notified |= R::publish(&mut front);
        }
        let taken = peer.join().unwrap();
        assert!(notified || taken == requests, "asleep and not notified");
    });
}

fn arm_responses<R: Ring>(responses: u16, arm: Arm<R::Front>) {
    loom::model(move || {
        let page = R::page();
        let (mut front, mut back) = R::halves(&page);
        one_round::<R>(&mut front, &mut back);
        for i in 0..responses {
            R::request(&mut front, i);
        }
        let _ = R::publish(&mut front);
        for i in 0..responses {
            assert!(R::take(&mut back, i));
        }
        let peer = thread::spawn(move || {
            let mut got = 0;
            loop {
                while R::collect(&mut front, got) {
                    got += 1;
                }
                if arm(&page, &mut front) == Armed::Armed {
                    return got;
                }
            }
        });
        let mut notified = false;
        for i in 0..responses {
            notified |= R::answer(&mut back, i);
        }
        let got = peer.join().unwrap();
        assert!(notified || got == responses, "asleep and not notified");
    });
}

fn both_ways<R: Ring>() {
    for n in 1..=2 {
        arm_requests::<R>(n, |_, back| R::back_arm(back));
        arm_responses::<R>(n, |_, front| R::front_arm(front));
    }
}

#[test]
fn xen_tx_arm_requests_and_arm_responses() {
    both_ways::<Tx>();
    arm_responses::<Tx>(2, |_, front| front.arm_after(2));
}

#[test]
fn xen_rx_arm_requests_and_arm_responses() {
    both_ways::<Rx>();
    arm_responses::<Rx>(2, |_, front| front.arm_after(2));
}

#[test]
fn xen_ctrl_arm_requests_and_arm_responses() {
    both_ways::<Ctrl>();
}

// ---- smart poll ----

/// The event channel, as one bit.
struct Channel(AtomicBool);

/// How the back half decides and notifies; the canaries substitute a broken version.
type Notify = fn(&SmartPoll, &Area, &Channel);
/// How the front half stops.
type Stop = fn(&FrontRx, &FrontTx, &Area) -> Armed;

impl Channel {
    /// A swap, not a store: loom does not order a store after a swap that did not see it.
    fn notify(&self) {
        self.0.swap(true, Ordering::SeqCst);
    }
    fn taken(&self) -> bool {
        self.0.swap(false, Ordering::SeqCst)
    }
}

fn notify(smart: &SmartPoll, _: &Area, channel: &Channel) {
    if smart.claim() {
        channel.notify();
    }
}

fn stop(rx: &FrontRx, tx: &FrontTx, _: &Area) -> Armed {
    rx.stop_polling(tx)
}

/// The front half polls, finds the rings empty, and stops; when notified in the meantime it polls
/// again. The back half publishes `rx` frames and one completion of tx. In the end no response may
/// be left without a notification.
fn smart_poll(frames: u16, completions: u16, notify: Notify, stop: Stop) {
    loom::model(move || {
        let (rx_page, tx_page) = (Rx::page(), Tx::page());
        let (mut rx, mut back_rx) = Rx::halves(&rx_page);
        let (mut tx, mut back_tx) = Tx::halves(&tx_page);
        for i in 0..frames {
            Rx::request(&mut rx, i);
        }
        let _ = Rx::publish(&mut rx);
        for i in 0..completions {
            Tx::request(&mut tx, i);
            let _ = Tx::publish(&mut tx);
            assert!(Tx::take(&mut back_tx, i));
        }
        for i in 0..frames {
            assert!(Rx::take(&mut back_rx, i));
        }
        let channel = Arc::new(Channel(AtomicBool::new(false)));
        let smart = back_rx.smart_poll();
        // Not a fresh ring: the front half polls.
        smart.set(true);
        let (events, page) = (Arc::clone(&channel), rx_page.clone());
        let peer = thread::spawn(move || {
            let (mut got_rx, mut got_tx) = (0, 0);
            loop {
                while Rx::collect(&mut rx, got_rx) {
                    got_rx += 1;
                }
                while Tx::collect(&mut tx, got_tx) {
                    got_tx += 1;
                }
                // Asleep, unless an event is there already: then the timer starts again.
                if stop(&rx, &tx, &page) == Armed::Armed && !events.taken() {
                    return (got_rx, got_tx);
                }
            }
        });
        for i in 0..frames {
            let _ = Rx::answer(&mut back_rx, i);
            notify(&smart, &rx_page, &channel);
        }
        for i in 0..completions {
            let _ = Tx::answer(&mut back_tx, i);
            notify(&smart, &rx_page, &channel);
        }
        let got = peer.join().unwrap();
        assert!(channel.taken() || got == (frames, completions), "asleep and not notified");
    });
}

#[test]
fn smart_poll_loses_no_response() {
    smart_poll(1, 0, notify, stop);
    smart_poll(0, 1, notify, stop);
    smart_poll(2, 0, notify, stop);
}

#[test]
fn smart_poll_watches_both_rings() {
    smart_poll(1, 1, notify, stop);
}

// ---- canaries ----

/// Expects that the model fails because of a missed wake-up.
fn assert_finds(what: &str, model: impl FnOnce()) {
    let Err(panic) = catch_unwind(AssertUnwindSafe(model)) else {
        panic!("{what}: the model passed, so it proves nothing");
    };
    let message = panic.downcast_ref::<&str>().map(ToString::to_string);
    let message = message.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
    assert!(message.contains("asleep"), "{what}: failed for another reason: {message}");
}

fn recheck_before_arm<R: Ring>(what: &str) {
    assert_finds(what, || {
        arm_requests::<R>(1, |_, back| {
            if R::has_work(back) {
                return Armed::WorkPending;
            }
            let _ = R::back_arm(back);
            Armed::Armed
        });
    });
    assert_finds(what, || {
        arm_responses::<R>(1, |_, front| {
            if R::has_responses(front) {
                return Armed::WorkPending;
            }
            let _ = R::front_arm(front);
            Armed::Armed
        });
    });
}

#[test]
fn canary_recheck_before_arm_is_found() {
    recheck_before_arm::<Tx>("tx");
    recheck_before_arm::<Rx>("rx");
    recheck_before_arm::<Ctrl>("ctrl");
}

/// `arm` with its fence taken out. One round has been made, so the next index is known.
fn missing_fence<R: Ring>(what: &str) {
    assert_finds(what, || {
        arm_requests::<R>(1, |page, back| {
            page.sync_store_u32(REQ_EVENT, START.wrapping_add(2), Ordering::Relaxed);
            if R::has_work(back) { Armed::WorkPending } else { Armed::Armed }
        });
    });
    assert_finds(what, || {
        arm_responses::<R>(1, |page, front| {
            page.sync_store_u32(RSP_EVENT, START.wrapping_add(2), Ordering::Relaxed);
            if R::has_responses(front) { Armed::WorkPending } else { Armed::Armed }
        });
    });
}

#[test]
fn canary_missing_fence_is_found() {
    missing_fence::<Tx>("tx");
    missing_fence::<Rx>("rx");
    missing_fence::<Ctrl>("ctrl");
}

fn without_release<R: Ring>() -> [bool; 2] {
    let requests = catch_unwind(|| {
        loom::model(|| {
            let page = R::page();
            let (mut front, mut back) = R::halves(&page);
            let peer = thread::spawn(move || R::take(&mut back, 0));
            R::request(&mut front, 0);
            page.sync_store_u32(REQ_PROD, START.wrapping_add(1), Ordering::Relaxed);
            peer.join().unwrap();
        });
    });
    let responses = catch_unwind(|| {
        loom::model(|| {
            let page = R::page();
            let (mut front, _back) = R::halves(&page);
            R::request(&mut front, 0);
            let _ = R::publish(&mut front);
            let peer = thread::spawn(move || R::collect(&mut front, 0));
            // Any word of the slot will do: loom reports any unordered access.
            page.store_u32(64 + page_slot::<R>(), 0);
            page.sync_store_u32(RSP_PROD, START.wrapping_add(1), Ordering::Relaxed);
            peer.join().unwrap();
        });
    });
    [requests.is_err(), responses.is_err()]
}

/// Offset of the slot of [`START`] among the two of a ring: the second.
fn page_slot<R: Ring>() -> usize {
    (R::page().len() - 64) / 2
}

#[test]
fn canary_publication_without_release_is_found() {
    assert_eq!(without_release::<Tx>(), [true, true]);
    assert_eq!(without_release::<Rx>(), [true, true]);
    assert_eq!(without_release::<Ctrl>(), [true, true]);
}

/// Race 1 of the original: checks the rings, then clears the flag, and sleeps.
#[test]
fn canary_smart_poll_clear_without_recheck_is_found() {
    let checks_then_clears: Stop = |rx, tx, page| {
        if rx.has_responses() || tx.has_responses() {
            return Armed::WorkPending;
        }
        SmartPoll::new(page.clone()).set(false);
        fence(Ordering::SeqCst);
        Armed::Armed
    };
    assert_finds("race 1", || smart_poll(1, 0, notify, checks_then_clears));
}

/// Race 1, halved: re-checks only the rx ring.
#[test]
fn canary_smart_poll_recheck_of_one_ring_is_found() {
    let checks_rx: Stop = |rx, _, page| {
        SmartPoll::new(page.clone()).set(false);
        fence(Ordering::SeqCst);
        if rx.has_responses() { Armed::WorkPending } else { Armed::Armed }
    };
    assert_finds("race 1, tx", || smart_poll(1, 1, notify, checks_rx));
}

/// Race 2 of the original: notifies first, and sets the flag then.
#[test]
fn canary_smart_poll_flag_set_after_notifying_is_found() {
    let notifies_then_sets: Notify = |smart, _, channel| {
        fence(Ordering::SeqCst);
        if !smart.is_active() {
            channel.notify();
            smart.set(true);
        }
    };
    assert_finds("race 2", || smart_poll(2, 0, notifies_then_sets, stop));
}

/// Race 4 of the original: no barrier between publishing and reading the flag.
#[test]
fn canary_smart_poll_flag_read_without_a_fence_is_found() {
    let reads_at_once: Notify = |smart, _, channel| {
        if !smart.is_active() {
            smart.set(true);
            fence(Ordering::SeqCst);
            channel.notify();
        }
    };
    // `answer` calls `notify_needed`, whose fence would suffice: so this model does without it.
    assert_finds("race 4", || smart_poll_unfenced(reads_at_once));
    smart_poll_unfenced(notify);
}

/// As `smart_poll` with one frame, with nothing between `publish` and `notify`.
fn smart_poll_unfenced(notify: Notify) {
    loom::model(move || {
        let page = Rx::page();
        let (mut rx, mut back) = Rx::halves(&page);
        let tx = FrontTx::starting_at(Tx::page(), START);
        Rx::request(&mut rx, 0);
        let _ = Rx::publish(&mut rx);
        assert!(Rx::take(&mut back, 0));
        let channel = Arc::new(Channel(AtomicBool::new(false)));
        let smart = back.smart_poll();
        smart.set(true);
        let events = Arc::clone(&channel);
        let peer = thread::spawn(move || {
            loop {
                if Rx::collect(&mut rx, 0) {
                    return true;
                }
                if rx.stop_polling(&tx) == Armed::Armed && !events.taken() {
                    return false;
                }
            }
        });
        back.put(RxResponse { id: 0, offset: 0, flags: 0, status: 60 });
        back.publish();
        notify(&smart, &page, &channel);
        let got = peer.join().unwrap();
        assert!(channel.taken() || got, "asleep and not notified");
    });
}
