//! Cases that end or limit a process run in their own process: this test binary again, with the
//! case in a variable.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};
use std::sync::atomic::AtomicBool;

use proptest::prelude::*;

use super::*;
use crate::Mapping;

const CASE: &str = "PVSWITCH_GUARD_CASE";
const PAGE: u64 = 4096;

/// Runs `case` of [`runs_one_case`].
fn run(case: &str) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "guard::tests::runs_one_case", "--nocapture"]);
    command.env(CASE, case).output().unwrap()
}

fn survives(case: &str) {
    let output = run(case);
    let said = String::from_utf8_lossy(&output.stdout);
    let failed = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{case}: {:?}\n{said}{failed}", output.status);
    assert!(said.contains("the case was run"), "{said}{failed}");
}

fn ends_by_sigbus(case: &str) {
    let output = run(case);
    let failed = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{case}: {failed}");
}

#[test]
fn runs_one_case() {
    let Ok(case) = std::env::var(CASE) else { return };
    match case.as_str() {
        "data limit" => data_limit(),
        "address space limit" => address_space_limit(),
        "mapping limit" => mapping_limit(),
        "file size limit" => file_size_limit(),
        "freed" => freed(),
        "killed" => {
            let _mapping = lost(PAGE);
            // SAFETY: a plain system call.
            unsafe { libc::raise(libc::SIGBUS) };
        }
        "not guarded" => {
            let _mapping = lost(PAGE);
            let file = file(0);
            let at = anywhere(file.as_raw_fd(), PAGE as usize).unwrap();
            // SAFETY: beyond the end of the file, which raises the signal that is wanted.
            unsafe { at.read_volatile() };
        }
        _ => panic!("no case {case}"),
    }
    println!("the case was run");
}

fn file(len: u64) -> File {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("pvswitch-guard-{}-{n}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file.set_len(len).unwrap();
    file
}

/// A mapping whose file was truncated, and that is marked lost.
fn lost(len: u64) -> Mapping {
    let file = file(len);
    let mapping = Mapping::new(file.as_fd(), 0, len).unwrap();
    file.set_len(0).unwrap();
    assert_eq!(mapping.seg_mut(0, 1).unwrap().write(&[7]), 1);
    assert!(mapping.is_lost());
    mapping
}

fn anywhere(fd: i32, len: usize) -> Option<*mut u8> {
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { libc::mmap(ptr::null_mut(), len, prot, libc::MAP_SHARED, fd, 0) };
    (at != libc::MAP_FAILED).then_some(at.cast())
}

fn limit(resource: libc::__rlimit_resource_t, bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: `limit` is valid during the call.
    assert_eq!(unsafe { libc::setrlimit(resource, &raw const limit) }, 0);
}

/// Pages of all mappings, and of data.
fn statm() -> [u64; 2] {
    let line = std::fs::read_to_string("/proc/self/statm").unwrap();
    let field: Vec<u64> = line.split_whitespace().map(|n| n.parse().unwrap()).collect();
    [field[0], field[5]]
}

/// Bytes that the substitute holds.
fn held() -> i64 {
    // SAFETY: all-zero is a valid `stat` to be filled in.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` is valid for writes during the call.
    assert_eq!(unsafe { libc::fstat(SUBSTITUTE.load(Ordering::Relaxed), &raw mut stat) }, 0);
    stat.st_blocks * 512
}

fn data_limit() {
    let len = 512 << 20;
    let files: Vec<File> = (0..4).map(|_| file(len)).collect();
    let all: Vec<_> = files.iter().map(|f| Mapping::new(f.as_fd(), 0, len).unwrap()).collect();
    // The current use, and some for the harness.
    limit(libc::RLIMIT_DATA, statm()[1] * PAGE + (64 << 20));
    assert!(sys::anonymous(len as usize).is_err(), "the limit holds");
    files.iter().for_each(|file| file.set_len(0).unwrap());
    for mapping in &all {
        mapping.seg_mut(len as usize - 8, 8).unwrap().write(&[1; 8]);
        assert!(mapping.is_lost());
    }
}

fn address_space_limit() {
    let len = 1 << 30;
    let file = file(len);
    let mapping = Mapping::new(file.as_fd(), 0, len).unwrap();
    limit(libc::RLIMIT_AS, statm()[0] * PAGE + (64 << 20));
    assert!(sys::anonymous(len as usize).is_err(), "the limit holds");
    file.set_len(0).unwrap();
    assert_eq!(mapping.seg(0, 1).unwrap().first(), Some([0]));
    assert!(mapping.is_lost());
}

fn mapping_limit() {
    let files: Vec<File> = (0..8).map(|_| file(PAGE)).collect();
    let all: Vec<_> = files.iter().map(|f| Mapping::new(f.as_fd(), 0, PAGE).unwrap()).collect();
    files.iter().for_each(|file| file.set_len(0).unwrap());
    // Changes every second page, so that each is a mapping, up to the limit. Nothing below may
    // allocate.
    let many = sys::anonymous(1 << 30).unwrap().as_ptr();
    let split = |i: usize| {
        // SAFETY: inside the mapping made above, whose 2^18 pages are more than the limit.
        let at = unsafe { many.add(i * 2 * PAGE as usize) };
        // SAFETY: our own unused page.
        unsafe { libc::mprotect(at.cast(), PAGE as usize, libc::PROT_NONE) == 0 }
    };
    let fits = (0..1 << 17).take_while(|i| split(*i)).count();
    // One more than that, which the system allows to `mmap`: until it fails.
    let more = (0..1 << 17).take_while(|_| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { libc::mmap(ptr::null_mut(), 1, libc::PROT_EXEC, flags, -1, 0) };
        at != libc::MAP_FAILED
    });
    let more = more.count();
    for mapping in &all {
        mapping.seg_mut(0, 8).unwrap().write(&[1; 8]);
    }
    let spared = SPARE.iter().filter(|spare| spare.load(Ordering::Relaxed) == 0).count();
    // SAFETY: as above; the whole range is unmapped, which needs no further mapping.
    unsafe { libc::munmap(many.cast(), 1 << 30) };
    assert!(all.iter().all(Mapping::is_lost));
    println!("{fits} and {more} mappings, {spared} spared");
    assert!(fits > 10_000 && spared < SPARES, "{fits} {more} {spared}");
}

