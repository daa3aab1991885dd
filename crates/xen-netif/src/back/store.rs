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

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::host::Back;
    use crate::sys::{self, Until};

    fn home() -> (tempdir::Dir, Back, Home) {
        let dir = tempdir::Dir::new();
        let back = Back::open_local(&dir.0).unwrap();
        let home = Home::new(back.store().unwrap()).unwrap();
        (dir, back, home)
    }

    mod tempdir {
        /// A directory that goes with its test.
        pub struct Dir(pub std::path::PathBuf);

        impl Dir {
            pub fn new() -> Self {
                use std::sync::atomic::{AtomicU32, Ordering};
                static NEXT: AtomicU32 = AtomicU32::new(0);
                let n = NEXT.fetch_add(1, Ordering::Relaxed);
                Self(std::env::temp_dir().join(format!("pvs-home-{}-{n}", std::process::id())))
            }
        }

        impl Drop for Dir {
            fn drop(&mut self) {
                let _ = std::fs::remove_dir_all(&self.0);
            }
        }
    }

    #[test]
    fn own_directory_is_found_and_others_are_left_alone() {
        let (_dir, _back, mut home) = home();
        home.note("backend/vif/1/0/frontend", "/local/domain/1/device/vif/0").unwrap();
        let back = "/local/domain/0/backend/vif/1/0";
        assert!(home.read(&format!("{back}/frontend")).unwrap().is_some());
        let key = ("state".to_string(), "2".to_string());
        assert!(home.write("backend/vif/1/0", "frontend", std::slice::from_ref(&key)).unwrap());
        assert_eq!(home.read(&format!("{back}/state")).unwrap().as_deref(), Some("2"));
        assert!(!home.write("backend/vif/2/0", "frontend", &[key]).unwrap(), "it would be new");
        assert_eq!(home.list("backend/vif").unwrap(), ["1"]);
        assert_eq!(home.read("backend/vif/2/0/state").unwrap(), None);
    }

    /// In a driver domain, which xenstore does not let see everything as it does domain 0.
    #[test]
    fn what_a_guest_hides_is_not_there() {
        use crate::store::server::{Limits, Server};
        use crate::store::{Access, Perm};
        let server = Server::start(Limits::XENSTORED).unwrap();
        let dom0 = server.connect(0).unwrap();
        let (front, ours) = ("/local/domain/1/device/vif/0", "/local/domain/2");
        dom0.write(&format!("{front}/state"), "4").unwrap();
        let hidden = [Perm::new(Access::None, 1)];
        dom0.set_perms(&format!("{front}/state"), &hidden).unwrap();
        dom0.write(&format!("{ours}/domid"), "2").unwrap();
        let seen = [Perm::new(Access::None, 0), Perm::new(Access::Read, 2)];
        dom0.set_perms(&format!("{ours}/domid"), &seen).unwrap();
        let mut home = Home::new(server.connect(2).unwrap()).unwrap();
        assert_eq!(home.dir, ours);
        assert_eq!(home.read(&format!("{front}/state")).unwrap(), None);
        home.note(&format!("{front}/state"), "1").unwrap();
        home.remove(&format!("{front}/state")).unwrap();
        assert_eq!(dom0.read(&format!("{front}/state")).unwrap().as_deref(), Some("4"));
        assert!(!home.is_gone(), "a refusal, no more");
    }

    /// The next `n` different tokens, in order of the alphabet.
    fn told(home: &mut Home, n: usize) -> Vec<String> {
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut told = Vec::new();
        while told.len() < n {
            assert!(sys::wait(home.as_fd(), Until::Readable, deadline).unwrap(), "{told:?}");
            told.extend(home.events().unwrap());
            told.sort_unstable();
            told.dedup();
        }
        told
    }

    #[test]
    fn events_are_told_by_token_and_a_store_that_ends_is_told() {
        let (_dir, back, mut home) = home();
        home.watch("backend/vif", "vifs").unwrap();
        home.watch("@releaseDomain", "release").unwrap();
        // The first event comes of the watch itself.
        assert_eq!(told(&mut home, 2), ["release", "vifs"]);
        home.note("backend/vif/7/0/online", "1").unwrap();
        assert_eq!(told(&mut home, 1), ["vifs"]);
        home.unwatch("backend/vif", "vifs").unwrap();
        home.note("backend/vif/7/0/online", "0").unwrap();
        home.watch("backend", "after").unwrap();
        assert_eq!(told(&mut home, 1), ["after"]);
        drop(back);
        assert!(home.read("backend").is_err() && home.is_gone());
    }
}
