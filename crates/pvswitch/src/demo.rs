//! `pvswitch demo`, under construction in this commit's successor.

use crate::AnyError;
use crate::cli::DemoArgs;

/// The command.
pub fn command(_: DemoArgs) -> Result<(), AnyError> {
    Err("not built yet".into())
}
