//! The helper serves on a thread here; its requests go over the same kind of socket.

use std::io::Read;
use std::os::unix::net::UnixStream;

use super::*;

/// A helper whose programs are `sh -c ARGUMENT`, as the process's own.
fn with_helper(test: impl FnOnce()) {
    let (ours, theirs) = socketpair().unwrap();
    *HELPER.lock().unwrap() = Some(ours);
    let serves = std::thread::spawn(move || {
        serve(theirs.as_fd(), |kind, argument| match kind {
            "sh" => {
                let mut command = Command::new("sh");
                command.args(["-c", argument]);
                Ok(command)
            }
            "none" => Ok(Command::new("/nonexistent/program")),
            _ => Err(io::Error::other("no such kind")),
        })
    });
    test();
    *HELPER.lock().unwrap() = None;
    serves.join().unwrap().unwrap();
}

/// Runs a line of the shell, and returns it and the other end of its standard input.
fn shell(line: &str) -> (Program, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (start_program("sh", line, theirs.into()).unwrap(), ours)
}

/// In one test, as a process has one helper.
#[test]
fn what_a_confined_thread_may_not_is_done_for_it() {
    with_helper(|| {
        let (Program { pid, .. }, mut end) = shell("echo hello >&0; exit 3");
        let mut text = String::new();
        end.read_to_string(&mut text).unwrap();
        assert_eq!(text, "hello\n");
        assert_eq!(end_program(pid).as_deref(), Some("exit status: 3"));
        assert_eq!(end_program(pid), None, "it is unknown by now");

        let (Program { pid, .. }, mut end) = shell("exec sleep 1000");
        assert_eq!(end_program(pid).as_deref(), Some("signal: 9 (SIGKILL)"));
        assert_eq!(end.read(&mut [0]).unwrap(), 0);

        // By its descriptor, as for a helper that has not started it; then it has ended.
        let (Program { pid, process }, mut end) = shell("exec sleep 1000");
        end_process(process.as_fd());
        assert_eq!(end.read(&mut [0]).unwrap(), 0);
        assert_eq!(end_program(pid).as_deref(), Some("signal: 9 (SIGKILL)"));
        end_process(process.as_fd());

        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        let error = start_program("none", "", null()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        let error = start_program("other", "", null()).unwrap_err();
        assert_eq!(error.to_string(), "no such kind");
        assert!(start_program("sh", "a\0b", null()).is_err());

        assert_eq!(group("root"), Some(0));
        assert_eq!(group("no-such-group"), None);
        let own = open_net_namespace(Path::new("/proc/self/ns/net")).unwrap();
        assert!(is_net_namespace(own.as_fd()));
        for (path, error) in [("/proc/self/ns/uts", libc::EINVAL), ("/nonexistent", libc::ENOENT)] {
            let got = open_net_namespace(Path::new(path)).unwrap_err();
            assert_eq!(got.raw_os_error(), Some(error), "{path}");
        }
    });
    assert!(start_program("sh", "", File::open("/dev/null").unwrap().into()).is_err());
    assert!(open_net_namespace(Path::new("/proc/self/ns/net")).is_ok(), "this process opens it");
}
