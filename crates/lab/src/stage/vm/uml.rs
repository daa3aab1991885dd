//! Guests in User-Mode Linux. Channels are terminals.

use std::os::fd::AsRawFd;

use super::super::installed::need;
use super::agent::Setup;
use super::plan::Plan;
use crate::error::Fail;

/// Boot time of a guest, in seconds of CPU time.
pub(super) const BOOT_S: f64 = 2.0;
const PROGRAM: &str = "linux.uml";
const MODULES_DIR: &str = "/usr/lib/uml/modules";
const MODULES: [&str; 3] =
    ["net/core/failover.ko", "drivers/net/net_failover.ko", "drivers/net/virtio_net.ko"];

/// Returns the program and its arguments.
pub(super) fn command_line(plan: &Plan) -> Result<Vec<String>, Fail> {
    need(PROGRAM)?;
    let setup = Setup { modules: modules()?, ..plan.setup.clone() };
    let lines = [
        PROGRAM.into(),
        "mem=256M".into(),
        "root=/dev/root rootfstype=hostfs rootflags=/ ro devtmpfs.mount=0".into(),
        format!("uml_dir={}/", plan.folder.display()),
        format!("virtio_uml.device={}:1", plan.socket),
        format!("loglevel=4 con=null con0=null,fd:{}", plan.console.as_raw_fd()),
        format!("init={}", plan.agent.display()),
    ];
    let words = lines.iter().flat_map(|line| line.split(' ').map(String::from));
    let channels = plan.channels.iter().enumerate().map(|(i, [to, from])| {
        format!("con{}=fd:{},fd:{}", i + 1, to.as_raw_fd(), from.as_raw_fd())
    });
    let serve = ["--", "guest", "serve"].map(String::from);
    Ok(words.chain(channels).chain(serve).chain(setup.args()).collect())
}

/// Returns the paths of the modules of the network driver.
fn modules() -> Result<Vec<String>, Fail> {
    let kernels = std::fs::read_dir(MODULES_DIR).into_iter().flatten().flatten();
    for kernel in kernels {
        let all = MODULES.map(|module| kernel.path().join("kernel").join(module));
        if all.iter().all(|path| path.exists()) {
            return Ok(all.iter().map(|path| path.display().to_string()).collect());
        }
    }
    Err(Fail::Missing(format!(
        "{MODULES_DIR}: no module virtio_net (Debian package user-mode-linux)"
    )))
}
