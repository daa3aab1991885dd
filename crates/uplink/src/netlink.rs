//! Interface settings by rtnetlink, which also permits them to root in a user namespace; the ioctls
//! require root in the initial one.

use std::io;
use std::os::fd::AsFd;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkMessage};
use rustix::io::Errno;
use rustix::net::netdevice::name_to_index;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with,
};

/// Sets the number of frames that the kernel queues for us, for each queue of the interface.
pub(crate) fn set_queue_len(any: impl AsFd, name: &str, frames: u32) -> io::Result<()> {
    let mut link = LinkMessage::default();
    link.header.index = name_to_index(any, name)?;
    link.attributes.push(LinkAttribute::TxQueueLen(frames));
    let mut request = Vec::new();
    append(0, RouteNetlinkMessage::NewLink(link), NLM_F_ACK, &mut request);
    // No protocol is NETLINK_ROUTE.
    let close = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, close, None)?;
    send(&socket, &request, SendFlags::empty())?;
    let mut answer = [0; 256];
    let (len, _) = recv(&socket, &mut answer, RecvFlags::empty())?;
    outcome(&answer[..len])
}

/// Appends a request to those that are sent at once.
pub(crate) fn append(seq: u32, message: RouteNetlinkMessage, flags: u16, bytes: &mut Vec<u8>) {
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | flags;
    header.sequence_number = seq;
    let mut message = NetlinkMessage::new(header, NetlinkPayload::from(message));
    message.finalize();
    let at = bytes.len();
    bytes.resize(at + message.buffer_len().next_multiple_of(4), 0);
    message.serialize(&mut bytes[at..]);
}

/// Decodes the kernel's acknowledgement.
fn outcome(answer: &[u8]) -> io::Result<()> {
    match NetlinkMessage::<RouteNetlinkMessage>::deserialize(answer).map(|m| m.payload) {
        Ok(NetlinkPayload::Error(error)) if error.raw_code() == 0 => Ok(()),
        Ok(NetlinkPayload::Error(error)) => {
            Err(io::Error::from_raw_os_error(error.raw_code().saturating_neg()))
        }
        _ => Err(Errno::PROTO.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(kind: i32, error: i32) -> Vec<u8> {
        let mut bytes = vec![0; 36];
        bytes[..4].copy_from_slice(&36_u32.to_ne_bytes());
        bytes[4..6].copy_from_slice(&u16::try_from(kind).unwrap().to_ne_bytes());
        bytes[16..20].copy_from_slice(&error.to_ne_bytes());
        bytes
    }

    #[test]
    fn replies_of_the_kernel() {
        assert!(outcome(&answer(libc::NLMSG_ERROR, 0)).is_ok());
        let refused = outcome(&answer(libc::NLMSG_ERROR, -libc::EPERM)).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
        for bad in
            [answer(libc::NLMSG_NOOP, 0), answer(libc::NLMSG_ERROR, 0)[..19].to_vec(), vec![]]
        {
            assert_eq!(outcome(&bad).unwrap_err().raw_os_error(), Some(libc::EPROTO));
        }
    }

    #[test]
    fn an_interface_that_does_not_exist() {
        let any = std::os::unix::net::UnixDatagram::unbound().unwrap();
        let error = set_queue_len(any, "no-such-if", 1).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
    }
}
