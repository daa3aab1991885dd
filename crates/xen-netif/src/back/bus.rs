//! All vifs that one back-end domain serves, and those that come and go.

use std::collections::BTreeMap;
use std::time::Instant;

use super::tree::{Failure, Tree};
use super::vif::{Handshake, Plug, VifId};

/// Where a toolstack makes vifs, below our own domain's directory.
const VIFS: &str = "backend/vif";
/// Token of events there.
const VIFS_TOKEN: &str = "vifs";
/// Fires when a domain is gone.
const RELEASE: &str = "@releaseDomain";
/// Its token.
const RELEASE_TOKEN: &str = "release";

/// The vifs served, and whether others are looked for.
pub struct Bus<P> {
    vifs: BTreeMap<VifId, Handshake<P>>,
    auto: bool,
    /// Vifs may have come.
    news: bool,
}

/// One that serves no vif yet, and looks for none.
impl<P> Default for Bus<P> {
    fn default() -> Self {
        Self { vifs: BTreeMap::new(), auto: false, news: false }
    }
}

impl<P: Plug> Bus<P> {
    /// From now on, vifs that come are looked for.
    pub fn set_auto<T: Tree>(&mut self, store: &mut T) -> Result<(), Failure> {
        if !self.auto {
            store.watch(VIFS, VIFS_TOKEN)?;
        }
        (self.auto, self.news) = (true, true);
        Ok(())
    }

    /// Vifs that come are no longer looked for.
    pub fn unset_auto<T: Tree>(&mut self, store: &mut T) {
        (self.auto, self.news) = (false, false);
        // A store that is gone holds no watches.
        let _ = store.unwatch(VIFS, VIFS_TOKEN);
    }

    /// Asks to be told of everything: at the start, and when xenstore is back.
    ///
    /// # Errors
    /// [`Failure`]: the store is gone, or refused what is for all vifs; what it refuses a vif is
    /// that one's trouble ([`Handshake::look`]).
    pub fn start<T: Tree>(&mut self, store: &mut T, now: Instant) -> Result<(), Failure> {
        let watched = self.watch(store);
        if store.is_gone() {
            return watched;
        }
        self.vifs.values_mut().try_for_each(|vif| vif.start(store, now))?;
        watched
    }

    fn watch<T: Tree>(&mut self, store: &mut T) -> Result<(), Failure> {
        self.news = self.auto;
        store.watch(RELEASE, RELEASE_TOKEN)?;
        if self.auto {
            store.watch(VIFS, VIFS_TOKEN)?;
        }
        Ok(())
    }

    /// Serves a vif.
    pub fn add<T: Tree>(
        &mut self,
        store: &mut T,
        id: VifId,
        vif: Handshake<P>,
        now: Instant,
    ) -> Result<(), Failure> {
        let vif = self.vifs.entry(id).or_insert(vif);
        vif.start(store, now)
    }

    /// Stops serving a vif; its front end is left as it is.
    pub fn remove<T: Tree>(&mut self, store: &mut T, id: VifId) {
        if let Some(mut vif) = self.vifs.remove(&id) {
            vif.leave(store);
        }
    }

    /// A vif that is served.
    pub fn vif(&mut self, id: VifId) -> Option<&mut Handshake<P>> {
        self.vifs.get_mut(&id)
    }

    /// The vifs that are served.
    pub fn vifs(&self) -> impl Iterator<Item = (VifId, &Handshake<P>)> {
        self.vifs.iter().map(|(id, vif)| (*id, vif))
    }

    /// Obeys events of xenstore, by their tokens.
    pub fn on_events<'a, T: Tree>(
        &mut self,
        store: &mut T,
        tokens: impl Iterator<Item = &'a str>,
        now: Instant,
    ) -> Result<(), Failure> {
        let mut due: Vec<VifId> = Vec::new();
        for token in tokens {
            match token {
                VIFS_TOKEN => self.news = self.auto,
                RELEASE_TOKEN => due.extend(self.vifs.keys()),
                _ => due.extend(id_of(token)),
            }
        }
        due.sort_unstable();
        due.dedup();
        // One look, however many events: both directories of a vif often tell of the same.
        for id in due {
            if let Some(vif) = self.vifs.get_mut(&id) {
                vif.look(store, now)?;
            }
        }
        Ok(())
    }

    /// Looks at vifs whose time has come.
    pub fn tick<T: Tree>(&mut self, store: &mut T, now: Instant) -> Result<(), Failure> {
        let due = self.vifs.values_mut().filter(|vif| vif.due().is_some_and(|at| at <= now));
        due.into_iter().try_for_each(|vif| vif.look(store, now))
    }

    /// When [`Self::tick`] is to be called.
    pub fn due(&self) -> Option<Instant> {
        self.vifs.values().filter_map(Handshake::due).min()
    }

    /// Vifs that exist, are wanted by their toolstack, and are not served. Empty unless something
    /// came since the last call.
    pub fn found<T: Tree>(&mut self, store: &mut T) -> Result<Vec<VifId>, Failure> {
        let mut found = Vec::new();
        if !std::mem::take(&mut self.news) {
            return Ok(found);
        }
        for domain in store.list(VIFS)? {
            let Ok(domid) = domain.parse() else { continue };
            let devices = store.list(&format!("{VIFS}/{domain}"));
            for device in here(store, devices)? {
                let Ok(devid) = device.parse() else { continue };
                let id = VifId { domid, devid };
                let wanted = super::keys::flag(store, &format!("{}/online", id.back()));
                let wanted = here(store, wanted)?;
                if wanted && !self.vifs.contains_key(&id) {
                    found.push(id);
                }
            }
        }
        Ok(found)
    }

    /// Vifs that are over.
    pub fn over(&self) -> Vec<VifId> {
        self.vifs.iter().filter(|(_, vif)| vif.is_over()).map(|(id, _)| *id).collect()
    }
}

/// What was read, or nothing where that was refused.
fn here<T: Tree, R: Default>(store: &T, got: Result<R, Failure>) -> Result<R, Failure> {
    if store.is_gone() { got } else { Ok(got.unwrap_or_default()) }
}

/// The vif that a token is of.
fn id_of(token: &str) -> Option<VifId> {
    let (domid, devid) = token.strip_prefix(['b', 'f'])?.split_once('/')?;
    Some(VifId { domid: domid.parse().ok()?, devid: devid.parse().ok()? })
}

#[cfg(test)]
mod tests;