fn file_size_limit() {
    let memory = sys::memfd("t", PAGE).unwrap();
    limit(libc::RLIMIT_FSIZE, 1 << 40);
    let error = Mapping::new(memory.as_fd(), 0, PAGE).unwrap_err();
    assert!(matches!(error, MapError::Unguarded { .. }), "{error}");
    assert!(error.to_string().contains("RLIMIT_FSIZE"), "{error}");
}

/// Each lost mapping has its own pages, which are freed with it.
fn freed() {
    let (one, other) = (lost(2 << 20), lost(2 << 20));
    one.seg_mut(PAGE as usize, 4).unwrap().write(&[1; 4]);
    other.seg_mut(PAGE as usize, 4).unwrap().write(&[2; 4]);
    assert_eq!(one.seg(PAGE as usize, 1).unwrap().first(), Some([1]));
    assert_eq!(held(), 4 * PAGE as i64, "as much as was touched");
    drop(one);
    assert_eq!(held(), 2 * PAGE as i64);
    assert_eq!(other.seg(PAGE as usize, 1).unwrap().first(), Some([2]));
    drop(other);
    assert_eq!(held(), 0);
}

/// Issue 14, row 1.
#[test]
fn truncated_memory_is_survived_at_the_limit_of_data() {
    survives("data limit");
}

#[test]
fn truncated_memory_is_survived_at_the_limit_of_address_space() {
    survives("address space limit");
}

/// Issue 14, row 1.
#[test]
fn truncated_memory_is_survived_at_the_limit_of_mappings() {
    survives("mapping limit");
}

#[test]
fn memory_is_refused_if_its_loss_could_not_be_survived() {
    survives("file size limit");
}

#[test]
fn substitute_pages_are_freed_with_their_mapping() {
    survives("freed");
}

/// Issue 14, row 11.
#[test]
fn other_sigbus_signals_keep_their_action() {
    ends_by_sigbus("killed");
    ends_by_sigbus("not guarded");
}

/// Issue 14, row 11. Addresses are freed and reused by mappings that are lost, while other mappings
/// must keep their contents.
#[test]
fn reuse_of_addresses_while_memory_is_lost_keeps_other_contents() {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let lose = || {
            for _ in 0..1500 {
                drop([lost(PAGE), lost(4 * PAGE)]);
            }
        };
        let losers: Vec<_> = (0..3).map(|_| scope.spawn(lose)).collect();
        for id in 1..3_u8 {
            let done = &done;
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    let kept = Mapping::memfd("kept", 3 * PAGE).unwrap();
                    kept.seg_mut(0, 3 * PAGE as u32).unwrap().write(&[id; 3 * PAGE as usize]);
                    std::thread::yield_now();
                    let mut bytes = [0; 3 * PAGE as usize];
                    kept.seg(0, 3 * PAGE as u32).unwrap().read(&mut bytes);
                    assert!(bytes == [id; 3 * PAGE as usize] && !kept.is_lost());
                }
            });
        }
        let ended: Vec<_> = losers.into_iter().map(|loser| loser.join()).collect();
        done.store(true, Ordering::Relaxed);
        assert!(ended.iter().all(Result::is_ok));
    });
}

