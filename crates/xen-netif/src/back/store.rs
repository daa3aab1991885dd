//! Xenstore as used by the handshakes.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use super::tree::{Failure, Tree};
use crate::store::{Errno, Store, StoreError};

/// A store, and our domain's directory in it. The socket of the real xenstored has no "own" domain,
/// so all paths are sent in full.
pub struct DomainStore {
    store: Store,
    dir: String,
    gone: bool,
}

impl DomainStore {
    /// Queries our domain id. Only dom0 on the socket gets no reply; it is 0.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn new(store: Store) -> Result<Self, StoreError> {
        let own = store.read("domid")?.and_then(|id| id.trim().parse::<u16>().ok());
        let dir = store.domain_path(own.unwrap_or(0))?;
        Ok(Self { store, dir, gone: false })
    }

    /// Limits the time that a request blocks, after which the store counts as disconnected.
    pub fn set_reply_wait(&self, wait: Duration) {
        self.store.set_reply_wait(wait);
    }

    /// Time that requests took since the last call.
    pub fn take_spent(&self) -> Duration {
        self.store.take_spent()
    }

    /// Tokens of the watches that fired.
    ///
    /// # Errors
    /// [`Failure`]: the store has disconnected.
    pub fn events(&mut self) -> Result<Vec<String>, Failure> {
        let events = self.store.events();
        let events = events.map_err(|error| self.fail(&error))?;
        Ok(events.into_iter().map(|(_, token)| token).collect())
    }

    fn whole(&self, path: &str) -> String {
        match path.as_bytes().first() {
            // @releaseDomain is not in a directory.
            Some(b'/' | b'@') => path.into(),
            _ => format!("{}/{path}", self.dir),
        }
    }

    fn fail(&mut self, error: &StoreError) -> Failure {
        self.gone |= error.is_gone() || matches!(error, StoreError::Timeout(..));
        Failure(error.to_string())
    }

    /// `None` if permission was denied.
    fn permitted<R>(&mut self, got: Result<R, StoreError>) -> Result<Option<R>, Failure> {
        match got {
            Ok(got) => Ok(Some(got)),
            Err(error) if is_permission(&error) => Ok(None),
            Err(error) => Err(self.fail(&error)),
        }
    }
}

fn is_permission(error: &StoreError) -> bool {
    matches!(error.errno(), Some(Errno::Eacces | Errno::Eperm))
}

/// Readable when [`DomainStore::events`] has events.
impl AsFd for DomainStore {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.store.as_fd()
    }
}

impl Tree for DomainStore {
    fn is_gone(&self) -> bool {
        self.gone
    }

    fn read(&mut self, path: &str) -> Result<Option<String>, Failure> {
        let got = self.store.read(&self.whole(path));
        Ok(self.permitted(got)?.flatten())
    }

    fn write(
        &mut self,
        dir: &str,
        anchor: &str,
        keys: &[(String, String)],
    ) -> Result<bool, Failure> {
        let dir = self.whole(dir);
        let done = self.store.transaction(|t| {
            if t.read(&format!("{dir}/{anchor}"))?.is_none() {
                return Ok(false);
            }
            keys.iter().try_for_each(|(key, value)| t.write(&format!("{dir}/{key}"), value))?;
            Ok(true)
        });
        done.map_err(|error| self.fail(&error))
    }

    fn write_key(&mut self, path: &str, value: &str) -> Result<(), Failure> {
        let done = self.store.write(&self.whole(path), value);
        self.permitted(done).map(drop)
    }

    fn remove(&mut self, path: &str) -> Result<(), Failure> {
        let done = self.store.rm(&self.whole(path));
        self.permitted(done).map(drop)
    }

    fn list(&mut self, dir: &str) -> Result<Vec<String>, Failure> {
        let got = self.store.list(&self.whole(dir));
        Ok(self.permitted(got)?.unwrap_or_default())
    }

    fn watch(&mut self, path: &str, token: &str) -> Result<(), Failure> {
        let done = self.store.watch(&self.whole(path), token);
        done.map_err(|error| self.fail(&error))
    }

    fn unwatch(&mut self, path: &str, token: &str) -> Result<(), Failure> {
        match self.store.unwatch(&self.whole(path), token) {
            // Its domain was destroyed, and the watch with it.
            Err(error) if error.errno() == Some(Errno::Enoent) => Ok(()),
            done => done.map_err(|error| self.fail(&error)),
        }
    }
}
