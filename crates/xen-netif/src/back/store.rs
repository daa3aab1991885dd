//! Xenstore as the handshakes use it.

use std::os::fd::{AsFd, BorrowedFd};

use super::tree::{Failure, Tree};
use crate::store::{Errno, Store, StoreError};

/// A store, and our own domain's directory in it: the real xenstored's socket knows of no "own",
/// so every path is sent whole.
pub struct Home {
    store: Store,
    dir: String,
    gone: bool,
}

impl Home {
    /// Asks the store which domain we are. Where it does not say, and there is but one domain that
    /// it would not tell (dom0, over the socket), it is 0.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn new(store: Store) -> Result<Self, StoreError> {
        let own = store.read("domid")?.and_then(|id| id.trim().parse::<u16>().ok());
        let dir = store.domain_path(own.unwrap_or(0))?;
        Ok(Self { store, dir, gone: false })
    }

    /// The tokens of watches under which something happened.
    ///
    /// # Errors
    /// [`Failure`]: the store is gone.
    pub fn events(&mut self) -> Result<Vec<String>, Failure> {
        let events = self.store.events();
        let events = events.map_err(|error| self.fail(&error))?;
        Ok(events.into_iter().map(|(_, token)| token).collect())
    }

    fn whole(&self, path: &str) -> String {
        match path.as_bytes().first() {
            // @releaseDomain is nobody's.
            Some(b'/' | b'@') => path.into(),
            _ => format!("{}/{path}", self.dir),
        }
    }

    fn fail(&mut self, error: &StoreError) -> Failure {
        self.gone |= error.is_gone() || matches!(error, StoreError::Silent(..));
        Failure(error.to_string())
    }

    /// `None` for what is not ours.
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

/// Readable when [`Home::events`] has something to tell.
impl AsFd for Home {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.store.as_fd()
    }
}

impl Tree for Home {
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

    fn note(&mut self, path: &str, value: &str) -> Result<(), Failure> {
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
            // Its domain went, and with it the watch.
            Err(error) if error.errno() == Some(Errno::Enoent) => Ok(()),
            done => done.map_err(|error| self.fail(&error)),
        }
    }
}
