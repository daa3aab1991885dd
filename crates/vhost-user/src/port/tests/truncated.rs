//! Guests that truncate the files of their memory.

use super::*;

#[test]
#[cfg_attr(miri, ignore = "needs files in memory")]
fn memory_truncated_under_a_ring_is_a_fault() {
    for features in kinds() {
        let mut tx = Tx::with(features, format());
        tx.send(VnetHdr::NONE, &frame(60, 1));
        tx.all();
        tx.send(VnetHdr::NONE, &frame(60, 2));
        tx.guest.files[0].set_len(0).unwrap();
        assert_eq!(tx.burst(), Err(Fault(LOST.into())), "{features:?}");
        tx.ingress.deactivate();
    }
}

#[test]
#[cfg_attr(miri, ignore = "needs files in memory")]
fn memory_truncated_under_a_frame_costs_that_frame_and_then_the_port() {
    let mut tx = Tx::new();
    write(&tx.guest.memory, EDGE + 100, &[1; 72]);
    tx.raw(&[Buf { addr: EDGE + 100, len: 72, write: false }]);
    tx.guest.files[1].set_len(0).unwrap();
    assert_eq!(tx.all()[0].bytes, [0; 60], "lost memory reads as zeroes");
    assert_eq!(tx.burst(), Err(Fault(LOST.into())));
}

/// Issue 14, row 6: the ring never runs empty, and nothing about it is malformed.
#[test]
#[cfg_attr(miri, ignore = "needs files in memory")]
fn memory_truncated_under_a_flood_stops_the_port_after_one_burst() {
    let mut tx = Tx::new();
    for i in 0..SIZE / 2 {
        let addr = EDGE + 100 * u64::from(i);
        tx.raw(&[Buf { addr, len: 72, write: false }]);
    }
    tx.guest.files[1].set_len(0).unwrap();
    let mut burst = || {
        let mut seen = 0;
        let got = tx.ingress.burst(8, NOW, &mut tx.scratch, &mut |b| seen = b.frames.len());
        (got, seen)
    };
    assert_eq!(burst(), (Ok(8), 8), "it is detected now");
    assert_eq!(burst(), (Err(Fault(LOST.into())), 0));
    assert_eq!(burst(), (Err(Fault(LOST.into())), 0), "until the port is stopped");
}
