use std::time::Duration;

use super::*;
use crate::{eventfd, signal, socketpair, wait_readable};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

#[test]
fn state_and_many_descriptors_arrive_in_order() {
    let (a, b) = socketpair().unwrap();
    let events: Vec<_> = (0..300).map(|_| eventfd().unwrap()).collect();
    signal(events[299].as_fd());
    let state: Vec<u8> = (0..100_000_u32).map(|n| n as u8).collect();
    let receiver = std::thread::spawn(move || receive_state(b.as_fd(), 7, soon()).unwrap());
    let fds: Vec<_> = events.iter().map(AsFd::as_fd).collect();
    send_state(a.as_fd(), 7, &state, &fds, soon()).unwrap();
    let (got, fds) = receiver.join().unwrap();
    assert_eq!((got, fds.len()), (state, 300));
    let ready = |at: usize| wait_readable(fds[at].as_fd(), Duration::ZERO).unwrap();
    assert_eq!([ready(0), ready(298), ready(299)], [false, false, true]);
}

/// Sends bytes in place of a sealed state.
fn sent(bytes: &[u8], fds: usize) -> HandoverError {
    let (a, b) = socketpair().unwrap();
    let memfd = File::from(crate::memfd("test", 0).unwrap());
    memfd.write_all_at(bytes, 0).unwrap();
    send_all(a.as_fd(), &0_u32.to_le_bytes(), &vec![memfd.as_fd(); fds], soon()).unwrap();
    receive_state(b.as_fd(), 7, soon()).unwrap_err()
}

#[test]
fn damaged_foreign_and_other_states_are_refused() {
    let good = seal(7, b"some state");
    assert!(matches!(sent(b"", 1), HandoverError::Foreign));
    assert!(matches!(sent(&good, 0), HandoverError::Foreign));
    assert!(matches!(sent(&good, 2), HandoverError::Foreign));
    assert!(matches!(sent(&[0; 64], 1), HandoverError::Foreign));
    let other = sent(&seal(8, b"some state"), 1);
    assert!(matches!(other, HandoverError::Version { got: 8, want: 7 }), "{other}");
    assert!(matches!(sent(&good[..good.len() - 1], 1), HandoverError::Damaged));
    // Whatever byte changes.
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 4;
        let error = sent(&bad, 1);
        assert!(!matches!(error, HandoverError::Os(_) | HandoverError::Late), "{at}: {error}");
    }
}

#[test]
fn receiver_that_ends_or_says_nothing_is_an_error() {
    let (a, b) = socketpair().unwrap();
    let past = Instant::now();
    assert!(matches!(receive_state(a.as_fd(), 7, past), Err(HandoverError::Late)));
    drop(b);
    assert!(matches!(receive_state(a.as_fd(), 7, soon()), Err(HandoverError::Closed)));
    let sent = send_state(a.as_fd(), 7, b"x", &[], soon());
    assert!(matches!(sent, Err(HandoverError::Closed)));
}

/// Descriptors of a state, and an eventfd among them that was signalled.
fn events() -> Vec<OwnedFd> {
    let events: Vec<_> = (0..300).map(|_| eventfd().unwrap()).collect();
    signal(events[299].as_fd());
    events
}

#[test]
fn packed_state_can_be_opened_many_times_and_after_its_maker_closed_all() {
    let events = events();
    let fds: Vec<_> = events.iter().map(AsFd::as_fd).collect();
    let parts = pack(7, b"some state", &fds).unwrap();
    drop(events);
    assert_eq!(parts.len(), 3);
    let order = [&parts[2], &parts[0], &parts[1]].map(AsFd::as_fd);
    for _ in 0..3 {
        let (state, fds) = unpack(7, &order).unwrap();
        assert_eq!((&state[..], fds.len()), (&b"some state"[..], 300));
        let ready = |at: usize| wait_readable(fds[at].as_fd(), Duration::ZERO).unwrap();
        assert_eq!([ready(0), ready(298), ready(299)], [false, false, true]);
    }
}

#[test]
fn packed_state_without_a_part_or_of_another_is_refused() {
    let events = events();
    let fds: Vec<_> = events.iter().map(AsFd::as_fd).collect();
    let parts = pack(7, b"some state", &fds).unwrap();
    let [a, b, c] = [0, 1, 2].map(|at: usize| parts[at].as_fd());
    let refused = |version, parts: &[BorrowedFd<'_>]| unpack(version, parts).unwrap_err();
    assert!(matches!(refused(7, &[a, b]), HandoverError::Damaged));
    assert!(matches!(refused(7, &[a, b, b]), HandoverError::Damaged));
    assert!(matches!(refused(7, &[]), HandoverError::Damaged));
    assert!(matches!(refused(8, &[a, b, c]), HandoverError::Version { got: 7, want: 8 }));
    let (empty, _other) = socketpair().unwrap();
    assert!(matches!(refused(7, &[empty.as_fd()]), HandoverError::Damaged));
}

#[test]
fn state_file_holds_the_last_whole_state_whatever_is_cut() {
    let mut file = StateFile::new().unwrap();
    assert_eq!(file.read(7), None);
    let again = |file: &StateFile| StateFile::open(file.as_fd().try_clone_to_owned().unwrap());
    for n in 1..=4_u8 {
        file.write(7, &vec![n; 100 * usize::from(n)]).unwrap();
        assert_eq!(again(&file).read(7), Some(vec![n; 100 * usize::from(n)]));
        assert_eq!(again(&file).read(8), None);
    }
    // The last write is cut: whatever part of it is there, the one before is read.
    let whole = seal(7, &[&4_u64.to_le_bytes(), &[4_u8; 400][..]].concat());
    for cut in 0..whole.len() {
        file.file.write_all_at(&vec![0; whole.len()], FIRST_PLACE).unwrap();
        file.file.write_all_at(&whole[..cut], FIRST_PLACE).unwrap();
        assert_eq!(again(&file).read(7), Some(vec![3; 300]), "{cut}");
    }
    // A successor writes over the invalid one.
    let mut next = again(&file);
    next.read(7);
    next.write(7, b"next").unwrap();
    assert_eq!(again(&file).read(7), Some(b"next".to_vec()));
    let mut mark = [7; 3];
    next.marks(4000, &mut mark);
    assert_eq!(mark, [0; 3]);
    file.mark(4000, b"abc").unwrap();
    next.marks(4000, &mut mark);
    assert_eq!(&mark, b"abc");
}
