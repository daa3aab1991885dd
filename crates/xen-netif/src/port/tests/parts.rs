//! Frames made for a guest that posts few pages.

use super::*;

#[test]
fn part_of_a_frame_that_does_not_fit_requests_an_event_for_one_page() {
    let (_, mut b) = two();
    b.post(100..108);
    let mut egress = b.pair.egress.lock();
    assert_eq!(egress.room(1500, 1), Ok(1));
    let put = |egress: &mut XenEgress| egress.put_parts(&tcp(1500), &[], &VnetHdr::NONE);
    assert!((0..8).all(|_| put(&mut egress) == Ok(true)));
    assert_eq!(put(&mut egress), Ok(false));
    egress.flush();
    assert!(egress.arm(), "full");
    drop(egress);
    b.post(108..109);
    assert!(!b.pair.egress.lock().arm(), "one page suffices");
}
