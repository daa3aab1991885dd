//! A switch does not depend on its standard output or its terminal.

mod common;

use common::{Dir, wait_for};

/// Issue 14, row 18.
#[test]
fn switch_continues_when_its_output_is_closed_and_its_terminal_hangs_up() {
    use std::process::Stdio;
    let dir = Dir::new();
    let mut command = common::pvswitch();
    command.args(["run", "--control", &dir.text("ctl"), "--port", &dir.port("a", "")]);
    let mut process =
        common::Process(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    drop((process.0.stdout.take(), process.0.stderr.take()));
    let ask = |what: &[&str]| {
        let mut command = common::pvswitch();
        command.args(["ctl", "--control", &dir.text("ctl")]).args(what);
        command.stdout(Stdio::null()).status().unwrap().success()
    };
    wait_for("the switch", || ask(&["show"]));
    common::signal(&process.0, rustix::process::Signal::HUP);
    // Its hints are discarded.
    assert!(ask(&["add-port", &dir.port("b", "")]));
    assert!(ask(&["show"]) && process.lives());
    // A reader that closes the pipe early is not an error.
    let mut command = common::pvswitch();
    command.args(["ctl", "--control", &dir.text("ctl"), "show"]).stdout(Stdio::piped());
    let mut reader = command.spawn().unwrap();
    drop(reader.stdout.take());
    assert!(reader.wait().unwrap().success());
    assert!(process.end().success());
}
