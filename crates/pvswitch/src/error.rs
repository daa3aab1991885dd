//! Errors of the program, and times that its command line gives.

use std::time::Duration;

use api::schema::seconds;

/// Any error that ends a command.
pub type AnyError = Box<dyn std::error::Error>;

/// A mistake on the command line or in the configuration: exit status 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Usage(pub String);

/// The error of a guest as the program's.
pub fn ended(error: guest::Error) -> AnyError {
    match error {
        guest::Error::Usage(what) => Usage(what).into(),
        other => other.into(),
    }
}

/// A time given in seconds.
pub fn time(secs: f64) -> Result<Duration, Usage> {
    seconds(secs).map_err(Usage)
}

/// Time between two reports, given in seconds.
pub fn interval(secs: f64) -> Result<Duration, Usage> {
    match time(secs)? {
        Duration::ZERO => Err(Usage("--interval 0: use a time between reports, in seconds".into())),
        interval => Ok(interval),
    }
}
