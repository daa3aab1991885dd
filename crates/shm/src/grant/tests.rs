//! The copy engine over grants, against a host of pages in private memory.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use proptest::prelude::*;

use super::*;
use crate::mapping::Mapping;

/// Pages of several domains, and a count of calls.
#[derive(Default)]
struct Fake {
    pages: BTreeMap<(u16, u32), (Arc<Mapping>, bool)>,
    calls: Mutex<Vec<usize>>,
}

impl Fake {
    fn new(pages: &[(u16, u32, bool)]) -> Self {
        let page = |_| Arc::new(Mapping::memfd("page", 4096).unwrap());
        let pages = pages.iter().map(|(id, gref, w)| ((*id, *gref), (page(()), *w))).collect();
        Self { pages, calls: Mutex::default() }
    }

    fn bytes(&self, id: u16, gref: u32, at: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        let page = &self.pages[&(id, gref)].0;
        assert_eq!(page.seg(at, len as u32).unwrap().read(&mut out), len);
        out
    }

    fn fill(&self, id: u16, gref: u32, bytes: &[u8]) {
        self.pages[&(id, gref)].0.seg_mut(0, bytes.len() as u32).unwrap().write(bytes);
    }

    fn calls(&self) -> Vec<usize> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }

    fn one(&self, piece: &mut Piece<'_>) -> Result<(), Failed> {
        let len = piece.len();
        let from = match piece.src() {
            Side::Mapped(seg) => seg,
            Side::Granted { domain, gref, offset } => {
                let page = self.pages.get(&(domain.id(), gref)).ok_or(Failed::Source)?;
                page.0.seg(offset.into(), len).ok_or(Failed::Source)?
            }
        };
        match piece.dst() {
            Side::Mapped(mut seg) => seg.copy_from(from),
            Side::Granted { domain, gref, offset } => {
                let page = self.pages.get(&(domain.id(), gref)).filter(|page| page.1);
                let page = page.ok_or(Failed::Destination)?;
                page.0.seg_mut(offset.into(), len).ok_or(Failed::Destination)?.copy_from(from)
            }
        };
        Ok(())
    }
}

impl Grants for Fake {
    fn copy(&self, pieces: &mut [Piece<'_>]) {
        self.calls.lock().unwrap().push(pieces.len());
        for piece in pieces {
            let result = self.one(piece);
            piece.set(result);
        }
    }
}

fn two() -> (Arc<Fake>, Domain, Domain) {
    let fake = Arc::new(Fake::new(&[(1, 8, false), (1, 9, false), (2, 8, true), (2, 0, true)]));
    (fake.clone(), Domain::new(1, fake.clone()), Domain::new(2, fake))
}

fn ramp(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + 3) as u8).collect()
}

#[test]
fn segment_lies_in_one_page_or_is_none() {
    let (_, one, two) = two();
    assert!(Seg::granted(&one, 8, 0, 4096).is_some());
    assert!(Seg::granted(&one, 8, 4096, 0).is_some_and(Seg::is_empty));
    assert!(Seg::granted(&one, 8, 4095, 2).is_none());
    assert!(Seg::granted(&one, 8, 0, 4097).is_none());
    assert!(Seg::granted(&one, 8, u16::MAX, u16::MAX).is_none());
    assert!(Seg::granted(&one, u32::MAX, 0, 1).is_none(), "the invalid reference");
    assert!(SegMut::granted(&two, 0, 4000, 97).is_none());
    assert!(SegMut::granted(&two, 0, 4000, 96).is_some_and(|seg| seg.is_granted()));
}

#[test]
fn segment_keeps_its_place_when_split() {
    let (_, one, _) = two();
    let seg = Seg::granted(&one, u32::MAX - 1, 100, 3996).unwrap().skip(96).take(3900);
    let (domain, gref, offset) = seg.place().unwrap();
    assert_eq!((domain.id(), gref, offset, seg.len()), (1, u32::MAX - 1, 196, 3900));
    let end = seg.skip(3900);
    assert_eq!((end.place().unwrap().2, end.len(), end.is_granted()), (4096, 0, true));
    assert!(Seg::of(&[1, 2]).place().is_none());
}

