//! Tests of bursts: granted segments, and private copies of heads.

use std::sync::{Arc, Mutex};

use shm::{Domain, Failed, Grants, Piece, Side};

use super::*;

/// A domain whose pages contain their number in each byte; those from 100 on do not exist.
#[derive(Default)]
struct Fake {
    calls: Mutex<Vec<usize>>,
}

impl Grants for Fake {
    fn copy(&self, pieces: &mut [Piece<'_>]) {
        self.calls.lock().unwrap().push(pieces.len());
        for piece in pieces {
            let Side::Granted { gref, .. } = piece.src() else { continue };
            let page = [gref as u8; 4096];
            let len = piece.len() as usize;
            if let Side::Mapped(mut to) = piece.dst()
                && gref < 100
            {
                to.write(&page[..len]);
                piece.set(Ok(()));
            } else {
                piece.set(Err(Failed::Source));
            }
        }
    }
}

fn push<'m>(burst: &mut Burst<'m>, segs: &[Seg<'m>]) {
    let first = burst.segs.len();
    burst.segs.extend_from_slice(segs);
    let len = segs.iter().map(|s| s.len()).sum();
    burst.push_at(first, segs.len(), len, VnetHdr::NONE);
}

fn bytes(burst: &Burst<'_>, i: usize) -> Vec<u8> {
    let mut out = Vec::new();
    for seg in burst.segs(&burst.frames[i]) {
        let mut part = vec![0; seg.len() as usize];
        assert!(!seg.is_granted() && seg.read(&mut part) == part.len());
        out.extend(part);
    }
    out
}

#[test]
fn snapshot_and_fetch_are_one_call_each_and_fail_frame_by_frame() {
    // Heads are in lent memory if it has room for all.
    for heads in [0, 3, 4] {
        snapshot_and_fetch(&mut vec![[0xee; HEAD_LEN]; heads]);
    }
}

fn snapshot_and_fetch(heads: &mut [[u8; HEAD_LEN]]) {
    let lent = (heads.len() >= 4).then(|| heads.as_ptr().cast::<u8>());
    let fake = Arc::new(Fake::default());
    let domain = Domain::new(1, fake.clone());
    let page = |gref, len| Seg::granted(&domain, gref, 0, len).unwrap();
    let mut arena = [0xee; 2000];
    let mut burst = Burst::default();
    burst.permit_granted(heads, &mut arena);
    push(&mut burst, &[page(8, 20), page(9, 500)]);
    push(&mut burst, &[page(100, 60)]);
    push(&mut burst, &[Seg::of(&[5; 200])]);
    push(&mut burst, &[page(10, 200), page(101, 200)]);
    burst.snapshot();
    burst.snapshot();
    assert_eq!(std::mem::take(&mut *fake.calls.lock().unwrap()), [4]);
    assert_eq!(burst.head(0), [&[8; 20][..], &[9; 108]].concat());
    assert_eq!((burst.head(2), burst.head(3)), (&[5; 128][..], &[10; 128][..]));
    assert!((0..4).map(|i| burst.is_excluded(i)).eq([false, true, false, false]));
    assert!(lent.is_none_or(|first| first == burst.head(0).as_ptr()));
    burst.head_mut(2)[127] = 6;
    assert_eq!(burst.head(2)[126..], [5, 6]);
    burst.fetch([0, 2, 3].into_iter());
    assert_eq!(std::mem::take(&mut *fake.calls.lock().unwrap()), [4]);
    assert_eq!(bytes(&burst, 0), [&[8; 20][..], &[9; 500]].concat());
    assert_eq!(bytes(&burst, 2), [5; 200]);
    assert!(burst.is_excluded(3), "its second page is invalid");
    assert_eq!(bytes(&burst, 3), [&[10; 200][..], &[0; 200]].concat());
    burst.fetch(0..4);
    assert_eq!(fake.calls.lock().unwrap()[..], [1], "all but frame 1 were fetched already");
    let burst = burst.recycle();
    assert_eq!((burst.take_lost(), burst.permits_granted()), (0, false));
}

#[test]
fn frame_longer_than_the_arena_is_dropped() {
    let domain = Domain::new(1, Arc::new(Fake::default()));
    let page = |gref, len| Seg::granted(&domain, gref, 0, len).unwrap();
    let mut arena = [0; 100];
    let mut burst = Burst::default();
    burst.permit_granted(&mut [], &mut arena);
    push(&mut burst, &[page(8, 60)]);
    push(&mut burst, &[page(9, 60)]);
    burst.fetch(0..2);
    assert_eq!(bytes(&burst, 0), [8; 60]);
    assert!(!burst.is_excluded(0) && burst.is_excluded(1));
}

#[test]
fn fetched_pages_are_page_aligned_if_there_is_room() {
    let fake = Arc::new(Fake::default());
    let domain = Domain::new(1, fake);
    let seg = |gref, offset, len| Seg::granted(&domain, gref, offset, len).unwrap();
    for arena_len in [3 * 20_000, 3 * 20_000 + 3 * 4095] {
        let mut arena = vec![0; arena_len];
        let mut burst = Burst::default();
        burst.permit_granted(&mut [], &mut arena);
        for n in 0..3 {
            // As Linux sends them: headers, then whole pages, then the rest.
            let whole: Vec<_> = (1..5).map(|page| seg(page, 0, 4096)).collect();
            let first = seg(9, 700 * n + 1, 66);
            push(&mut burst, &[&[first], &whole[..], &[seg(5, 0, 3550)]].concat());
        }
        burst.fetch(0..3);
        let mut aligned = 0;
        for frame in &burst.frames {
            let fetched = burst.segs(frame)[0];
            let mut bytes = vec![0; 20_000];
            assert_eq!(fetched.read(&mut bytes), 20_000);
            assert!(bytes[..66].iter().all(|b| *b == 9) && bytes[66] == 1 && bytes[19_999] == 5);
            aligned += usize::from(fetched.skip(66).page_offset() == 0);
        }
        assert!(!burst.any_excluded());
        let room = arena_len > 3 * 20_000;
        assert!(if room { aligned == 3 } else { aligned < 3 }, "{aligned} with room: {room}");
    }
}

#[test]
fn snapshot_keeps_what_was_copied_as_starts() {
    let (before, after) = ([0xaa; 200], [0xbb; 200]);
    let mut burst = Burst::default();
    push(&mut burst, &[Seg::of(&before)]);
    push(&mut burst, &[Seg::of(&before[..20]), Seg::of(&before[..70])]);
    burst.snapshot_starts();
    assert!(burst.has_starts());
    assert_eq!((burst.head(0), burst.start(1)), (&[0xaa; START_LEN][..], Some([0xaa; START_LEN])));
    // The sender changes its frames.
    burst.segs.iter_mut().for_each(|seg| *seg = Seg::of(&after[..seg.len() as usize]));
    burst.snapshot();
    assert!(!burst.has_starts());
    for (i, len) in [(0, HEAD_LEN), (1, 90)] {
        let head = burst.head(i);
        assert_eq!(head[..START_LEN], [0xaa; START_LEN]);
        assert_eq!(head[START_LEN..], vec![0xbb; len - START_LEN]);
        assert_eq!(burst.copy_of(i)[..len], *head);
    }
}

#[test]
fn starts_suffice_only_where_nothing_else_is_parsed() {
    let bytes = [0xaa; 200];
    let split = [Seg::of(&bytes[..START_LEN - 1]), Seg::of(&bytes)];
    let csum = VnetHdr { flags: crate::vnet::NEEDS_CSUM, ..VnetHdr::NONE };
    for (segs, hdr) in [(&split[..], VnetHdr::NONE), (&split[1..], csum)] {
        let mut burst = Burst::of(&bytes);
        push(&mut burst, segs);
        burst.set_hdr(1, hdr);
        burst.snapshot_starts();
        assert!(!burst.has_starts());
        assert_eq!((burst.head(0).len(), burst.head(1).len()), (HEAD_LEN, HEAD_LEN));
    }
    let mut burst = Burst::of(&bytes);
    burst.snapshot();
    burst.snapshot_starts();
    assert_eq!(burst.head(0).len(), HEAD_LEN, "it has whole heads already");
}

#[test]
fn frames_of_one_start_are_counted_up_to_another_or_an_excluded_one() {
    let (one, other) = ([1; 60], [2; 60]);
    let mut burst = Burst::of(&one);
    for frame in [&one, &one, &other, &one] {
        push(&mut burst, &[Seg::of(frame)]);
    }
    burst.snapshot_starts();
    assert_eq!([0, 1, 3, 4].map(|i| burst.same_starts(i)), [Some(3), Some(2), Some(1), Some(1)]);
    burst.refuse(2);
    assert_eq!(burst.same_starts(0), None);
    burst = burst.recycle();
    push(&mut burst, &[Seg::of(&one)]);
    assert!(!burst.has_starts() && burst.same_starts(0).is_none());
}
