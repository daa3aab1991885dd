//! State and descriptors handed to another process over a Unix stream socket.
//!
//! ```text
//!   socket:  count of descriptors (4 bytes, with the memfd) ─▶ batches of descriptors ─▶ ...
//!   memfd:   "PVSWITCH" · version · length · checksum · the state
//! ```
//! The receiver checks all of it before it uses any: a state of another version, cut short or
//! damaged, is refused.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::Instant;

use rustix::fs::MemfdFlags;

use crate::poll::{Until, wait};
use crate::socket::{Received, recv, send};

/// Start of every state.
const MAGIC: [u8; 8] = *b"PVSWITCH";
/// Bytes of magic, version, length and checksum.
const HEADER_LEN: usize = 28;
/// Descriptors in one message.
const BATCH: usize = 128;
/// Most descriptors of one state.
const DESCRIPTORS_MAX: u32 = 1 << 20;
/// Longest state, in bytes.
const LEN_MAX: u64 = 1 << 32;

/// Error of a handover.
#[derive(Debug)]
pub enum HandoverError {
    /// The other process ended or closed its end.
    Closed,
    /// The other process did not answer in time.
    Late,
    /// What came is not a state of this program.
    Foreign,
    /// The state has another version.
    Version {
        /// Its version.
        got: u32,
        /// The version of this program.
        want: u32,
    },
    /// The state is shorter than its header says, or changed on the way.
    Damaged,
    /// A system call failed.
    Os(io::Error),
}

impl fmt::Display for HandoverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("it ended before it took over"),
            Self::Late => f.write_str("it did not answer in time"),
            Self::Foreign => f.write_str("what it sent is not a state of pvswitch"),
            Self::Version { got, want } => write!(
                f,
                "the state has version {got}, this program reads version {want}: restart the \
                 switch in place of an upgrade"
            ),
            Self::Damaged => f.write_str("the state is damaged: its length or checksum is wrong"),
            Self::Os(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for HandoverError {}

impl From<io::Error> for HandoverError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Self::Closed,
            _ => Self::Os(error),
        }
    }
}