#[test]
fn single_reads_and_writes_go_through_the_host() {
    let (fake, one, two) = two();
    fake.fill(1, 8, &ramp(4096));
    let seg = Seg::granted(&one, 8, 10, 100).unwrap();
    let mut out = [0; 200];
    assert_eq!(seg.read(&mut out), 100);
    assert_eq!(out[..100], ramp(110)[10..]);
    assert_eq!(seg.first::<4>(), None);
    let mut to = SegMut::granted(&two, 0, 4, 14).unwrap();
    to.update_u64(0x0807_0605_0403_0201);
    to.update_u32(0x0c0b_0a09);
    to.update_u64(1);
    to.update_u16(0x0e0d);
    assert!(to.is_empty());
    assert_eq!(fake.bytes(2, 0, 4, 14), (1..=14).collect::<Vec<u8>>());
    let mut to = SegMut::granted(&two, 8, 0, 4096).unwrap();
    assert_eq!((to.copy_from(seg), to.len()), (100, 3996));
    assert_eq!(fake.bytes(2, 8, 0, 100), ramp(110)[10..]);
    assert_eq!(fake.calls(), [1, 1, 1, 1, 1]);
}

#[test]
fn single_copy_of_a_bad_grant_copies_nothing() {
    let (_, one, two) = two();
    let bad = Seg::granted(&one, 77, 0, 100).unwrap();
    assert_eq!(bad.read(&mut [0; 50]), 0);
    let mut to = SegMut::granted(&one, 8, 0, 100).unwrap();
    assert_eq!((to.write(&[1; 10]), to.len()), (0, 100), "granted for reading only");
    let mut to = SegMut::granted(&two, 8, 0, 100).unwrap();
    assert_eq!((to.copy_from(bad), to.zero()), (0, 100));
}

#[test]
fn copies_of_a_burst_are_one_call_and_each_fails_alone() {
    let (fake, one, two) = two();
    fake.fill(1, 8, &ramp(4096));
    fake.fill(1, 9, &ramp(4096));
    let (mut memory, source) = ([9; 100], [5; 30]);
    let mut copies = Copies::new();
    let mut to = SegMut::granted(&two, 8, 0, 4096).unwrap();
    assert_eq!(copies.copy(&mut to, Seg::granted(&one, 8, 1000, 3000).unwrap(), 0), 3000);
    assert_eq!(copies.copy(&mut to, Seg::granted(&one, 9, 0, 4096).unwrap(), 0), 1096);
    assert_eq!(copies.copy(&mut to, Seg::of(&source), 0), 0, "full");
    let mut to = SegMut::granted(&two, 0, 0, 4096).unwrap();
    copies.copy(&mut to, Seg::of(&source), 1);
    copies.copy(&mut to, Seg::granted(&one, 70, 0, 10).unwrap(), 2);
    let mut forbidden = SegMut::granted(&one, 8, 0, 10).unwrap();
    copies.copy(&mut forbidden, Seg::of(&source), 3);
    let mut mapped = SegMut::of(&mut memory);
    copies.copy(&mut mapped, Seg::granted(&one, 8, 0, 20).unwrap(), 4);
    copies.copy(&mut mapped, Seg::granted(&one, 71, 0, 20).unwrap(), 5);
    assert_eq!(copies.copy(&mut mapped, Seg::of(&source), 6), 30, "copied at once");
    assert_eq!((fake.calls().len(), copies.len()), (0, 7));
    let mut failed = Vec::new();
    copies.finish(|tag, whose| failed.push((tag, whose)));
    assert_eq!(failed, [(2, Failed::Source), (3, Failed::Destination), (5, Failed::Source)]);
    assert_eq!(fake.calls(), [7]);
    copies.finish(|tag, whose| failed.push((tag, whose)));
    assert_eq!((failed.len(), fake.calls().len()), (3, 0), "no copy is pending");
    assert_eq!(fake.bytes(2, 8, 0, 3000), ramp(4096)[1000..4000]);
    assert_eq!(fake.bytes(2, 8, 3000, 1096), ramp(1096));
    assert_eq!(fake.bytes(2, 0, 0, 30), source);
    assert_eq!(memory[..20], ramp(20));
    assert_eq!(memory[20..40], [0; 20], "the old contents are zeroed");
    assert_eq!((&memory[40..70], &memory[70..]), (&[5; 30][..], &[9; 30][..]));
}

