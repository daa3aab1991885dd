use super::*;

#[test]
fn errors_of_device_nodes_say_what_to_do() {
    use std::io::Error;
    let of = |errno| {
        let error = Error::from_raw_os_error(errno);
        HostError::of_node(Path::new("/dev/xen/gntdev"), "xen-gntdev", error).to_string()
    };
    assert!(of(libc::ENOENT).contains("modprobe xen-gntdev"));
    assert!(of(libc::EACCES).contains("run as root"));
    assert!(of(libc::ENODEV).contains("does not run under Xen"));
    assert!(of(libc::EIO).contains("open failed"));
    if !Path::new("/dev/xen").exists() {
        assert!(matches!(Back::open(), Err(HostError::NoNode { module: "xen-gntdev", .. })));
        assert!(matches!(Front::open(), Err(HostError::NoNode { module: "xen-gntalloc", .. })));
    }
}

#[test]
fn event_online_is_written_to_the_vif_of_the_kernel() {
    let devices = std::env::temp_dir().join(format!("pvs-online-{}", std::process::id()));
    let vif = devices.join("vif-3-0");
    std::fs::create_dir_all(&vif).unwrap();
    assert!(!send_online(&devices, 3, 0).unwrap(), "the kernel does not know it yet");
    std::fs::write(vif.join("uevent"), "").unwrap();
    assert!(send_online(&devices, 3, 0).unwrap());
    assert_eq!(std::fs::read(vif.join("uevent")).unwrap(), b"online");
    std::fs::remove_dir_all(devices).unwrap();
}

#[test]
fn a_vif_served_by_the_kernel_is_claimed() {
    let devices = std::env::temp_dir().join(format!("pvs-claimed-{}", std::process::id()));
    let vif = devices.join("vif-3-0");
    std::fs::create_dir_all(&vif).unwrap();
    assert_eq!(claimed_by(&devices, 3, 0), None, "it has no driver");
    std::os::unix::fs::symlink("../../drivers/vif", vif.join("driver")).unwrap();
    let why = claimed_by(&devices, 3, 0).unwrap();
    assert!(why.contains("driver 'vif'") && why.contains("docs/xen.md"), "{why}");
    assert_eq!(claimed_by(&devices, 4, 0), None);
    std::fs::remove_dir_all(devices).unwrap();
}
