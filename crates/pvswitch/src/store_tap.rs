//! `pvswitch store-tap IFNAME`: opens a TAP and gives its queues to the service manager, which
//! passes them to a switch that may not open it: `tap:fd=NAME`
//! ([0027](../../../docs/design/0027-systemd.md)).

use std::num::NonZeroU16;
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;

use clap::Args;
use uplink::{Create, TapOptions};

use crate::error::AnyError;

/// Socket of the service manager.
const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";

/// `store-tap`.
#[derive(Args)]
pub struct StoreTapArgs {
    /// Interface, existing or created; set up
    #[arg(value_name = "IFNAME")]
    pub interface: String,
    /// Name of its queues' descriptors: NAME in the port's `fd=NAME`
    #[arg(long, value_name = "NAME", default_value = "host", value_parser = descriptor)]
    pub name: String,
    /// Queues, 1 to 16: as many as the port's `queues=`
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=16))]
    pub queues: u16,
    /// MTU to set, in bytes
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(68..))]
    pub mtu: Option<u16>,
}

fn descriptor(name: &str) -> Result<String, String> {
    let text = format!("{}{name}", api::INHERITED);
    api::inherited(&text).unwrap_or(Ok(name)).map(Into::into)
}

/// Opens the interface and stores its queues in place of those that were stored before.
pub fn command(args: &StoreTapArgs) -> Result<(), AnyError> {
    let Some(path) = std::env::var_os(NOTIFY_SOCKET) else {
        return Err(format!(
            "store-tap: {NOTIFY_SOCKET} is not set: run it in a unit, as ExecStartPre=+ with \
             NotifyAccess=exec and FileDescriptorStoreMax={}",
            args.queues
        )
        .into());
    };
    let tap = uplink::open(&TapOptions {
        name: args.interface.clone(),
        netns: None,
        queues: NonZeroU16::new(args.queues).unwrap_or(NonZeroU16::MIN),
        create: Create::IfMissing,
        up: true,
        mtu: args.mtu.map(u32::from),
        mac: None,
        queue_len: None,
    })
    .map_err(|error| format!("store-tap: {error}"))?;
    if tap.queues.len() != usize::from(args.queues) {
        return Err(format!(
            "store-tap: interface `{}` has one queue only: use --queues 1, or create it with \
             `multi_queue`",
            args.interface
        )
        .into());
    }
    let error = |error| format!("store-tap: cannot reach the service manager: {error}");
    let queues: Vec<_> = tap.queues.iter().map(|queue| queue.as_fd()).collect();
    let socket = UnixDatagram::unbound().and_then(|socket| socket.connect(&path).map(|()| socket));
    let socket = socket.map_err(error)?;
    // First, those of a start before are removed: else there would be twice as many.
    for (what, queues) in [("FDSTOREREMOVE=1", &[][..]), ("FDSTORE=1", &queues[..])] {
        let message = format!("{what}\nFDNAME={}\n", args.name);
        if !os::send(socket.as_fd(), message.as_bytes(), queues).map_err(error)? {
            return Err("store-tap: the service manager does not read messages".into());
        }
    }
    Ok(())
}
