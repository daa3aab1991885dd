//! Signals that end the program: SIGTERM and SIGINT.

use std::io::Result;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGINT, SIGTERM};

/// A descriptor that becomes readable when one of them arrives.
pub fn readable() -> Result<UnixStream> {
    readable_on(&[SIGTERM, SIGINT])
}

/// A descriptor that becomes readable when one of these signals arrives.
pub fn readable_on(signals: &[i32]) -> Result<UnixStream> {
    let (read, write) = UnixStream::pair()?;
    for signal in signals.iter().copied() {
        signal_hook::low_level::pipe::register(signal, write.try_clone()?)?;
    }
    Ok(read)
}

/// A flag that is set when one of them arrives.
pub fn flag() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    Ok(stop)
}
