//! All vifs that one back-end domain serves, and changes of their number.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::tree::{Failure, Tree};
use super::vif::{Handshake, Plug, VifId};

/// Directory of vifs, below our own domain's directory.
const VIFS: &str = "backend/vif";
/// Token of events in it.
const VIFS_TOKEN: &str = "vifs";
/// Fires when a domain is destroyed.
const RELEASE: &str = "@releaseDomain";
/// Token of its events.
const RELEASE_TOKEN: &str = "release";
/// Shortest time between two searches for new vifs. Each node that changes in their directory
/// reports a change, our own writes included: a guest must not cause searches without a bound.
const SEARCH_INTERVAL: Duration = Duration::from_millis(100);

/// The vifs served, and whether new ones are searched for.
pub struct Bus<P> {
    vifs: BTreeMap<VifId, Handshake<P>>,
    auto: bool,
    /// Whether the directory may have changed.
    changed: bool,
    /// When it may be searched again.
    search_at: Option<Instant>,
}

/// Serves no vif, and searches for none.
impl<P> Default for Bus<P> {
    fn default() -> Self {
        Self { vifs: BTreeMap::new(), auto: false, changed: false, search_at: None }
    }
}

impl<P: Plug> Bus<P> {
    /// Starts the search for new vifs.
    pub fn set_auto<T: Tree>(&mut self, store: &mut T) -> Result<(), Failure> {
        if !self.auto {
            store.watch(VIFS, VIFS_TOKEN)?;
        }
        (self.auto, self.changed) = (true, true);
        Ok(())
    }

    /// Ends the search for new vifs.
    pub fn unset_auto<T: Tree>(&mut self, store: &mut T) {
        (self.auto, self.changed) = (false, false);
        // A disconnected store holds no watches.
        let _ = store.unwatch(VIFS, VIFS_TOKEN);
    }

    /// Registers all watches: at the start, and when xenstore is reconnected.
    ///
    /// # Errors
    /// [`Failure`]: the store has disconnected, or refused a watch for all vifs; a refusal for a
    /// single vif is retried by that one ([`Handshake::poll`]).
    pub fn start<T: Tree>(&mut self, store: &mut T, now: Instant) -> Result<(), Failure> {
        let watched = self.watch(store);
        if store.is_gone() {
            return watched;
        }
        self.vifs.values_mut().try_for_each(|vif| vif.start(store, now))?;
        watched
    }

    fn watch<T: Tree>(&mut self, store: &mut T) -> Result<(), Failure> {
        self.changed = self.auto;
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

    /// Serves a vif that was adopted from another process.
    pub fn insert(&mut self, id: VifId, vif: Handshake<P>) {
        self.vifs.insert(id, vif);
    }

    /// Stops serving a vif; its front end is not changed.
    pub fn remove<T: Tree>(&mut self, store: &mut T, id: VifId) {
        if let Some(mut vif) = self.vifs.remove(&id) {
            vif.leave(store);
        }
    }

    /// A vif that is served, by id.
    pub fn get(&self, id: VifId) -> Option<&Handshake<P>> {
        self.vifs.get(&id)
    }

    /// A vif that is served, by id, to change it.
    pub fn vif(&mut self, id: VifId) -> Option<&mut Handshake<P>> {
        self.vifs.get_mut(&id)
    }

    /// All vifs that are served.
    pub fn vifs(&self) -> impl Iterator<Item = (VifId, &Handshake<P>)> {
        self.vifs.iter().map(|(id, vif)| (*id, vif))
    }

    /// Handles events of xenstore, by their tokens.
    pub fn on_events<'a, T: Tree>(
        &mut self,
        store: &mut T,
        tokens: impl Iterator<Item = &'a str>,
        now: Instant,
    ) -> Result<(), Failure> {
        let mut due: Vec<VifId> = Vec::new();
        for token in tokens {
            match token {
                VIFS_TOKEN => self.changed = self.auto,
                RELEASE_TOKEN => due.extend(self.vifs.keys()),
                _ => due.extend(id_of(token)),
            }
        }
        due.sort_unstable();
        due.dedup();
        // Each vif once: both of its directories often report the same change.
        for id in due {
            if let Some(vif) = self.vifs.get_mut(&id) {
                vif.poll(store, now)?;
            }
        }
        Ok(())
    }

    /// Polls vifs that are due.
    pub fn tick<T: Tree>(&mut self, store: &mut T, now: Instant) -> Result<(), Failure> {
        let due = self.vifs.values_mut().filter(|vif| vif.due().is_some_and(|at| at <= now));
        due.into_iter().try_for_each(|vif| vif.poll(store, now))
    }

    /// Time of the next call of [`Self::tick`].
    pub fn due(&self) -> Option<Instant> {
        let search = self.search_at.filter(|_| self.changed);
        self.vifs.values().filter_map(Handshake::due).chain(search).min()
    }

    /// Returns vifs that are online in xenstore and not served. Empty unless something changed
    /// since the last search, which was at least 100 ms ago.
    pub fn take_found<T: Tree>(
        &mut self,
        store: &mut T,
        now: Instant,
    ) -> Result<Vec<VifId>, Failure> {
        let mut found = Vec::new();
        if !self.changed || self.search_at.is_some_and(|at| now < at) {
            return Ok(found);
        }
        self.changed = false;
        self.search_at = Some(now + SEARCH_INTERVAL);
        for domain in store.list(VIFS)? {
            let Ok(domid) = domain.parse() else { continue };
            let devices = store.list(&format!("{VIFS}/{domain}"));
            for device in or_default(store, devices)? {
                let Ok(devid) = device.parse() else { continue };
                let id = VifId { domid, devid };
                if self.vifs.contains_key(&id) {
                    continue;
                }
                let wanted = super::keys::flag(store, &format!("{}/online", id.back()));
                if or_default(store, wanted)? {
                    found.push(id);
                }
            }
        }
        Ok(found)
    }

    /// Vifs that are finished and can be removed.
    pub fn finished(&self) -> Vec<VifId> {
        self.vifs.iter().filter(|(_, vif)| vif.is_finished()).map(|(id, _)| *id).collect()
    }
}

/// The result, or the default if the request was refused.
fn or_default<T: Tree, R: Default>(store: &T, got: Result<R, Failure>) -> Result<R, Failure> {
    if store.is_gone() { got } else { Ok(got.unwrap_or_default()) }
}

/// The vif of a token.
fn id_of(token: &str) -> Option<VifId> {
    let (domid, devid) = token.strip_prefix(['b', 'f'])?.split_once('/')?;
    Some(VifId { domid: domid.parse().ok()?, devid: devid.parse().ok()? })
}

#[cfg(test)]
mod tests;
