//! Our store with Debian's xenstore tools (package xenstore-utils).

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use xen_local::store::{Limits, Server};
use xen_netif::store::Store;

/// Directory of the tools, if they are installed.
fn tools() -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).find(|dir| dir.join("xenstore-ls").exists())
}

fn run(socket: &Path, tool: &str, args: &[&str]) -> (bool, String) {
    let mut command = Command::new("timeout");
    let command = command.arg("20").arg(tool).args(args).env("XENSTORED_PATH", socket);
    let output = command.stdin(Stdio::null()).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(text).unwrap())
}

#[test]
fn debians_tools_work_on_our_store() {
    if tools().is_none() {
        println!("skipped: no xenstore-ls: apt-get install xenstore-utils");
        return;
    }
    let dir = std::env::temp_dir().join(format!("pvswitch-tools-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let socket = dir.join("xenstored");
    let server = Server::start(Limits::XENSTORED).unwrap();
    server.listen(&socket, 0, &os::Permissions::OWNER).unwrap();
    let store = Store::connect(&socket).unwrap();
    let ok = |tool: &str, args: &[&str]| {
        let (ok, text) = run(&socket, tool, args);
        assert!(ok, "{tool} {args:?}: {text}");
        text
    };
    ok("xenstore-write", &["/a/b", "hello", "/a/c", "x"]);
    assert_eq!(store.read("/a/b").unwrap().as_deref(), Some("hello"));
    assert_eq!(ok("xenstore-read", &["/a/b"]), "hello\n");
    assert_eq!(ok("xenstore-list", &["/a"]), "b\nc\n");
    ok("xenstore-chmod", &["/a/b", "n0", "r5"]);
    assert_eq!(store.perms("/a/b").unwrap().len(), 2);
    let listing = ok("xenstore-ls", &["-f", "-p", "/"]);
    assert!(listing.contains("/a/b = \"hello\"") && listing.contains("(n0,r5)"), "{listing}");
    (0..600).for_each(|i| store.mkdir(&format!("/many/name-{i:04}")).unwrap());
    assert_eq!(ok("xenstore-list", &["/many"]).lines().count(), 600);

    let mut watch = Command::new("timeout");
    watch.args(["20", "xenstore-watch", "-n", "3", "/a"]).env("XENSTORED_PATH", &socket);
    let watch = watch.stdout(Stdio::piped()).spawn().unwrap();
    // It prints an event at once, then one per change: write until it exits.
    let done = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let ended = std::sync::Arc::clone(&done);
    let writer = std::thread::spawn(move || {
        while !ended.load(std::sync::atomic::Ordering::Relaxed) {
            store.write("/a/b", "1").unwrap();
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    });
    let seen = watch.wait_with_output().unwrap();
    assert!(seen.status.success());
    done.store(true, std::sync::atomic::Ordering::Relaxed);
    writer.join().unwrap();
    let seen = String::from_utf8(seen.stdout).unwrap();
    assert_eq!(seen.lines().collect::<Vec<_>>(), ["/a", "/a/b", "/a/b"]);
    ok("xenstore-rm", &["/a"]);
    assert!(!run(&socket, "xenstore-read", &["/a/c"]).0);
    assert!(!run(&socket, "xenstore-write", &["/../x", "1"]).0);
    drop(server);
    std::fs::remove_dir_all(dir).unwrap();
}
