use std::os::unix::net::UnixListener;
use std::process::Command;

use rustix::fs::chown;
use rustix::net::SocketAddrUnix;

use super::Carries::{Messages, Stream};
use super::*;
use crate::{Received, connect, recv, send, wait_readable};

const NOBODY: u32 = 65534;

fn dir(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("pvswitch-os-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

fn bind(path: &Path) -> Result<Listener, SocketError> {
    Listener::bind(path, Stream, &Permissions::OWNER)
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

/// Whether the test runs as root; otherwise it says that it is skipped.
fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: needs root, to act as another user");
    }
    root
}

#[test]
fn invalid_socket_paths() {
    let dir = dir("paths");
    let long = dir.join("x".repeat(120));
    assert!(matches!(bind(&long), Err(SocketError::PathTooLong(_))));
    assert!(matches!(connect(&long, Stream), Err(SocketError::PathTooLong(_))));
    let nowhere = dir.join("nowhere/s");
    assert!(matches!(bind(&nowhere), Err(SocketError::NoDirectory(_))));
    assert!(matches!(connect(&nowhere, Stream), Err(SocketError::NoListener(_))));
    let file = dir.join("file");
    std::fs::write(&file, "x").unwrap();
    assert!(matches!(bind(&file), Err(SocketError::NotASocket(_))));
    assert!(matches!(
        connect(&dir, Stream),
        Err(SocketError::NoListener(_) | SocketError::Os { .. })
    ));
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn private_listener_is_its_owners_alone() {
    let dir = dir("private");
    let path = dir.join("s");
    let listener = bind(&path).unwrap();
    assert_eq!(mode(&path), 0o600);
    drop(connect(&path, Stream).unwrap());
    assert!(listener.accept().unwrap().is_some());
    drop(listener);
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_living_listener_is_busy_and_a_dead_ones_socket_is_replaced() {
    let dir = dir("busy");
    let path = dir.join("s");
    let first = bind(&path).unwrap();
    assert_eq!(first.path(), path);
    assert!(matches!(bind(&path), Err(SocketError::Busy { .. })));
    drop(first);
    assert!(!path.exists(), "the name is removed with the listener");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "a dead process leaves its name");
    let second = bind(&path).unwrap();
    assert!(second.accept().unwrap().is_none());
    let client = connect(&path, Stream).unwrap();
    let server = second.accept_within(Duration::from_secs(5)).unwrap();
    send(client.as_fd(), b"hello", &[]).unwrap();
    let mut buf = [0; 8];
    assert!(wait_readable(server.as_fd(), Duration::from_secs(5)).unwrap());
    let got = recv(server.as_fd(), &mut buf, &mut Vec::new(), 0).unwrap();
    assert_eq!(got, Received::Bytes(5));
    drop(client);
    let got = recv(server.as_fd(), &mut buf, &mut Vec::new(), 0).unwrap();
    assert_eq!(got, Received::Closed);
    drop(second);
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn no_connection_is_an_error_after_the_timeout() {
    let dir = dir("timeout");
    let listener = bind(&dir.join("s")).unwrap();
    let error = listener.accept_within(Duration::from_millis(5)).unwrap_err();
    assert!(matches!(error, SocketError::NoPeer(_)), "{error}");
    drop(listener);
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_listener_with_a_full_backlog_does_not_block_us() {
    let dir = dir("backlog");
    let path = dir.join("s");
    let full = socket(Stream).unwrap();
    rustix::net::bind(&full, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&full, 1).unwrap();
    let waiting: Vec<_> = (0..100).map_while(|_| connect(&path, Stream).ok()).collect();
    assert!(waiting.len() < 100);
    let error = connect(&path, Stream).unwrap_err();
    assert!(matches!(error, SocketError::NoListener(_)), "{error}");
    assert!(matches!(bind(&path), Err(SocketError::Busy { .. })));
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_listener_that_cannot_accept_is_an_os_error() {
    let dir = dir("accept");
    let listener = Listener {
        socket: socket(Stream).unwrap(),
        path: dir.clone(),
        made: Some((0, 0)),
        lent: false,
    };
    let error = listener.accept().unwrap_err();
    assert!(matches!(error, SocketError::Os { what: "accept", .. }), "{error}");
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn mode_and_group_are_as_given_whatever_the_umask_is() {
    let dir = dir("modes");
    let path = dir.join("s");
    for want in [0o600, 0o660, 0o666, 0o777] {
        let permissions = Permissions { mode: want, group: None };
        let listener = Listener::bind(&path, Stream, &permissions).unwrap();
        assert_eq!(mode(&path), want);
        assert_eq!(permissions.is_for_all(), want & 2 != 0);
        assert!(listener.is_at(&path) && !listener.is_at(&dir));
    }
    let names = std::fs::read_dir(&dir).unwrap().count();
    assert_eq!(names, 0, "no name is left");
    if is_root() {
        let group = Group::find("36");
        let listener = Listener::bind(&path, Stream, &Permissions { mode: 0o660, group });
        let metadata = std::fs::metadata(&path).unwrap();
        assert_eq!((metadata.gid(), metadata.mode() & 0o777), (36, 0o660));
        drop(listener);
    }
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn long_names_in_long_directories_have_a_temporary_name_too() {
    let dir = dir("long");
    let below = "d".repeat(95_usize.saturating_sub(dir.as_os_str().len()).max(1));
    let below = dir.join(below);
    std::fs::create_dir_all(&below).unwrap();
    let rest = PATH_MAX - below.as_os_str().len() - 1;
    let path = below.join("s".repeat(rest));
    assert_eq!(path.as_os_str().len(), PATH_MAX);
    let listener = bind(&path).unwrap();
    drop(connect(&path, Stream).unwrap());
    assert!(listener.accept().unwrap().is_some());
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_name_that_another_user_took_in_a_shared_directory_is_refused() {
    if !is_root() {
        return;
    }
    let dir = dir("taken");
    let path = dir.join("s");
    drop(UnixListener::bind(&path).unwrap());
    let nobody = Some(rustix::fs::Uid::from_raw(NOBODY));
    chown(&path, nobody, None).unwrap();
    // A directory of our own: the name is a dead process's of our service.
    drop(bind(&path).unwrap());
    drop(UnixListener::bind(&path).unwrap());
    chown(&path, nobody, None).unwrap();
    std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o1777)).unwrap();
    let error = bind(&path).unwrap_err();
    assert!(matches!(error, SocketError::Taken { uid: NOBODY, .. }), "{error}");
    assert!(error.to_string().contains("a file of user 65534 has that name"), "{error}");
    assert!(path.exists(), "the name stays");
    std::fs::remove_dir_all(dir).unwrap();
}

/// Many processes start at once on the name of a dead one; each either listens or reports another.
#[test]
fn of_many_that_take_over_a_name_exactly_one_listens() {
    let dir = dir("many");
    let path = dir.join("s");
    for _ in 0..50 {
        drop(UnixListener::bind(&path).unwrap());
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let path = path.clone();
                std::thread::spawn(move || bind(&path))
            })
            .collect();
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        let (bound, refused): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
        assert!(refused.iter().all(|r| matches!(r, Err(SocketError::Busy { .. }))), "{refused:?}");
        assert_eq!(bound.len(), 1, "{bound:?}");
        let listener = bound.into_iter().next().unwrap().unwrap();
        assert!(listener.is_at(&path), "it has the name");
    }
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_group_that_the_user_is_not_in_is_an_error() {
    // As user nobody, this test runs itself again.
    const AGAIN: &str = "PVSWITCH_OS_GROUP_TEST";
    if let Some(path) = std::env::var_os(AGAIN) {
        let permissions = Permissions { mode: 0o660, group: Group::find("0") };
        let error = Listener::bind(Path::new(&path), Stream, &permissions).unwrap_err();
        assert!(matches!(error, SocketError::NotOfGroup { .. }), "{error}");
        assert!(error.to_string().contains("cannot change its group to 0"), "{error}");
        return;
    }
    if !is_root() {
        return;
    }
    use std::os::unix::process::CommandExt;
    let dir = dir("group");
    chown(&dir, Some(rustix::fs::Uid::from_raw(NOBODY)), None).unwrap();
    let mut again = Command::new(std::env::current_exe().unwrap());
    again.args(["a_group_that_the_user_is_not_in", "--nocapture"]).env(AGAIN, dir.join("s"));
    match again.uid(NOBODY).gid(NOBODY).output() {
        Ok(out) => {
            let text = String::from_utf8_lossy(&out.stdout);
            assert!(out.status.success() && text.contains("1 passed"), "{out:?}");
        }
        Err(error) => eprintln!("skipped: user nobody cannot run the test: {error}"),
    }
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0, "no name is left");
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn a_busy_socket_names_its_process() {
    let dir = dir("pid");
    let path = dir.join("s");
    let _first = bind(&path).unwrap();
    let error = bind(&path).unwrap_err();
    assert!(error.to_string().contains("this process listens there already"), "{error}");
    let messages = Listener::bind(&path, Messages, &Permissions::OWNER).unwrap_err();
    assert!(messages.to_string().contains("another process listens there; stop it"), "{messages}");
    let other = SocketError::Busy { path, pid: Some(1) };
    assert!(other.to_string().contains("another process listens there (pid 1); stop it"));
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn directories_are_searched_by_those_who_may_connect() {
    let dir = dir("create");
    for (socket, want) in [(0o600, 0o700), (0o660, 0o750), (0o666, 0o755), (0o602, 0o705)] {
        let path = dir.join("d");
        let permissions = Permissions { mode: socket, group: None };
        assert!(create_directory(&path, &permissions).unwrap());
        assert_eq!(mode(&path), want);
        assert!(!create_directory(&path, &Permissions::OWNER).unwrap(), "it exists");
        assert_eq!(mode(&path), want, "and keeps its mode");
        std::fs::remove_dir(path).unwrap();
    }
    assert!(create_directory(&dir.join("no/d"), &Permissions::OWNER).is_err());
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn name_of_another_process_is_left_alone_until_it_is_ours() {
    let dir = dir("adopted");
    let path = dir.join("s");
    let theirs = Listener::bind(&path, Stream, &Permissions::OWNER).unwrap();
    let adopt = || {
        let socket = theirs.as_fd().try_clone_to_owned().unwrap();
        Listener::adopt(socket, theirs.path(), theirs.made())
    };
    drop(adopt());
    assert!(path.exists(), "it did not take over");
    let mut ours = adopt();
    ours.own();
    assert!(ours.is_at(&path));
    drop(ours);
    assert!(!path.exists());
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn permissions_of_a_listener_change_without_another_socket() {
    let dir = dir("permit");
    let path = dir.join("s");
    let listener = bind(&path).unwrap();
    let before = identity(&path);
    let all = Permissions { mode: 0o666, group: None };
    let old = listener.permit(&all).unwrap();
    assert_eq!((old.mode, mode(&path)), (0o600, 0o666));
    connect(&path, Stream).unwrap();
    listener.permit(&old).unwrap();
    assert_eq!((mode(&path), identity(&path)), (0o600, before));
    if is_root() {
        let group = Group { id: NOBODY, name: "nogroup".into() };
        let old = listener.permit(&Permissions { mode: 0o660, group: Some(group) }).unwrap();
        let gid = || std::fs::metadata(&path).unwrap().gid();
        assert_eq!((mode(&path), gid()), (0o660, NOBODY));
        listener.permit(&old).unwrap();
        assert_eq!((mode(&path), gid()), (0o600, old.group.unwrap().id));
        // Without a group it is that of the process again.
        listener.permit(&all).unwrap();
        assert_eq!(gid(), rustix::process::getegid().as_raw());
    }
    // A link or another file in its place is not touched.
    std::fs::remove_file(&path).unwrap();
    let victim = dir.join("victim");
    std::fs::write(&victim, "x").unwrap();
    let was = mode(&victim);
    for replace in [std::os::unix::fs::symlink::<&Path, &Path>, |victim: &Path, path: &Path| {
        std::fs::hard_link(victim, path)
    }] {
        replace(&victim, &path).unwrap();
        let error = listener.permit(&all).unwrap_err();
        assert!(matches!(error, SocketError::Replaced(_)), "{error}");
        assert_eq!(mode(&victim), was);
        std::fs::remove_file(&path).unwrap();
    }
    std::fs::remove_dir_all(dir).unwrap();
}
