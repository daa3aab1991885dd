//! Who may read a switch by its control socket, and who may change it.
//!
//! The socket's mode and group decide who connects; the peer's credentials, which the kernel
//! records when it connects, decide what it may request. Nothing in a request counts.

use api::Problem;
use api::routes::{OPERATIONS, Operation, Right, Routed};
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
    pub(super) fn check(&self, peer: &Peer, routed: &Routed) -> Result<(), Problem> {
        let Operation { name, right, .. } = *routed.operation;
        let owns = peer.uid == ROOT || peer.uid == self.owner;
        if !owns && right == Right::Own {
            let detail = format!(
                "{name} refused: it runs a program with the rights of the switch: only root and \
                 the switch's user may do this"
            );
            return Err(Problem::new(403, detail, "run this as root or the switch's user"));
        }
        let is_writer = || self.writers().is_some_and(|group| peer.is_member(group.id));
        if owns || right == Right::Read || is_writer() {
            return Ok(());
        }
        let uid = peer.uid;
        let reads = OPERATIONS.iter().filter(|o| o.right == Right::Read);
        let reads: Vec<_> = reads.map(|operation| operation.name).collect();
        let reads = reads.join(", ");
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
        let allowed = format!("Allowed: {owner}{members}");
        let detail = format!("{name} refused: user {uid} may only read ({reads}). {allowed}");
        Err(Problem::new(403, detail, allowed))
    }

    /// The group whose members may change the switch.
    fn writers(&self) -> Option<&Group> {
        self.group.as_ref().filter(|_| self.group_writes)
    }
}

#[cfg(test)]
mod tests {
    use api::Request;

    use super::*;

    #[test]
    fn upgrade_is_for_the_owner_alone() {
        // A socket pair's peer is this process: root, or a member of its own group.
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let peer = os::peer(std::os::fd::AsFd::as_fd(&socket)).unwrap();
        let group = rustix::process::getegid().as_raw();
        let mut rights = Rights::new(Group::find(&group.to_string()), true);
        let routed = |request: Request| Routed { operation: Operation::of(&request), request };
        let upgrade = routed(Request::Upgrade { program: None });
        assert_eq!(rights.check(&peer, &upgrade), Ok(()));
        let mut other = peer;
        (other.uid, rights.owner) = (54_321, 12_345);
        assert_eq!(rights.check(&other, &routed(Request::Shutdown)), Ok(()), "its group may");
        let error = rights.check(&other, &upgrade).unwrap_err();
        assert_eq!(error.status, 403);
        assert!(error.detail.contains("only root and the switch's user may"), "{error}");
    }
}
