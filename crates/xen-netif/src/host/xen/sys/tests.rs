//! Numbers and layouts compared with the headers of this machine (package linux-libc-dev).

use std::fs::File;
use std::mem::offset_of;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;
use std::sync::{Arc, Mutex};

use shm::{Copies, Domain, Failed, Grants, Mapping, Piece, Seg, SegMut};

use super::ioctl::*;
use super::{Granted, MappedGrants, segment_of};

const PROGRAM: &str = r#"
#include <stdint.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <linux/types.h>
typedef uint16_t domid_t;
typedef uint32_t grant_ref_t;
#include <xen/gntdev.h>
#include <xen/gntalloc.h>
#include <xen/evtchn.h>
#define P(x) printf("%lu\n", (unsigned long)(x))
int main(void) {
    P(IOCTL_GNTDEV_MAP_GRANT_REF); P(IOCTL_GNTDEV_UNMAP_GRANT_REF); P(IOCTL_GNTDEV_GRANT_COPY);
    P(IOCTL_GNTALLOC_ALLOC_GREF); P(IOCTL_GNTALLOC_DEALLOC_GREF);
    P(IOCTL_EVTCHN_BIND_INTERDOMAIN); P(IOCTL_EVTCHN_BIND_UNBOUND_PORT);
    P(IOCTL_EVTCHN_UNBIND); P(IOCTL_EVTCHN_NOTIFY); P(IOCTL_EVTCHN_RESET);
    P(sizeof(struct ioctl_gntdev_map_grant_ref));
    P(offsetof(struct ioctl_gntdev_map_grant_ref, index));
    P(offsetof(struct ioctl_gntdev_map_grant_ref, refs));
    P(sizeof(struct ioctl_gntdev_unmap_grant_ref));
    P(offsetof(struct ioctl_gntdev_unmap_grant_ref, count));
    P(sizeof(struct gntdev_grant_copy_segment));
    P(offsetof(struct gntdev_grant_copy_segment, dest));
    P(offsetof(struct gntdev_grant_copy_segment, source.foreign.offset));
    P(offsetof(struct gntdev_grant_copy_segment, source.foreign.domid));
    P(offsetof(struct gntdev_grant_copy_segment, len));
    P(offsetof(struct gntdev_grant_copy_segment, flags));
    P(offsetof(struct gntdev_grant_copy_segment, status));
    P(sizeof(struct ioctl_gntdev_grant_copy));
    P(offsetof(struct ioctl_gntdev_grant_copy, segments));
    P(offsetof(struct ioctl_gntalloc_alloc_gref, flags));
    P(offsetof(struct ioctl_gntalloc_alloc_gref, count));
    P(offsetof(struct ioctl_gntalloc_alloc_gref, index));
    P(offsetof(struct ioctl_gntalloc_alloc_gref, gref_ids));
    P(sizeof(struct ioctl_gntalloc_dealloc_gref));
    P(offsetof(struct ioctl_gntalloc_dealloc_gref, count));
    P(sizeof(struct ioctl_evtchn_bind_interdomain));
    P(offsetof(struct ioctl_evtchn_bind_interdomain, remote_port));
    P(GNTALLOC_FLAG_WRITABLE);
    return 0;
}
"#;