/// Large pages are replaced as a whole. Without a free large page, the first access faults as on a
/// truncated file.
#[test]
fn memory_of_large_pages_is_survived() {
    let flags = libc::MFD_CLOEXEC | libc::MFD_HUGETLB;
    let Ok(fd) = sys::memfd_of(c"large", flags) else {
        println!("skipped: this system has no hugetlbfs");
        return;
    };
    sys::lengthen(&fd, 8 << 20).unwrap();
    let mapping = Mapping::new(fd.as_fd(), 0, (4 << 20) + 1).unwrap();
    sys::lengthen(&fd, 0).unwrap();
    assert!(mapping.len() > 4 << 20 && mapping.len().is_multiple_of(2 << 20));
    mapping.seg_mut((3 << 20) + 5, 4).unwrap().write(&[1; 4]);
    assert_eq!(mapping.seg((3 << 20) + 5, 1).unwrap().first(), Some([1]));
    assert_eq!(mapping.seg(mapping.len() - 1, 1).unwrap().first(), Some([0]));
    assert!(mapping.is_lost());
}

/// Several threads fault on the same lost memory concurrently.
#[test]
fn memory_lost_by_many_threads_counts_once() {
    let len = 64 * PAGE;
    for _ in 0..50 {
        let file = file(len);
        let mapping = Mapping::new(file.as_fd(), 0, len).unwrap();
        file.set_len(0).unwrap();
        std::thread::scope(|scope| {
            for id in 0..4_usize {
                let mapping = &mapping;
                scope.spawn(move || {
                    for page in (id..64).step_by(4) {
                        mapping.seg_mut(page * PAGE as usize, 1).unwrap().write(&[id as u8 + 1]);
                    }
                });
            }
        });
        for page in 0..64 {
            let first = mapping.seg(page * PAGE as usize, 1).unwrap().first();
            assert_eq!(first, Some([(page % 4) as u8 + 1]), "page {page}");
        }
        assert!(mapping.is_lost());
    }
}

fn depth(tree: &Tree) -> usize {
    tree.as_ref().map_or(0, |node| 1 + depth(&node.below).max(depth(&node.above)))
}

fn node(start: usize, end: usize) -> Node {
    Node::new(start, end, Arc::default())
}

/// Issue 14, row 1: map, unmap and find do not walk over all mappings.
#[test]
fn one_of_65_000_mappings_is_found_in_a_few_steps() {
    let mut tree = None;
    let top = 0x7fff_0000_0000_usize;
    for i in 1..65_001 {
        tree = with(&tree, &node(top - i * 8192, top - i * 8192 + 4096));
    }
    assert!(depth(&tree) < 64, "{}", depth(&tree));
    for i in (1..65_001).step_by(2) {
        tree = without(&tree, top - i * 8192);
    }
    assert!(depth(&tree) < 64, "{}", depth(&tree));
    let find = |addr| tree.as_ref().and_then(|root| root.find(addr)).map(|node| node.start);
    assert_eq!(find(top - 2 * 8192 + 4095), Some(top - 2 * 8192));
    assert_eq!((find(top - 2 * 8192 + 4096), find(top - 8192), find(top)), (None, None, None));
}

proptest! {
    #[test]
    fn address_is_found_in_the_range_that_holds_it(
        steps in prop::collection::vec((0_usize..64, 1_usize..4, any::<bool>()), 1..200),
    ) {
        let (mut tree, mut model) = (None, BTreeMap::new());
        for (start, len, add) in steps {
            let (start, end) = (start * 4, start * 4 + len);
            if !add {
                tree = without(&tree, start);
                model.remove(&start);
            } else if let Entry::Vacant(new) = model.entry(start) {
                tree = with(&tree, &node(start, end));
                new.insert(end);
            }
            for addr in 0..260 {
                let found = tree.as_ref().and_then(|root| root.find(addr));
                let range = model.range(..=addr).next_back().filter(|(_, end)| addr < **end);
                prop_assert_eq!(found.map(|n| (n.start, n.end)), range.map(|(s, e)| (*s, *e)));
            }
        }
    }
}