/// FNV-1a over 64-bit words: finds damage, not malice.
fn checksum(state: &[u8]) -> u64 {
    let words = state.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    let step = |sum: u64, word: u64| (sum ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(29);
    words.fold(0xcbf2_9ce4_8422_2325 ^ state.len() as u64, step)
}

/// Puts a header before a state.
fn seal(version: u32, state: &[u8]) -> Vec<u8> {
    let mut all = Vec::with_capacity(HEADER_LEN + state.len());
    all.extend(MAGIC);
    all.extend(version.to_le_bytes());
    all.extend((state.len() as u64).to_le_bytes());
    all.extend(checksum(state).to_le_bytes());
    all.extend(state);
    all
}

/// Checks a header; returns the length and checksum of the state.
fn header(bytes: &[u8; HEADER_LEN], want: u32) -> Result<(u64, u64), HandoverError> {
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
    let got = u32::from_le_bytes(std::array::from_fn(|i| bytes[8 + i]));
    if bytes[..8] != MAGIC {
        return Err(HandoverError::Foreign);
    }
    if got != want {
        return Err(HandoverError::Version { got, want });
    }
    if word(12) > LEN_MAX {
        return Err(HandoverError::Damaged);
    }
    Ok((word(12), word(20)))
}

/// Sends a state and its descriptors.
///
/// # Errors
/// [`HandoverError`]: the receiver ended, or did not read by `deadline`.
pub fn send_state(
    socket: BorrowedFd<'_>,
    version: u32,
    state: &[u8],
    fds: &[BorrowedFd<'_>],
    deadline: Instant,
) -> Result<(), HandoverError> {
    let memfd = rustix::fs::memfd_create("pvswitch-state", MemfdFlags::CLOEXEC);
    let memfd = std::fs::File::from(memfd.map_err(io::Error::from)?);
    memfd.write_all_at(&seal(version, state), 0)?;
    let count = u32::try_from(fds.len()).ok().filter(|count| *count <= DESCRIPTORS_MAX);
    let count = count.ok_or_else(|| io::Error::other("too many descriptors"))?;
    send_all(socket, &count.to_le_bytes(), &[memfd.as_fd()], deadline)?;
    fds.chunks(BATCH).try_for_each(|batch| send_all(socket, b"fd", batch, deadline))
}

fn send_all(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    deadline: Instant,
) -> Result<(), HandoverError> {
    // Messages of a few bytes are sent whole or not at all.
    while !send(socket, bytes, fds)? {
        if !wait(socket, Until::Writable, deadline)? {
            return Err(HandoverError::Late);
        }
    }
    Ok(())
}

/// Receives a state and its descriptors.
///
/// # Errors
/// [`HandoverError`]: nothing came by `deadline`, or what came is refused.
pub fn receive_state(
    socket: BorrowedFd<'_>,
    version: u32,
    deadline: Instant,
) -> Result<(Vec<u8>, Vec<OwnedFd>), HandoverError> {
    let mut count = [0; 4];
    let mut fds = receive(socket, &mut count, deadline)?;
    let (Some(memfd), 1) = (fds.pop(), fds.len() + 1) else { return Err(HandoverError::Foreign) };
    let memfd = std::fs::File::from(memfd);
    let mut head = [0; HEADER_LEN];
    memfd.read_exact_at(&mut head, 0).map_err(|_| HandoverError::Foreign)?;
    let (len, sum) = header(&head, version)?;
    if memfd.metadata()?.len() != HEADER_LEN as u64 + len {
        return Err(HandoverError::Damaged);
    }
    let mut state = vec![0; usize::try_from(len).map_err(|_| HandoverError::Damaged)?];
    memfd.read_exact_at(&mut state, HEADER_LEN as u64)?;
    if checksum(&state) != sum {
        return Err(HandoverError::Damaged);
    }
    let count = u32::from_le_bytes(count);
    if count > DESCRIPTORS_MAX {
        return Err(HandoverError::Foreign);
    }
    while fds.len() < count as usize {
        let batch = receive(socket, &mut [0; 2], deadline)?;
        if batch.is_empty() {
            return Err(HandoverError::Damaged);
        }
        fds.extend(batch);
    }
    Ok((state, fds))
}

/// Receives exactly one message; returns its descriptors.
fn receive(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    deadline: Instant,
) -> Result<Vec<OwnedFd>, HandoverError> {
    let mut fds = Vec::new();
    loop {
        match recv(socket, bytes, &mut fds, BATCH)? {
            Received::Bytes(got) if got == bytes.len() => return Ok(fds),
            Received::Nothing if !wait(socket, Until::Readable, deadline)? => {
                return Err(HandoverError::Late);
            }
            Received::Nothing => {}
            Received::Closed => return Err(HandoverError::Closed),
            Received::Bytes(_) | Received::Truncated => return Err(HandoverError::Foreign),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{eventfd, signal, socketpair, wait_readable};

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn state_and_many_descriptors_arrive_in_order() {
        let (a, b) = socketpair().unwrap();
        let events: Vec<_> = (0..300).map(|_| eventfd().unwrap()).collect();
        signal(events[299].as_fd());
        let state: Vec<u8> = (0..100_000_u32).map(|n| n as u8).collect();
        let receiver = std::thread::spawn(move || receive_state(b.as_fd(), 7, soon()).unwrap());
        let fds: Vec<_> = events.iter().map(AsFd::as_fd).collect();
        send_state(a.as_fd(), 7, &state, &fds, soon()).unwrap();
        let (got, fds) = receiver.join().unwrap();
        assert_eq!((got, fds.len()), (state, 300));
        let ready = |at: usize| wait_readable(fds[at].as_fd(), Duration::ZERO).unwrap();
        assert_eq!([ready(0), ready(298), ready(299)], [false, false, true]);
    }

    /// Sends bytes in place of a sealed state.
    fn sent(bytes: &[u8], fds: usize) -> HandoverError {
        let (a, b) = socketpair().unwrap();
        let memfd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        let memfd = std::fs::File::from(memfd);
        memfd.write_all_at(bytes, 0).unwrap();
        send_all(a.as_fd(), &0_u32.to_le_bytes(), &vec![memfd.as_fd(); fds], soon()).unwrap();
        receive_state(b.as_fd(), 7, soon()).unwrap_err()
    }

    #[test]
    fn damaged_foreign_and_other_states_are_refused() {
        let good = seal(7, b"some state");
        assert!(matches!(sent(b"", 1), HandoverError::Foreign));
        assert!(matches!(sent(&good, 0), HandoverError::Foreign));
        assert!(matches!(sent(&good, 2), HandoverError::Foreign));
        assert!(matches!(sent(&[0; 64], 1), HandoverError::Foreign));
        let other = sent(&seal(8, b"some state"), 1);
        assert!(matches!(other, HandoverError::Version { got: 8, want: 7 }), "{other}");
        assert!(matches!(sent(&good[..good.len() - 1], 1), HandoverError::Damaged));
        // Whatever byte changes.
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 4;
            let error = sent(&bad, 1);
            assert!(!matches!(error, HandoverError::Os(_) | HandoverError::Late), "{at}: {error}");
        }
    }

    #[test]
    fn receiver_that_ends_or_says_nothing_is_an_error() {
        let (a, b) = socketpair().unwrap();
        let past = Instant::now();
        assert!(matches!(receive_state(a.as_fd(), 7, past), Err(HandoverError::Late)));
        drop(b);
        assert!(matches!(receive_state(a.as_fd(), 7, soon()), Err(HandoverError::Closed)));
        let sent = send_state(a.as_fd(), 7, b"x", &[], soon());
        assert!(matches!(sent, Err(HandoverError::Closed)));
    }
}
