//! `lab run --guest uml` and `--guest qemu`: a study with a stock kernel's driver in its guests.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const LAB: &str = env!("CARGO_BIN_EXE_pvswitch-lab");

fn lab(out: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(LAB);
    command.arg("run").args(args).arg("--out").arg(out);
    command.output().unwrap()
}

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A name for a folder of results that is not there.
fn fresh(name: &str) -> PathBuf {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&out);
    out
}

fn runs(program: &str, args: &[&str]) -> bool {
    Command::new(program).args(args).output().is_ok_and(|output| output.status.success())
}

/// Whether guests can be had with these tools; says what is missing.
fn possible(tools: &[(&str, &str)]) -> bool {
    if !Path::new(LAB).with_file_name("pvswitch").exists() {
        println!("skipped: no pvswitch beside pvswitch-lab (cargo build --bin pvswitch)");
        return false;
    }
    let all = tools.iter().chain(&[("iperf3", "--version"), ("ping", "-V")]);
    if let Some((tool, _)) = all.into_iter().find(|(tool, version)| !runs(tool, &[version])) {
        println!("skipped: {tool} is not installed");
        return false;
    }
    let user = ["--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "true"];
    if !runs("unshare", &user) && !runs("unshare", &user[2..]) {
        println!("skipped: no namespaces here");
        return false;
    }
    true
}

/// Where a stock kernel is: the machine's, or what the rigs fetched.
fn kernel() -> Option<PathBuf> {
    let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../rigs/.cache");
    let folders =
        [PathBuf::from("/"), fetched.join("qemu-guest/kernel"), fetched.join("xen/kernel")];
    folders.into_iter().find(|folder| {
        let files = std::fs::read_dir(folder.join("boot")).into_iter().flatten().flatten();
        let mut names = files.map(|file| file.file_name().to_string_lossy().into_owned());
        names.any(|name| {
            let version = name.strip_prefix("vmlinuz-");
            version.is_some_and(|version| folder.join("lib/modules").join(version).is_dir())
        })
    })
}

/// Measures cells with such guests; the lines of `runs.csv`, each with its columns.
fn measure(guest: &[&str], study: &str, only: &[&str]) -> Vec<Vec<String>> {
    let out = fresh(&format!("lab-{}-{study}", guest[0]));
    let cells = only.iter().flat_map(|only| ["--only", only]);
    let mut args = vec![study, "--smallest", "--repeats", "1", "--seconds", "0.5", "--guest"];
    args.extend(guest.iter().copied().chain(cells));
    let output = lab(&out, &args);
    assert!(output.status.success(), "{}", words(&output));
    let machine = std::fs::read_to_string(out.join("machine.json")).unwrap();
    assert!(machine.contains(&format!("\"guest\": \"{}\"", guest[0])), "{machine}");
    let runs = std::fs::read_to_string(out.join("runs.csv")).unwrap();
    runs.lines().map(|line| line.split(',').map(String::from).collect()).collect()
}

/// One of a study's columns, of a single run.
fn value<'a>(rows: &'a [Vec<String>], name: &str) -> &'a str {
    assert_eq!(rows.len(), 2, "{rows:?}");
    let column = rows[0].iter().position(|column| column == name).unwrap();
    &rows[1][column]
}

fn traffic_passes(guest: &[&str]) {
    let cells = ["guests=2", "direction=to-guest", "variant=shared"];
    let rows = measure(guest, "fairness", &cells);
    for name in ["throughput", "guests_cpu", "least_share"] {
        assert!(value(&rows, name).parse::<f64>().unwrap() > 0.0, "{name}: {rows:?}");
    }
    // What its driver does not count is left out, the rest is there.
    let rows = measure(guest, "copies", &["mode=bridge", "pair=a-b", "variant=after"]);
    for name in ["kb_per_s", "a_cpu", "b_cpu", "calls_per_frame"] {
        assert!(value(&rows, name).parse::<f64>().unwrap() > 0.0, "{name}: {rows:?}");
    }
    assert_eq!(value(&rows, "copies"), "1");
    assert_eq!(value(&rows, "kicks_per_frame"), "");
    assert_eq!(value(&rows, "notifications_per_frame"), "");
}

#[test]
fn traffic_passes_a_driver_in_user_mode_linux() {
    if possible(&[("linux.uml", "--version")]) {
        traffic_passes(&["uml"]);
    }
}

#[test]
fn traffic_passes_a_driver_in_qemu() {
    if !possible(&[("qemu-system-x86_64", "--version"), ("busybox", "--help")]) {
        return;
    }
    let Some(kernel) = kernel() else {
        println!("skipped: no kernel of a package here, nor of rigs/qemu");
        return;
    };
    traffic_passes(&["qemu", "--kernel", &kernel.display().to_string()]);
}

#[test]
fn a_missing_kernel_is_reported_with_its_package() {
    if !possible(&[("qemu-system-x86_64", "--version"), ("busybox", "--help")]) {
        return;
    }
    let out = fresh("lab-no-kernel");
    let cells = ["--only", "guests=2", "--only", "direction=to-guest", "--only", "variant=shared"];
    let nowhere = fresh("no-kernel").display().to_string();
    let guest = ["fairness", "--smallest", "--guest", "qemu", "--kernel", &nowhere];
    let output = lab(&out, &[&guest[..], &cells].concat());
    // Before anything is started, or written.
    assert_eq!(output.status.code(), Some(2), "{}", words(&output));
    let said = words(&output);
    assert!(said.contains("linux-image-amd64") && said.contains("no-kernel"), "{said}");
    assert!(!out.exists());
}

#[test]
fn a_stock_driver_speaks_no_xen() {
    let out = fresh("lab-uml-xen");
    for study in [&["fairness", "--proto", "xen"][..], &["polling", "--smallest"]] {
        let output = lab(&out, &[study, &["--guest", "uml"]].concat());
        assert_eq!(output.status.code(), Some(2), "{}", words(&output));
        assert!(words(&output).contains("--proto virtio"), "{}", words(&output));
    }
    let output = lab(&out, &["fairness", "--guest", "vmx"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(words(&output).contains("netns, uml, qemu"), "{}", words(&output));
}
