//! Frames in granted memory, for receivers that do not accept grants.

use std::sync::Mutex;

use shm::{Domain, Failed, Grants, Piece, Side};

use super::*;

/// Pages in memory, by reference; counts its calls.
#[derive(Default)]
struct Pages {
    pages: HashMap<u32, Vec<u8>>,
    calls: Mutex<usize>,
}

impl Grants for Pages {
    fn copy(&self, pieces: &mut [Piece<'_>]) {
        *self.calls.lock().unwrap() += 1;
        for piece in pieces {
            let len = piece.len() as usize;
            let Side::Granted { gref, offset, .. } = piece.src() else { continue };
            let page = self.pages.get(&gref).and_then(|page| page.get(offset.into()..)?.get(..len));
            let result = match (page, piece.dst()) {
                (Some(page), Side::Mapped(mut to)) => {
                    to.write(page);
                    Ok(())
                }
                _ => Err(Failed::Source),
            };
            piece.set(result);
        }
    }
}

/// Bytes that exist of the pages from this reference on: the head of a frame can be read.
const HEAD_ONLY: (u32, usize) = (200, 200);

/// Forwards frames in pages of these references, in two segments; returns the number of host calls.
fn send(rig: &mut Rig, frames: &[(u32, &[u8], VnetHdr)]) -> usize {
    let mut host = Pages::default();
    for (gref, bytes, _) in frames {
        if *gref < 100 {
            host.pages.insert(*gref, bytes.to_vec());
        } else if *gref >= HEAD_ONLY.0 {
            host.pages.insert(*gref, bytes[..HEAD_ONLY.1].to_vec());
        }
    }
    let host = Arc::new(host);
    let domain = Domain::new(1, host.clone());
    let mut arena = vec![0xee; 100_000];
    let mut burst = Burst::default();
    burst.permit_granted(&mut [], &mut arena);
    for (gref, bytes, hdr) in frames {
        let len = bytes.len() as u16;
        burst.segs.push(Seg::granted(&domain, *gref, 0, 10).unwrap());
        burst.segs.push(Seg::granted(&domain, *gref, 10, len - 10).unwrap());
        burst.push_at(burst.segs.len() - 2, 2, bytes.len() as u32, *hdr);
    }
    rig.forward(0, &mut burst);
    drop(burst);
    *host.calls.lock().unwrap()
}

#[test]
fn frames_are_fetched_once_for_all_receivers_and_invalid_ones_counted_once() {
    let mut rig = Rig::new(Mode::Switch, 4, 1);
    let (a, b) = (frame(mac(9), mac(1), 1), frame([0xff; 6], mac(1), 2));
    let none = VnetHdr::NONE;
    // Flooded, each to three ports: one call for the heads, one for the bodies.
    let calls = send(&mut rig, &[(8, &a, none), (100, &a, none), (9, &b, none), (101, &b, none)]);
    assert_eq!(calls, 2);
    for port in 1..4 {
        assert_eq!(rig.got(port), [a.clone(), b.clone()]);
    }
    assert_eq!(rig.stats(0).drops_bad_grant.get(), 2);
    assert_eq!(rig.stats(0).copies.get(), 4, "of those that can be read");
}

#[test]
fn each_copy_of_a_frame_of_which_only_the_head_can_be_read_is_counted() {
    let mut rig = Rig::new(Mode::Switch, 4, 1);
    let long = |serial| [frame([0xff; 6], mac(1), serial), vec![0; 400]].concat();
    let (a, b) = (long(1), long(2));
    // One receiver is full: what is held for it is read, too.
    rig.port(2).room = 0;
    send(&mut rig, &[(200, &a, VnetHdr::NONE), (8, &b, VnetHdr::NONE)]);
    assert_eq!([1, 3].map(|port| rig.got(port)), [[b.clone()], [b]]);
    assert_eq!(rig.held(2), 1);
    let (copies, lost) = (rig.stats(0).copies.get(), rig.stats(0).drops_bad_grant.get());
    assert_eq!((copies, lost), (4, 3), "of three copies each, all or none");
}

#[test]
fn cross_connect_fetches_with_one_call_and_drops_unreadable_frames() {
    let mut rig = Rig::new(Mode::Cross, 2, 1);
    let a = frame(mac(9), mac(1), 1);
    let b = frame(mac(9), mac(1), 2);
    let none = VnetHdr::NONE;
    assert_eq!(send(&mut rig, &[(100, &a, none), (8, &b, none), (101, &a, none)]), 1);
    assert_eq!(rig.got(1), [b]);
    assert_eq!(rig.stats(0).drops_bad_grant.get(), 2);
}

#[test]
fn software_segmentation_reads_fetched_memory() {
    let mut rig = Rig::new(Mode::Cross, 2, 1);
    rig.port(1).takes = Offloads::default();
    let (bytes, hdr) = tso(mac(9), mac(1), 3000, 1000);
    assert_eq!(send(&mut rig, &[(8, &bytes, hdr), (100, &bytes, hdr)]), 2);
    let got = rig.got(1);
    assert_eq!(got.len(), 3);
    let header = bytes.len() - 3000;
    let payload: Vec<u8> = got.iter().flat_map(|f| f[header..].to_vec()).collect();
    assert_eq!(payload, bytes[header..]);
    assert_eq!(rig.stats(0).drops_bad_grant.get(), 1);
}

#[test]
fn capture_of_granted_frames_shows_their_bytes() {
    let mut rig = Rig::new(Mode::Cross, 2, 1);
    let (sink, captured) = sync_channel(8);
    rig.table[1].as_ref().unwrap().mirror.set(Some(sink.clone()));
    rig.table[0].as_ref().unwrap().mirror.set(Some(sink));
    let a = frame(mac(9), mac(1), 1);
    assert_eq!(send(&mut rig, &[(8, &a, VnetHdr::NONE)]), 1);
    let seen: Vec<_> = captured.try_iter().map(|c| (c.ingress, c.bytes)).collect();
    assert_eq!(seen, [(true, a.clone()), (false, a)]);
}
