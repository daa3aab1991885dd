//! State and descriptors handed to another process over a Unix stream socket.
//!
//! ```text
//!   socket:  count of descriptors (4 bytes, with the memfd) ─▶ batches of descriptors ─▶ ...
//!   memfd:   "PVSWITCH" · version · length · checksum · the state
//! ```
//! The receiver checks all of it before it uses any: a state of another version, cut short or
//! damaged, is refused.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::Instant;

use crate::poll::{Until, wait};
use crate::socket::{Received, peek, recv, send};

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
    /// The other process did not reply in time.
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
            Self::Late => f.write_str("it did not reply in time"),
            Self::Foreign => f.write_str("what it sent is not pvswitch state"),
            Self::Version { got, want } => write!(
                f,
                "the state has version {got}, this program reads version {want}: restart the \
                 switch instead of upgrading it"
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
    let memfd = sealed(version, state)?;
    let count = u32::try_from(fds.len()).ok().filter(|count| *count <= DESCRIPTORS_MAX);
    let count = count.ok_or_else(|| io::Error::other("too many descriptors"))?;
    send_all(socket, &count.to_le_bytes(), &[memfd.as_fd()], deadline)?;
    fds.chunks(BATCH).try_for_each(|batch| send_all(socket, b"fd", batch, deadline))
}

/// Makes a memfd with a state.
fn sealed(version: u32, state: &[u8]) -> io::Result<File> {
    let memfd = File::from(crate::memfd("pvswitch-state", 0)?);
    memfd.write_all_at(&seal(version, state), 0)?;
    Ok(memfd)
}

/// Reads and checks a state.
fn opened(memfd: &File, version: u32) -> Result<Vec<u8>, HandoverError> {
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
    Ok(state)
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
    let state = opened(&File::from(memfd), version)?;
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

/// Packs a state and its descriptors into sockets that hold them until they are closed: what a
/// store of descriptors keeps. One socket for each 128 descriptors.
///
/// # Errors
/// Out of descriptors or memory, or too many descriptors on the way in the system
/// (`RLIMIT_NOFILE` of the user).
pub fn pack(version: u32, state: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<Vec<OwnedFd>> {
    let memfd = sealed(version, state)?;
    let all: Vec<_> = std::iter::once(memfd.as_fd()).chain(fds.iter().copied()).collect();
    let parts = all.chunks(BATCH);
    let count = parts.len() as u32;
    let pack = |(at, fds): (u32, &[BorrowedFd<'_>])| {
        let (held, from) = crate::socketpair()?;
        let head = [at.to_le_bytes(), count.to_le_bytes()].concat();
        if send(from.as_fd(), &head, fds)? {
            return Ok(held);
        }
        Err(io::Error::other("a message was not sent whole"))
    };
    (0..).zip(parts).map(pack).collect()
}

/// Opens what [`pack`] made, in any order of the sockets, which hold it still.
///
/// # Errors
/// [`HandoverError`]: a part is missing, or what is in it is refused.
pub fn unpack(
    version: u32,
    parts: &[BorrowedFd<'_>],
) -> Result<(Vec<u8>, Vec<OwnedFd>), HandoverError> {
    let mut found = Vec::new();
    for part in parts {
        let (mut head, mut fds) = ([0; 8], Vec::new());
        let got = peek(*part, &mut head, &mut fds, BATCH)?;
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| head[at + i]));
        if got != Received::Bytes(8) || word(4) as usize != parts.len() {
            return Err(HandoverError::Damaged);
        }
        found.push((word(0), fds));
    }
    found.sort_by_key(|(at, _)| *at);
    if !found.iter().map(|(at, _)| *at as usize).eq(0..parts.len()) {
        return Err(HandoverError::Damaged);
    }
    let mut fds = found.into_iter().flat_map(|(_, fds)| fds);
    let memfd = fds.next().ok_or(HandoverError::Damaged)?;
    Ok((opened(&File::from(memfd), version)?, fds.collect()))
}

/// A file in memory that holds one state or the one before: written alternately in two places, so
/// that one is valid whenever the writer is killed.
pub struct StateFile {
    file: File,
    /// Number of states written.
    number: u64,
}

/// Distance of the places, in bytes; the file is sparse.
const PLACE: u64 = 1 << 34;
/// Where the first one begins; before it is space for marks.
const FIRST_PLACE: u64 = 1 << 20;

impl StateFile {
    /// Makes an empty one.
    ///
    /// # Errors
    /// Out of descriptors or memory.
    pub fn new() -> io::Result<Self> {
        Ok(Self { file: File::from(crate::memfd("pvswitch-live", FIRST_PLACE)?), number: 0 })
    }

    /// Uses one that another process wrote.
    pub fn open(fd: OwnedFd) -> Self {
        Self { file: File::from(fd), number: 0 }
    }

    /// Writes a state. It replaces the one before the last.
    ///
    /// # Errors
    /// Out of memory; the last state stays valid.
    pub fn write(&mut self, version: u32, state: &[u8]) -> io::Result<()> {
        let number = self.number + 1;
        let numbered = [&number.to_le_bytes(), state].concat();
        let at = FIRST_PLACE + PLACE * (number % 2);
        self.file.write_all_at(&seal(version, &numbered), at)?;
        self.number = number;
        Ok(())
    }

    /// Reads the last whole state, if there is one.
    pub fn read(&mut self, version: u32) -> Option<Vec<u8>> {
        let read = |place: u64| {
            let at = FIRST_PLACE + PLACE * place;
            let mut head = [0; HEADER_LEN];
            self.file.read_exact_at(&mut head, at).ok()?;
            let (len, sum) = header(&head, version).ok()?;
            let held = self.file.metadata().ok()?.len();
            let ends = at.checked_add(HEADER_LEN as u64)?.checked_add(len)?;
            let mut state = vec![0; usize::try_from(len).ok().filter(|_| ends <= held)?];
            self.file.read_exact_at(&mut state, at + HEADER_LEN as u64).ok()?;
            let number = u64::from_le_bytes(*state.first_chunk()?);
            (checksum(&state) == sum).then_some((number, state))
        };
        let (number, state) = [read(0), read(1)].into_iter().flatten().max_by_key(|(n, _)| *n)?;
        self.number = number;
        Some(state[8..].to_vec())
    }

    /// Writes a mark: bytes below 1 MiB that a successor reads as they were at the kill.
    ///
    /// # Errors
    /// Out of memory.
    pub fn mark(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        debug_assert!(at + bytes.len() as u64 <= FIRST_PLACE, "marks are before the states");
        self.file.write_all_at(bytes, at)
    }

    /// Reads marks; 0 where none was written.
    pub fn marks(&self, at: u64, bytes: &mut [u8]) {
        bytes.fill(0);
        let _ = self.file.read_exact_at(bytes, at);
    }
}

impl AsFd for StateFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
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
mod tests;
