//! Errors of the program, and durations on its command line.

use std::time::Duration;

use api::schema::seconds;

/// Any error that ends a command.
pub type AnyError = Box<dyn std::error::Error>;

/// An error on the command line or in the configuration: exit status 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Usage(pub String);

/// Converts an error of the driver half.
pub fn guest_error(error: guest::Error) -> AnyError {
    match error {
        guest::Error::Usage(what) => Usage(what).into(),
        other => other.into(),
    }
}

/// A duration given in seconds.
pub fn time(secs: f64) -> Result<Duration, Usage> {
    seconds(secs).map_err(Usage)
}

/// The time between two reports, given in seconds.
pub fn interval(secs: f64) -> Result<Duration, Usage> {
    match time(secs)? {
        Duration::ZERO => Err(Usage("--interval 0: use more than 0 seconds".into())),
        interval => Ok(interval),
    }
}
