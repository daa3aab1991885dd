//! `pvswitch lab` runs `pvswitch-lab` from the same folder; the tests of that program are in its
//! crate.

mod common;

use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use common::{Dir, Switch, pvswitch};

const PVSWITCH: &str = env!("CARGO_BIN_EXE_pvswitch");

/// The program under a second name, in its own folder, and the path at which it expects
/// `pvswitch-lab`. The file is linked: one just written cannot be run while another thread forks.
fn alone(name: &str) -> (PathBuf, PathBuf) {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let program = folder.join("pvswitch");
    std::fs::hard_link(PVSWITCH, &program).unwrap();
    (program, folder.join("pvswitch-lab"))
}

fn run(program: &Path, args: &[&str]) -> Output {
    Command::new(program).arg("lab").args(args).stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap()
}

#[test]
fn arguments_and_exit_status_are_passed_as_they_are() {
    let (program, lab) = alone("passed");
    symlink("/bin/sh", lab).unwrap();
    let script = ["-c", "for arg; do echo \"<$arg>\"; done; exit 7", "sh"];
    let args = ["run", "x", "--only", "a=1,2", "--help", "-V", "--", "", "two words", "--json"];
    let output = run(&program, &[&script[..], &args].concat());
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    let wanted: String = args.iter().map(|arg| format!("<{arg}>\n")).collect();
    assert_eq!(text(output.stdout), wanted);
    // It is in the folder of the program, not of a link to it.
    let link = program.with_file_name("link");
    symlink(&program, &link).unwrap();
    assert_eq!(text(run(&link, &["-c", "echo there"]).stdout), "there\n");
}

#[test]
fn it_is_the_same_process() {
    let (program, lab) = alone("same");
    symlink("/bin/sh", lab).unwrap();
    let mut command = Command::new(program);
    command.args(["lab", "-c", "echo $$; kill -TERM $$"]).stdout(Stdio::piped());
    let child = command.spawn().unwrap();
    let pid = child.id().to_string();
    let output = child.wait_with_output().unwrap();
    assert_eq!(text(output.stdout).trim(), pid);
    assert_eq!(output.status.signal(), Some(15));
}

#[test]
fn a_missing_program_is_reported_with_its_place_and_what_to_do() {
    let (program, lab) = alone("missing");
    let output = run(&program, &["list"]);
    let error = text(output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    for word in [&lab.display().to_string(), "cargo build --release", "installed beside"] {
        assert!(error.contains(word), "{word}: {error}");
    }
    std::fs::write(&lab, "no program").unwrap();
    let output = run(&program, &["list"]);
    let error = text(output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("cannot run") && error.contains("ermission denied"), "{error}");
}

#[test]
fn the_real_one_has_its_own_help() {
    if !Path::new(PVSWITCH).with_file_name("pvswitch-lab").exists() {
        println!("skipped: no pvswitch-lab beside pvswitch (cargo build --bin pvswitch-lab)");
        return;
    }
    let said = |args: &[&str]| text(pvswitch().arg("lab").args(args).output().unwrap().stdout);
    assert!(said(&["list"]).contains("polling"));
    assert!(said(&["--help"]).contains("Usage: pvswitch lab <COMMAND>"));
    assert!(said(&["run", "--help"]).contains("Usage: pvswitch lab run [OPTIONS] <STUDY>"));
}

/// The lab's guests without root: root only in a user namespace.
#[test]
fn a_nic_in_a_user_namespace() {
    let unshare = ["--user", "--map-root-user", "--net"];
    let possible = Command::new("unshare").args(unshare).arg("true").output();
    if !possible.is_ok_and(|output| output.status.success()) {
        println!("skipped: no user namespaces here");
        return;
    }
    let dir = Dir::new();
    let _switch = Switch::start(&dir, &[], &[dir.port("a", "")]);
    let connect = format!("vhost-user:{}", dir.text("a"));
    let nic = pvswitch();
    let mut command = Command::new("unshare");
    command.args(unshare).arg("--").arg(nic.get_program());
    command.args([
        "nic",
        "--connect",
        &connect,
        "--tap",
        "t0",
        "--mtu",
        "9000",
        "--duration",
        "0.3",
    ]);
    let output = command.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
}
