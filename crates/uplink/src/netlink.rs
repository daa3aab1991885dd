//! Interface settings by rtnetlink, which also permits them to root in a user namespace; the ioctls
//! require root in the initial one.

use std::io;
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::netdevice::name_to_index;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socket_with,
};

/// Length of `struct nlmsghdr`, `struct ifinfomsg`, and one attribute of four bytes.
const MESSAGE_LEN: usize = 16 + 16 + 8;
/// Length of `struct nlmsghdr` and the error of `struct nlmsgerr`.
const ANSWER_LEN_MIN: usize = 16 + 4;

/// Sets the number of frames that the kernel queues for us, for each queue of the interface.
pub(crate) fn set_queue_len(any: impl AsFd, name: &str, frames: u32) -> io::Result<()> {
    let index = name_to_index(any, name)?;
    // No protocol is NETLINK_ROUTE.
    let close = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, close, None)?;
    send(&socket, &message(index, libc::IFLA_TXQLEN, frames), SendFlags::empty())?;
    let mut answer = [0; 256];
    let (len, _) = recv(&socket, &mut answer, RecvFlags::empty())?;
    outcome(&answer[..len])
}

/// Builds RTM_NEWLINK for an existing interface, with one numeric attribute.
fn message(index: u32, attribute: u16, value: u32) -> [u8; MESSAGE_LEN] {
    let mut bytes = [0; MESSAGE_LEN];
    let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
    let flags = (libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16;
    put(0, &(MESSAGE_LEN as u32).to_ne_bytes());
    put(4, &libc::RTM_NEWLINK.to_ne_bytes());
    put(6, &flags.to_ne_bytes());
    // ifinfomsg: family and type 0, the index at 4, no flags to change.
    put(16 + 4, &index.to_ne_bytes());
    put(32, &8_u16.to_ne_bytes());
    put(34, &attribute.to_ne_bytes());
    put(36, &value.to_ne_bytes());
    bytes
}

/// Decodes the kernel's acknowledgement.
fn outcome(answer: &[u8]) -> io::Result<()> {
    let word = |at: usize| -> Option<[u8; 4]> { answer.get(at..at + 4)?.try_into().ok() };
    let kind = answer.get(4..6).map(|kind| u16::from_ne_bytes([kind[0], kind[1]]));
    let error = word(16).filter(|_| answer.len() >= ANSWER_LEN_MIN).map(i32::from_ne_bytes);
    match (kind.map(i32::from), error) {
        (Some(libc::NLMSG_ERROR), Some(0)) => Ok(()),
        (Some(libc::NLMSG_ERROR), Some(error)) => Err(io::Error::from_raw_os_error(-error)),
        _ => Err(Errno::PROTO.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(kind: i32, error: i32) -> Vec<u8> {
        let mut bytes = vec![0; 36];
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
