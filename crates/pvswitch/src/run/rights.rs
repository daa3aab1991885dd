//! Who may read a switch by its control socket, and who may change it.
//!
//! The socket's mode and group decide who connects; the peer's credentials, which the kernel
//! records when it connects, decide what it may request. Nothing in a request counts.

use api::control::Request;
use os::{Group, Peer};

/// Rules of a control socket.
pub(super) struct Rights {
    /// User of the switch.
    owner: u32,
    /// Group of the socket, if it was set.
    group: Option<Group>,
    /// Whether members of the group may change the switch.
    group_writes: bool,
}

const ROOT: u32 = 0;

impl Rights {
    /// Rules for the user of this process.
    pub(super) fn new(group: Option<Group>, group_writes: bool) -> Self {
        Self { owner: rustix::process::geteuid().as_raw(), group, group_writes }
    }

    /// Checks whether a client may make a request.
    ///
    /// # Errors
    /// It may not; the error says who may.
    pub(super) fn check(&self, peer: &Peer, request: &Request) -> Result<(), String> {
        let owns = peer.uid == ROOT || peer.uid == self.owner;
        if !owns && request.is_for_owner() {
            return Err(format!(
                "{} refused: it runs a program with the rights of the switch; only root and the \
                 switch's user may",
                request.name()
            ));
        }
        if owns || !request.changes() || self.writers().is_some_and(|g| peer.is_member(g.id)) {
            return Ok(());
        }
        let what = request.name();
        let uid = peer.uid;
        let reads = Request::READS.join(", ");
        let owner = match self.owner {
            ROOT => "root".into(),
            owner => format!("root and user {owner}"),
        };
        let members = match (self.writers(), &self.group) {
            (Some(group), _) => format!(" and members of group {}", group.name),
            (None, Some(group)) => {
                format!("; with --control-write group, members of group {} too", group.name)
            }
            (None, None) => "; with --control-group GROUP --control-write group, members of a \
                             group too"
                .into(),
        };
        Err(format!(
            "{what} refused: user {uid} may only read ({reads}). Allowed: {owner}{members}"
        ))
    }

    /// The group whose members may change the switch.
    fn writers(&self) -> Option<&Group> {
        self.group.as_ref().filter(|_| self.group_writes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn upgrade_is_for_the_owner_alone() {
        // A socket pair's peer is this process: root, or a member of its own group.
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let peer = os::peer(std::os::fd::AsFd::as_fd(&socket)).unwrap();
        let group = rustix::process::getegid().as_raw();
        let mut rights = Rights::new(Group::find(&group.to_string()), true);
        let upgrade = Request::Upgrade { program: None };
        assert_eq!(rights.check(&peer, &upgrade), Ok(()));
        let mut other = peer;
        (other.uid, rights.owner) = (54_321, 12_345);
        assert_eq!(rights.check(&other, &Request::Shutdown), Ok(()), "its group may");
        let error = rights.check(&other, &upgrade).unwrap_err();
        assert!(error.contains("only root and the switch's user may"), "{error}");
    }
}
