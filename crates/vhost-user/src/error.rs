//! Errors of a front-end, and their consequences.

use std::fmt;
use std::io;

use ring::virtq::LayoutError;
use shm::{MapError, TableError};
use switch::account::OverLimit;

use crate::device::Refused;
use crate::message::{CONFIG_MAX, FDS_MAX, FrontendReq, PAYLOAD_MAX, REGIONS_MAX};
use os::FdKind;

/// A protocol violation or an impossible request of a front-end. With REPLY_ACK and need_reply the
/// error is returned and the connection continues (unless [`is_fatal`](Self::is_fatal)); otherwise
/// the connection is closed. Other connections are not affected.
#[derive(Debug)]
pub enum ProtocolError {
    /// The version bits of the header are not 1.
    Version {
        /// Flags of the header.
        flags: u32,
    },
    /// A reply in place of a request.
    UnexpectedReply {
        /// Number of the request.
        request: u32,
    },
    /// A payload longer than any in the specification.
    TooLong {
        /// Number of the request.
        request: u32,
        /// Bytes announced.
        size: u32,
    },
    /// More descriptors than any message takes.
    TooManyFds,
    /// The connection ended inside a message.
    Truncated {
        /// Bytes of the message received.
        got: usize,
    },
    /// A payload shorter than its message needs.
    Payload {
        /// The request.
        request: FrontendReq,
        /// Bytes received.
        got: usize,
    },
    /// A wrong number of descriptors.
    FdCount {
        /// The request.
        request: FrontendReq,
        /// Number it takes.
        want: usize,
        /// Number received.
        got: usize,
    },
    /// A descriptor of a kind that the request does not take.
    FdKind {
        /// The request.
        request: FrontendReq,
        /// Kind of the descriptor.
        kind: FdKind,
        /// Kinds it may have, and how to get them.
        want: &'static str,
    },
    /// A ring without a kick descriptor, which must be polled: the operator forbids it.
    Polled {
        /// The ring's index.
        ring: u16,
    },
    /// An unknown request.
    UnknownRequest(u32),
    /// A request of a feature that we do not offer.
    NotOffered(FrontendReq),
    /// A request of a protocol feature that was not negotiated.
    NotNegotiated {
        /// The request.
        request: FrontendReq,
        /// The protocol feature's bit.
        bit: u32,
    },
    /// Feature bits that were not offered.
    Features {
        /// The bits.
        extra: u64,
    },
    /// Protocol feature bits that were not offered.
    ProtocolFeatures {
        /// The bits.
        extra: u64,
    },
    /// INBAND_NOTIFICATIONS without BACKEND_REQ and REPLY_ACK.
    InBand,
    /// No ring has this index.
    Ring {
        /// The index.
        index: u64,
        /// Queue pairs of the device.
        pairs: u16,
    },
    /// A ring of a second queue pair, or the control queue after it, of a front-end without
    /// protocol feature MQ.
    OnePair {
        /// The index.
        index: u64,
    },
    /// An invalid queue size.
    QueueSize {
        /// The ring's index.
        ring: u16,
        /// The size.
        size: u32,
    },
    /// A ring address outside the front-end's memory table.
    RingOutside {
        /// The ring's index.
        ring: u16,
        /// `desc`, `avail` or `used`.
        part: &'static str,
        /// The address, in the front-end's address space.
        user_addr: u64,
    },
    /// A ring cannot start with its layout.
    Layout {
        /// The ring's index.
        ring: u16,
        /// The reason.
        error: LayoutError,
    },
    /// A value that the message does not allow.
    Value {
        /// The request.
        request: FrontendReq,
        /// The value.
        value: u64,
    },
    /// SET_MEM_TABLE with no region, or too many.
    RegionCount(u32),
    /// A region that exceeds the port's limit, or the rest of the process's budget.
    OverLimit {
        /// Its guest address.
        guest_addr: u64,
        /// The resource and its amounts.
        error: OverLimit,
    },
    /// ADD_MEM_REG with every slot in use.
    NoSlot,
    /// REM_MEM_REG of an unknown region.
    NoSuchRegion {
        /// Its guest address.
        guest_addr: u64,
    },
    /// A region cannot be mapped.
    Map {
        /// Its guest address.
        guest_addr: u64,
        /// The reason.
        error: MapError,
    },
    /// The regions do not form a valid table.
    Table(TableError),
    /// A dirty log that exceeds the port's limit, or the rest of the process's budget.
    LogOverLimit(OverLimit),
    /// A dirty log that cannot be mapped.
    LogMap(MapError),
    /// A dirty log at an offset that is not a multiple of 16.
    LogOffset {
        /// The offset in its file, in bytes.
        offset: u64,
    },
    /// A dirty log that is shorter than the guest's memory needs.
    LogShort {
        /// Pages it has bits for.
        has: u64,
        /// Pages up to the guest's last.
        needs: u64,
    },
    /// A write to configuration space, all of which is read-only.
    ConfigReadOnly,
    /// The device refused the MTU.
    Mtu {
        /// The MTU.
        mtu: u64,
        /// Why.
        why: Refused,
    },
}

