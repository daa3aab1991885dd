//! Both protocols without a switch and without rights; `rigs/containers` has the rest.

use std::io::Write as _;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

/// Runs the plugin. Returns its exit status and reply.
fn plugin(args: &[&str], env: &[(&str, &str)], input: &Value) -> (i32, Value) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_pvswitch-plugin"))
        .args(args)
        .env_remove("CNI_COMMAND")
        .envs(env.iter().copied())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // `info` ends without reading it.
    let _ = child.stdin.take().unwrap().write_all(input.to_string().as_bytes());
    let out = child.wait_with_output().unwrap();
    (out.status.code().unwrap(), serde_json::from_slice(&out.stdout).unwrap())
}

fn cni(command: &str, conf: &Value) -> (i32, Value) {
    let env = [("CNI_COMMAND", command), ("CNI_CONTAINERID", "c"), ("CNI_IFNAME", "eth0")];
    plugin(&[], &env, conf)
}

#[test]
fn versions_of_both_protocols() {
    let (status, reply) = cni("VERSION", &json!({"cniVersion": "1.1.0"}));
    let versions = json!(["0.4.0", "1.0.0", "1.1.0"]);
    assert_eq!((status, &reply["supportedVersions"]), (0, &versions));
    let (status, reply) = plugin(&["info"], &[], &Value::Null);
    assert_eq!((status, &reply["api_version"]), (0, &"1.0.0".into()));
}

#[test]
fn errors_have_the_form_of_their_protocol() {
    let conf = json!({"cniVersion": "1.1.0", "name": "n", "control": "/nonexistent"});
    let with = |key: &str, value: Value| {
        let mut conf = conf.clone();
        conf[key] = value;
        conf
    };
    for (command, conf, code) in [
        ("STATUS", conf.clone(), 50),
        ("ADD", with("cniVersion", "2.0.0".into()), 1),
        ("ADD", with("name", Value::Null), 7),
        ("ADD", with("mtu", 5.into()), 7),
        ("ADD", with("port", json!([])), 7),
        ("ADD", conf.clone(), 4),
        ("GC", conf.clone(), 7),
        ("x", conf.clone(), 4),
    ] {
        let (status, reply) = cni(command, &conf);
        assert_eq!((status, &reply["code"]), (1, &code.into()), "{command}: {reply}");
        assert!(reply["msg"].as_str().is_some_and(|text| !text.is_empty()));
    }
    let options = json!({"options": {"vlan": "5"}});
    for (args, input) in [(&["create"][..], options), (&["setup"], json!({})), (&[], json!({}))] {
        let (status, reply) = plugin(args, &[], &input);
        assert!(status == 1 && reply["error"].is_string(), "{args:?}: {reply}");
    }
}
