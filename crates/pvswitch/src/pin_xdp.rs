//! `pvswitch pin-xdp IFNAME DIR`: loads the XDP program of an `af-xdp` port for a switch that may
//! not, which gets its map by `map=DIR/map` ([0038](../../../docs/design/0038-af-xdp.md)).

use std::path::PathBuf;

use clap::Args;

use crate::error::AnyError;

/// `pin-xdp`.
#[derive(Args)]
pub struct PinXdpArgs {
    /// Interface whose frames the program redirects
    #[arg(value_name = "IFNAME")]
    pub interface: String,
    /// Directory in a bpffs where `map`, for the port's `map=`, and `link` are pinned; remove it
    /// to detach the program
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,
    /// Queues of the interface, from the first, 1 to 16: at least the port's `queues=`
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=16))]
    pub queues: u16,
    /// Network namespace of the interface, a name or a path
    #[arg(long, value_name = "NAME")]
    pub netns: Option<String>,
}

/// Attaches a program to the interface and pins it.
pub fn command(args: &PinXdpArgs) -> Result<(), AnyError> {
    let PinXdpArgs { interface, directory, queues, netns } = args;
    let pinned = uplink::pin_xdp(interface, netns.as_deref(), *queues, directory);
    pinned.map_err(|error| format!("pin-xdp: {error}").into())
}
