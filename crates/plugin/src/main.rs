//! Network plugin for containers: the protocols of CNI and of netavark (Podman).
//!
//! Both give a container's network namespace an interface. Here it is the TAP of a `pvswitch nic`
//! process, which stays when the plugin ends, behind a port of its own of a running switch.
#![forbid(unsafe_code)]

mod attachment;
mod cni;
mod netavark;
mod ports;

use std::process::ExitCode;

fn main() -> ExitCode {
    let (reply, ok) = match std::env::var("CNI_COMMAND") {
        Ok(command) => cni::run(&command),
        Err(_) => netavark::run(std::env::args().skip(1)),
    };
    if let Some(reply) = reply {
        println!("{reply}");
    }
    if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