#[test]
fn grants_of_two_hosts_are_copied_through_private_memory() {
    let left = Arc::new(Fake::new(&[(1, 8, false)]));
    let right = Arc::new(Fake::new(&[(1, 8, true), (1, 9, true)]));
    let (one, two) = (Domain::new(1, left.clone()), Domain::new(1, right.clone()));
    left.fill(1, 8, &ramp(4096));
    let mut copies = Copies::new();
    let mut to = SegMut::granted(&two, 8, 0, 4096).unwrap();
    let mut ro = SegMut::granted(&one, 8, 0, 10).unwrap();
    copies.copy(&mut to, Seg::granted(&one, 8, 0, 2000).unwrap(), 0);
    copies.copy(&mut to, Seg::granted(&two, 9, 0, 2000).unwrap(), 1);
    copies.copy(&mut to, Seg::granted(&one, 10, 0, 10).unwrap(), 2);
    copies.copy(&mut ro, Seg::granted(&two, 9, 0, 10).unwrap(), 3);
    copies.copy(&mut ro, Seg::granted(&one, 10, 0, 10).unwrap(), 4);
    let mut failed = Vec::new();
    copies.finish(|tag, whose| failed.push((tag, whose)));
    failed.sort_by_key(|(tag, _)| *tag);
    assert_eq!(failed, [(2, Failed::Source), (3, Failed::Destination)]);
    assert_eq!(right.bytes(1, 8, 0, 2000), ramp(2000));
    // First host: the bounce and the failed one; second: the bounce, its two reads and its own.
    assert_eq!((left.calls(), right.calls()), (vec![1, 1, 1], vec![1, 1, 1]));
}

#[test]
fn pieces_without_a_result_count_as_failed() {
    struct NoResult;
    impl Grants for NoResult {
        fn copy(&self, _: &mut [Piece<'_>]) {}
    }
    let domain = Domain::new(0, Arc::new(NoResult));
    let (mut memory, mut copies) = ([7; 8], Copies::new());
    let mut mapped = SegMut::of(&mut memory);
    let mut granted = SegMut::granted(&domain, 1, 0, 8).unwrap();
    copies.copy(&mut mapped, Seg::granted(&domain, 1, 0, 8).unwrap(), 0);
    copies.copy(&mut granted, Seg::of(&[1; 8]), 1);
    let mut failed = Vec::new();
    copies.finish(|tag, whose| failed.push((tag, whose)));
    assert_eq!(failed, [(0, Failed::Source), (1, Failed::Destination)]);
    assert_eq!(memory, [0; 8]);
}

#[test]
fn copies_keep_their_allocation() {
    let (_, one, _) = two();
    let mut copies = Copies::new();
    let mut memory = [0; 64];
    let mut to = SegMut::of(&mut memory);
    (0..64).for_each(|_| {
        copies.copy(&mut to, Seg::granted(&one, 8, 0, 1).unwrap(), 0);
    });
    let held = copies.pieces.capacity();
    let copies: Copies<'static> = copies.recycle();
    assert_eq!((copies.len(), copies.pieces.capacity()), (0, held));
}

proptest! {
    #[test]
    fn any_split_of_any_mixture_arrives_in_order(
        parts in proptest::collection::vec((any::<bool>(), 0_u16..4096, 0_u16..4096), 0..8),
        rooms in proptest::collection::vec((any::<bool>(), 1_u16..4096), 1..8),
    ) {
        let (fake, one, two) = two();
        let (bytes, mut memory) = (ramp(8192), vec![[0_u8; 4096]; rooms.len()]);
        fake.fill(1, 8, &bytes[..4096]);
        let mut want = Vec::new();
        let from: Vec<Seg<'_>> = parts
            .iter()
            .map(|(granted, at, len)| {
                let len = (*len).min(4096 - at);
                let range = usize::from(*at)..usize::from(at + len);
                want.extend_from_slice(&bytes[range.clone()]);
                if *granted {
                    Seg::granted(&one, 8, *at, len).unwrap()
                } else {
                    Seg::of(&bytes[range])
                }
            })
            .collect();
        let mut copies = Copies::new();
        let mut got = Vec::new();
        // One page of the other domain is reused, so each use is finished first.
        let mut from = from.into_iter();
        let mut left = Seg::EMPTY;
        for ((granted, room), memory) in rooms.iter().zip(&mut memory) {
            let mut to = if *granted {
                SegMut::granted(&two, 8, 0, *room).unwrap()
            } else {
                SegMut::of(&mut memory[..usize::from(*room)])
            };
            let view = to.as_seg();
            let mut copied = 0;
            while !to.is_empty() {
                if left.is_empty() {
                    let Some(next) = from.next() else { break };
                    left = next;
                    continue;
                }
                let n = copies.copy(&mut to, left, 0);
                left = left.skip(n);
                copied += n;
            }
            let mut failed = 0;
            copies.finish(|_, _| failed += 1);
            prop_assert_eq!(failed, 0);
            let mut out = vec![0; copied as usize];
            prop_assert_eq!(view.read(&mut out), out.len());
            got.extend_from_slice(&out);
        }
        let room: usize = rooms.iter().map(|(_, n)| usize::from(*n)).sum();
        prop_assert_eq!(&got[..], &want[..want.len().min(room)]);
    }
}