impl ProtocolError {
    /// Name of the error's counter, without numbers.
    pub fn cause(&self) -> &'static str {
        match self {
            Self::Version { .. } => "version",
            Self::UnexpectedReply { .. } => "unexpected_reply",
            Self::TooLong { .. } => "too_long",
            Self::TooManyFds => "too_many_fds",
            Self::Truncated { .. } => "truncated",
            Self::Payload { .. } => "short_payload",
            Self::FdCount { .. } => "fd_count",
            Self::FdKind { .. } => "fd_kind",
            Self::Polled { .. } => "polled_ring",
            Self::UnknownRequest(_) => "unknown_request",
            Self::NotOffered(_) => "not_offered",
            Self::NotNegotiated { .. } => "not_negotiated",
            Self::Features { .. } => "features",
            Self::ProtocolFeatures { .. } => "protocol_features",
            Self::InBand => "in_band",
            Self::Ring { .. } | Self::OnePair { .. } => "ring_index",
            Self::QueueSize { .. } => "queue_size",
            Self::RingOutside { .. } => "ring_outside",
            Self::Layout { .. } => "ring_layout",
            Self::Value { .. } => "value",
            Self::RegionCount(_) => "region_count",
            Self::OverLimit { .. } => "over_limit",
            Self::NoSlot => "no_slot",
            Self::NoSuchRegion { .. } => "no_such_region",
            Self::Map { .. } => "map",
            Self::Table(_) => "memory_table",
            Self::LogOverLimit(_) => "over_limit",
            Self::LogMap(_) => "log_map",
            Self::LogOffset { .. } => "log_offset",
            Self::LogShort { .. } => "log_short",
            Self::ConfigReadOnly => "config_read_only",
            Self::Mtu { .. } => "mtu",
        }
    }

    /// Whether it ends the connection even if the error could be returned: the stream is out of
    /// sync, or the specification requires it.
    pub fn is_fatal(&self) -> bool {
        matches!(
            self,
            Self::Version { .. }
                | Self::UnexpectedReply { .. }
                | Self::TooLong { .. }
                | Self::TooManyFds
                | Self::Truncated { .. }
                | Self::InBand
        )
    }

    /// Whether the connection continues even if the error cannot be returned: the specification
    /// requires a refusal, and the state is consistent.
    pub fn is_harmless(&self) -> bool {
        matches!(self, Self::ConfigReadOnly)
    }
}

impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version { .. }
            | Self::UnexpectedReply { .. }
            | Self::TooLong { .. }
            | Self::TooManyFds
            | Self::Truncated { .. }
            | Self::Payload { .. }
            | Self::FdCount { .. } => self.fmt_framing(f),
            Self::UnknownRequest(_)
            | Self::NotOffered(_)
            | Self::NotNegotiated { .. }
            | Self::Features { .. }
            | Self::ProtocolFeatures { .. }
            | Self::InBand => self.fmt_negotiation(f),
            Self::LogOverLimit(_)
            | Self::LogMap(_)
            | Self::LogOffset { .. }
            | Self::LogShort { .. } => self.fmt_log(f),
            _ => self.fmt_content(f),
        }
    }
}

