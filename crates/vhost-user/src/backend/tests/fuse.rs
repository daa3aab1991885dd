//! Descriptors on a FUSE file system whose server does not reply.

use std::ffi::CString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::*;
use crate::foreign::ForeignFd;

const PATIENCE: Duration = Duration::from_secs(20);
/// Operations of FUSE's protocol, version 7 (`linux/fuse.h`).
const OPEN: u32 = 14;
const FLUSH: u32 = 25;
const INIT: u32 = 26;

/// A server that replies as needed to open its only file, and to nothing else until `replies` is
/// dropped.
struct Unresponsive {
    /// Dropped before the file, whose close waits for it.
    replies: Sender<()>,
    asked: Arc<Mutex<Vec<u32>>>,
    file: File,
}

impl Unresponsive {
    /// `None`: this process may not mount, or the kernel has no FUSE.
    fn new() -> Option<Self> {
        let server = File::options().read(true).write(true).open("/dev/fuse").ok()?;
        let at = std::env::temp_dir().join(format!("pvswitch-fuse-{}", std::process::id()));
        std::fs::write(&at, []).ok()?;
        let rights = format!("fd={},rootmode=100666,user_id=0,group_id=0", server.as_raw_fd());
        let flags = MountFlags::NODEV | MountFlags::NOSUID;
        let mounted = mount("test", &at, "fuse", flags, Some(&*CString::new(rights).unwrap()));
        let file = mounted.is_ok().then(|| {
            let asked = Arc::new(Mutex::new(Vec::new()));
            let (replies, silence) = channel();
            let theirs = Arc::clone(&asked);
            std::thread::spawn(move || serve(server, &theirs, &silence));
            let file = File::options().read(true).write(true).open(&at).unwrap();
            unmount(&at, UnmountFlags::DETACH).unwrap();
            Self { replies, asked, file }
        });
        let _ = std::fs::remove_file(&at);
        file
    }

    fn asked(&self) -> Vec<u32> {
        self.asked.lock().unwrap().clone()
    }
}

/// Until the file is closed.
fn serve(mut server: File, asked: &Mutex<Vec<u32>>, silence: &Receiver<()>) {
    let mut request = vec![0; 1 << 17];
    while let Ok(len) = server.read(&mut request) {
        if len < 40 {
            return;
        }
        let opcode = u32::from_ne_bytes(request[4..8].try_into().unwrap());
        let unique = &request[8..16];
        let body = match opcode {
            // Version 7.12, whose reply is short.
            INIT => [7_u32, 12, 0, 0, 0, 1 << 16].map(u32::to_ne_bytes).concat(),
            OPEN => vec![0; 16],
            _ => Vec::new(),
        };
        asked.lock().unwrap().push(opcode);
        if body.is_empty() {
            let _ = silence.recv();
        }
        let header = [(16 + body.len() as u32).to_ne_bytes(), [0; 4]].concat();
        // Some requests have no reply.
        let _ = server.write_all(&[&header, unique, &body].concat());
    }
}

/// Issue 14, row 2. The only request for the file is caused by its close, which blocks on its own
/// lane, and stays charged.
#[test]
fn files_of_a_server_that_never_replies_delay_no_other_port() {
    let Some(server) = Unresponsive::new() else {
        eprintln!("skipped: no FUSE mount here (/dev/fuse, or the right to mount)");
        return;
    };
    let mut rig = Rig::ready(feature::VERSION_1);
    let account = Arc::clone(rig.backend.account());
    // The memory's descriptor, kept for an upgrade.
    assert_eq!(account.descriptors.used(), 1);
    let one = MemRegion::table_to_bytes(&[region(GUEST, USER, SIZE)]);
    let began = Instant::now();
    for (n, (request, payload)) in [
        (R::SET_MEM_TABLE, one),
        (R::SET_VRING_KICK, u(0)),
        (R::SET_VRING_CALL, u(0)),
        (R::SET_BACKEND_REQ_FD, vec![]),
    ]
    .into_iter()
    .enumerate()
    {
        let fd = server.file.try_clone().unwrap().into();
        let error = rig.send(request, payload, vec![fd]).unwrap_err();
        assert!(matches!(error, E::FdKind { kind: FdKind::Other, .. }), "{error}");
        // Each is charged until its server replies, that is, never.
        assert_eq!(account.descriptors.used(), n as u64 + 2);
    }
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    // Another port's descriptors are closed as usual.
    let other = Arc::new(Account::default());
    drop(ForeignFd::new(event(), &other).unwrap());
    wait(|| other.descriptors.used() == 0);
    wait(|| server.asked().contains(&FLUSH));
    assert_eq!(server.asked(), [INIT, OPEN, FLUSH]);
    drop(server.replies);
    wait(|| account.descriptors.used() == 1);
}

fn wait(done: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "timed out");
        std::thread::sleep(Duration::from_millis(1));
    }
}
