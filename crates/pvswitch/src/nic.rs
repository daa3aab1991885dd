//! `pvswitch nic`: maps its command line to a NIC of the driver half.

use std::num::NonZeroU16;
use std::sync::atomic::Ordering;

use guest::Connect;
use guest::nic::{Options, run};
use uplink::{Create, TapOptions};

use crate::cli::NicArgs;
use crate::error::{AnyError, Usage, guest_error, interval, time};
use crate::{cost, signals};

/// As long as a ring, so that a TCP window of GSO frames is queued instead of dropped.
const QUEUE_LEN: u32 = 4096;

/// Runs `pvswitch nic`.
pub fn command(args: &NicArgs) -> Result<(), AnyError> {
    let to = Connect::try_from(&args.connect.options()).map_err(Usage)?;
    let options = Options {
        to,
        tap: TapOptions {
            name: args.tap.clone(),
            netns: args.netns.clone(),
            queues: NonZeroU16::new(args.connect.queues).unwrap_or(NonZeroU16::MIN),
            create: Create::IfMissing,
            up: true,
            mtu: args.mtu.map(u32::from),
            mac: args.mac,
            queue_len: Some(QUEUE_LEN),
        },
        control: args.report.control.clone(),
        json: args.report.json,
        interval: args.report.interval.map(interval).transpose()?,
        duration: args.report.duration.map(time).transpose()?,
    };
    os::precise_timers();
    if options.control.is_some() {
        // Measured now, not in the middle of traffic that is to be polled.
        cost::costs();
    }
    let stop = signals::flag()?;
    run(&options, &|| !stop.load(Ordering::Relaxed)).map_err(guest_error)
}
