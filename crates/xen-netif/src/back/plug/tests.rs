use super::*;

#[test]
fn a_vif_that_the_kernel_serves_is_not_ours() {
    let devices = std::env::temp_dir().join(format!("pvs-claimed-{}", std::process::id()));
    let vif = devices.join("vif-3-0");
    std::fs::create_dir_all(&vif).unwrap();
    let id = VifId { domid: 3, devid: 0 };
    assert_eq!(claimed_by(&devices, id), None, "there, but no driver has it");
    std::os::unix::fs::symlink("../../drivers/vif", vif.join("driver")).unwrap();
    let why = claimed_by(&devices, id).unwrap();
    assert!(why.contains("driver 'vif'") && why.contains("docs/xen.md"), "{why}");
    assert_eq!(claimed_by(&devices, VifId { domid: 4, devid: 0 }), None);
    std::fs::remove_dir_all(devices).unwrap();
}