impl ProtocolError {
    fn fmt_framing(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version { flags } => write!(
                f,
                "message header with flags {flags:#x}, not vhost-user version 1: is the peer a \
                 vhost-user front-end?"
            ),
            Self::UnexpectedReply { request } => write!(
                f,
                "a reply (to request {request}) instead of a request: are both ends back-ends?"
            ),
            Self::TooLong { request, size } => write!(
                f,
                "request {request} announces {size} bytes of payload, at most {PAYLOAD_MAX} are \
                 accepted"
            ),
            Self::TooManyFds => {
                write!(f, "more than {FDS_MAX} descriptors with one message")
            }
            Self::Truncated { got } => {
                write!(f, "the front-end disconnected after {got} bytes of a message")
            }
            Self::Payload { request, got } => {
                write!(f, "{request:?} with a payload of {got} bytes, which is too short")
            }
            Self::FdCount { request, want, got } => {
                write!(f, "{request:?} with {got} descriptors instead of {want}")
            }
            _ => Ok(()),
        }
    }

    fn fmt_negotiation(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownRequest(n) => {
                write!(f, "request {n} is not a known vhost-user request")
            }
            Self::NotOffered(request) => {
                write!(f, "{request:?} belongs to a feature that was not offered")
            }
            Self::NotNegotiated { request, bit } => write!(
                f,
                "{request:?} needs protocol feature bit {bit}, which the front-end did not \
                 negotiate"
            ),
            Self::Features { extra } => {
                write!(f, "SET_FEATURES with bits that were not offered: {extra:#x}")
            }
            Self::ProtocolFeatures { extra } => {
                write!(f, "SET_PROTOCOL_FEATURES with bits that were not offered: {extra:#x}")
            }
            Self::InBand => write!(
                f,
                "in-band notifications negotiated without BACKEND_REQ and REPLY_ACK; the front-end \
                 must negotiate all three or none"
            ),
            _ => Ok(()),
        }
    }

    fn fmt_log(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LogOverLimit(error) => write!(f, "the dirty log is not mapped: {error}"),
            Self::LogMap(error) => write!(f, "dirty log: {error}"),
            Self::LogOffset { offset } => write!(
                f,
                "dirty log at offset {offset:#x} of its file, which is not a multiple of 16"
            ),
            Self::LogShort { has, needs } => write!(
                f,
                "dirty log with bits for {has} pages of 4096 bytes, guest memory has {needs}: the \
                 front-end must send a larger log before its memory table grows"
            ),
            _ => Ok(()),
        }
    }

    fn fmt_content(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ring { index, pairs } => write!(
                f,
                "ring index {index} is out of range (number of queue pairs: {pairs}); for a guest \
                 with more, set queues= of the port"
            ),
            Self::OnePair { index } => write!(
                f,
                "ring index {index}: several queue pairs need protocol feature MQ, which the \
                 front-end lacks: set queues=1 of the port"
            ),
            Self::QueueSize { ring, size } => write!(
                f,
                "ring {ring}: queue size {size} must be 1 to 32768, a power of two unless packed"
            ),
            Self::RingOutside { ring, part, user_addr } => write!(
                f,
                "ring {ring}: {part} address {user_addr:#x} is in no region of the memory table; \
                 is guest memory shared (share=on)?"
            ),
            Self::Layout { ring, error } => write!(f, "ring {ring} cannot start: {error}"),
            Self::Value { request, value } => {
                write!(f, "{request:?} with invalid value {value:#x}")
            }
            Self::RegionCount(n) => {
                write!(f, "SET_MEM_TABLE with {n} regions: must be 1 to {REGIONS_MAX}")
            }
            Self::OverLimit { guest_addr, error } => {
                write!(f, "memory region at guest address {guest_addr:#x} is not mapped: {error}")
            }
            Self::FdKind { request, kind, want } => {
                write!(f, "{request:?} with a descriptor that is {kind}: {want}")
            }
            Self::Polled { ring } => write!(
                f,
                "ring {ring} without a kick descriptor: this port forbids polled rings (polled=off)"
            ),
            Self::NoSlot => write!(f, "ADD_MEM_REG with every memory slot in use"),
            Self::NoSuchRegion { guest_addr } => {
                write!(f, "REM_MEM_REG of a region at {guest_addr:#x} that was never added")
            }
            Self::Map { guest_addr, error } => {
                write!(f, "memory region at guest address {guest_addr:#x}: {error}")
            }
            Self::Table(error) => write!(f, "memory table: {error}"),
            Self::ConfigReadOnly => write!(
                f,
                "SET_CONFIG of read-only configuration (at most {CONFIG_MAX} bytes): refused"
            ),
            Self::Mtu { mtu, why } => write!(f, "MTU {mtu} refused: {why}"),
            _ => Ok(()),
        }
    }
}

impl std::error::Error for ProtocolError {}

/// Reason why a connection ended.
#[derive(Debug)]
pub enum ConnectionError {
    /// The front-end closed it. Not an error.
    Closed,
    /// The front-end violated the protocol.
    Protocol(ProtocolError),
    /// The front-end does not read our replies.
    NotReading,
    /// More descriptors than the port's limit.
    OverLimit(OverLimit),
    /// A system call failed.
    Os(io::Error),
}

impl ConnectionError {
    /// Name of the front-end's error, as [`ProtocolError::cause`]; `None` if it made none.
    pub fn cause(&self) -> Option<&'static str> {
        match self {
            Self::Closed | Self::Os(_) => None,
            Self::Protocol(error) => Some(error.cause()),
            Self::NotReading => Some("replies_not_read"),
            Self::OverLimit(_) => Some("over_limit"),
        }
    }
}

impl fmt::Display for ConnectionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => write!(f, "the front-end closed the connection"),
            Self::Protocol(error) => write!(f, "{error}"),
            Self::NotReading => write!(f, "the front-end does not read replies"),
            Self::OverLimit(over) => write!(f, "{over}"),
            Self::Os(error) => write!(f, "the socket failed: {error}"),
        }
    }
}

impl std::error::Error for ConnectionError {}

impl From<ProtocolError> for ConnectionError {
    fn from(error: ProtocolError) -> Self {
        Self::Protocol(error)
    }
}

impl From<io::Error> for ConnectionError {
    fn from(error: io::Error) -> Self {
        Self::Os(error)
    }
}