#[test]
fn numbers_and_layouts_are_those_of_the_headers() {
    if !std::path::Path::new("/usr/include/xen/gntdev.h").exists() {
        println!("skipped: no xen/gntdev.h: apt-get install linux-libc-dev");
        return;
    }
    let dir = std::env::temp_dir().join(format!("pvswitch-abi-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let (source, program) = (dir.join("abi.c"), dir.join("abi"));
    std::fs::write(&source, PROGRAM).unwrap();
    let built = Command::new("cc").arg("-o").args([&program, &source]).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let printed = Command::new(&program).output().unwrap().stdout;
    std::fs::remove_dir_all(dir).unwrap();
    let theirs = String::from_utf8(printed).unwrap();
    let theirs: Vec<usize> = theirs.lines().map(|l| l.parse().unwrap()).collect();
    let numbers = [
        GNTDEV_MAP_GRANT_REF,
        GNTDEV_UNMAP_GRANT_REF,
        GNTDEV_GRANT_COPY,
        GNTALLOC_ALLOC_GREF,
        GNTALLOC_DEALLOC_GREF,
        EVTCHN_BIND_INTERDOMAIN,
        EVTCHN_BIND_UNBOUND_PORT,
        EVTCHN_UNBIND,
        EVTCHN_NOTIFY,
        EVTCHN_RESET,
    ];
    let mut ours: Vec<usize> = numbers.iter().map(|n| *n as usize).collect();
    ours.extend([
        size_of::<MapGrantRef>(),
        offset_of!(MapGrantRef, index),
        offset_of!(MapGrantRef, domid),
        size_of::<Release>(),
        offset_of!(Release, count),
        size_of::<CopySegment>(),
        offset_of!(CopySegment, dest),
        offset_of!(Foreign, offset),
        offset_of!(Foreign, domid),
        offset_of!(CopySegment, len),
        offset_of!(CopySegment, flags),
        offset_of!(CopySegment, status),
        size_of::<GrantCopy>(),
        offset_of!(GrantCopy, segments),
        offset_of!(AllocGref, flags),
        offset_of!(AllocGref, count),
        offset_of!(AllocGref, index),
        size_of::<AllocGref>(),
        size_of::<Release>(),
        offset_of!(Release, count),
        size_of::<BindInterdomain>(),
        offset_of!(BindInterdomain, remote_port),
        usize::from(GNTALLOC_FLAG_WRITABLE),
    ]);
    assert_eq!(ours, theirs);
}

/// A device that rejects our calls.
struct Refuses(OwnedFd);

impl Grants for Refuses {
    fn copy(&self, pieces: &mut [Piece<'_>]) {
        super::grant_copy(self.0.as_fd(), &MappedGrants::default(), pieces);
    }
}

/// XSA-367: a segment's status is undefined if the call failed.
#[test]
fn a_failed_call_fails_every_piece() {
    let null = File::options().read(true).write(true).open("/dev/null").unwrap();
    let domain = Domain::new(1, Arc::new(Refuses(null.into())));
    let mut bytes = [0xaa; 100];
    assert_eq!(Seg::granted(&domain, 8, 0, 100).unwrap().read(&mut bytes), 0);
    assert_eq!(SegMut::granted(&domain, 8, 0, 100).unwrap().write(&bytes), 0);
    // More than one call takes; from grants, to grants, and between grants.
    let memory = Mapping::memfd("pieces", 4096).unwrap();
    let mut copies = Copies::new();
    for tag in 0..64 {
        let from = || Seg::granted(&domain, 8, 0, 100).unwrap();
        let to = || SegMut::granted(&domain, 9, 0, 100).unwrap();
        copies.copy(&mut memory.seg_mut(100, 100).unwrap(), from(), tag);
        copies.copy(&mut to(), memory.seg(0, 100).unwrap(), tag);
        copies.copy(&mut to(), from(), tag);
    }
    let (mut sources, mut destinations) = (0, 0);
    copies.finish(|_, whose| match whose {
        Failed::Source => sources += 1,
        Failed::Destination => destinations += 1,
    });
    assert_eq!((sources, destinations), (2 * 64, 64));
}

/// Records which sides of each piece are passed to the hypervisor as grants.
struct Flags {
    mapped: MappedGrants,
    seen: Mutex<Vec<u16>>,
}

impl Grants for Flags {
    fn copy(&self, pieces: &mut [Piece<'_>]) {
        for piece in pieces {
            let segment = segment_of(piece, &self.mapped, &mut 0);
            self.seen.lock().unwrap().push(segment.flags);
            piece.set(Ok(()));
        }
    }
}

/// The hypervisor does not copy to or from memory that is not the caller's own, even if it is
/// mapped.
#[test]
fn copies_between_a_static_page_and_a_grant_pass_both_as_grants() {
    let page = Mapping::memfd("static", 4096).unwrap();
    let own = Mapping::memfd("own", 4096).unwrap();
    let at = page.seg(0, 4096).unwrap().as_iovec().iov_base.addr();
    let grant = Granted { domid: 7, grefs: [42].into() };
    let mut mapped = MappedGrants::default();
    mapped.insert(at, grant);
    let find = |at, len| mapped.find(at, len, &mut 0);
    assert!(find(at - 1, 1).is_none() && find(at + 4096, 1).is_none());
    let found = find(at + 100, 100).unwrap();
    assert_eq!((found.domid, found.gref, found.offset), (7, 42, 100));
    let flags = Arc::new(Flags { mapped, seen: Mutex::default() });
    let domain = Domain::new(1, Arc::clone(&flags) as Arc<dyn Grants>);
    let granted = || Seg::granted(&domain, 8, 0, 100).unwrap();
    let mut copies = Copies::new();
    copies.copy(&mut page.seg_mut(200, 100).unwrap(), granted(), 0);
    copies.copy(&mut own.seg_mut(200, 100).unwrap(), granted(), 1);
    copies.copy(&mut SegMut::granted(&domain, 8, 0, 100).unwrap(), page.seg(0, 100).unwrap(), 2);
    copies.copy(&mut SegMut::granted(&domain, 8, 0, 100).unwrap(), own.seg(0, 100).unwrap(), 3);
    copies.finish(|tag, _| panic!("{tag} failed"));
    let (source, both) = (GNTCOPY_SOURCE_GREF, GNTCOPY_SOURCE_GREF | GNTCOPY_DEST_GREF);
    assert_eq!(*flags.seen.lock().unwrap(), [both, source, both, GNTCOPY_DEST_GREF]);
}

#[test]
fn pages_are_found_by_address_while_they_are_mapped() {
    let page = |n: usize| n * 4096;
    let ranges: [(usize, &[u32]); 3] = [(30, &[7, 8, 9]), (10, &[5]), (20, &[3, 2])];
    let mut mapped = MappedGrants::default();
    for (at, grefs) in ranges {
        mapped.insert(page(at), Granted { domid: at as u16, grefs: grefs.into() });
    }
    // For any cached range, valid or not.
    let found = |mapped: &MappedGrants, at| {
        let find = |mut last| mapped.find(at, 1, &mut last).map(|f| (f.domid, f.gref, f.offset));
        assert!((1..5).all(|last| find(last) == find(0)), "{at:#x}");
        find(0)
    };
    assert_eq!(found(&mapped, page(10)), Some((10, 5, 0)));
    assert_eq!(found(&mapped, page(11) - 1), Some((10, 5, 4095)));
    assert_eq!(found(&mapped, page(21) + 7), Some((20, 2, 7)));
    assert_eq!(found(&mapped, page(32)), Some((30, 9, 0)));
    let find = |at, len| mapped.find(at, len, &mut 0);
    assert!(find(page(21) - 8, 8).is_some() && find(page(21) - 8, 9).is_none());
    for at in [0, page(10) - 1, page(11), page(22), page(30) - 1, page(33), usize::MAX] {
        assert_eq!(found(&mapped, at), None);
    }
    mapped.remove(page(20));
    mapped.remove(page(31));
    assert_eq!((found(&mapped, page(20)), found(&mapped, page(31))), (None, Some((30, 8, 0))));
}
