//! Users and groups: by name, and those of a socket's peer.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::net::sockopt::socket_peercred;

use crate::helper::group;
use crate::sys::peer_groups;

/// A group of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its number.
    pub id: u32,
    /// Its name, or number, as given.
    pub name: String,
}

impl Group {
    /// Finds a group by name or number. `None`: there is no group of this name. May block on the
    /// machine's name service; a number never does.
    pub fn find(text: &str) -> Option<Self> {
        // The highest number means "unchanged" to the system.
        let number = text.parse().ok().filter(|id| *id != u32::MAX);
        let id = number.or_else(|| group(text))?;
        Some(Self { id, name: text.into() })
    }
}

/// The process at the other end of a Unix socket when it connected, or listened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its number; `None`: it is in a foreign PID namespace.
    pub pid: Option<u32>,
    /// Its effective user.
    pub uid: u32,
    /// Its effective group.
    pub gid: u32,
    /// Its supplementary groups.
    groups: Vec<u32>,
}

impl Peer {
    /// Whether it is in this group.
    pub fn is_member(&self, group: u32) -> bool {
        self.gid == group || self.groups.contains(&group)
    }
}

/// The peer of a connected Unix socket.
///
/// # Errors
/// Not a connected Unix socket.
pub fn peer(socket: BorrowedFd<'_>) -> io::Result<Peer> {
    let peer = socket_peercred(socket)?;
    let pid = u32::try_from(peer.pid.as_raw_nonzero().get()).ok();
    let (uid, gid) = (peer.uid.as_raw(), peer.gid.as_raw());
    Ok(Peer { pid, uid, gid, groups: peer_groups(socket)? })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn groups_have_names_or_numbers() {
        let root = Group::find("root").map(|group| group.id);
        assert!(root.is_none_or(|id| id == 0), "{root:?}");
        assert_eq!(Group::find("36"), Some(Group { id: 36, name: "36".into() }));
        for none in ["no-such-group", "", "4294967295", "-1", "a\0b"] {
            assert_eq!(Group::find(none), None, "{none}");
        }
    }

    #[test]
    fn peer_of_a_pair_is_this_process() {
        let (a, _b) = crate::socketpair().unwrap();
        let peer = peer(a.as_fd()).unwrap();
        assert_eq!(peer.pid, Some(std::process::id()));
        assert_eq!(peer.uid, rustix::process::geteuid().as_raw());
        assert!(peer.is_member(rustix::process::getegid().as_raw()));
        assert!(!peer.is_member(u32::MAX - 1));
        assert!(super::peer(crate::eventfd().unwrap().as_fd()).is_err());
    }
}
