//! Xenstore and rings for tests: a tree in memory that records writes, and a plug that counts.

use std::collections::{BTreeMap, BTreeSet};

use super::keys::{Refused, Request};
use super::plug::RingPositions;
use super::tree::{Failure, Tree};
use super::vif::{Interface, Plug, Settings};

/// Xenstore in memory.
#[derive(Default)]
pub struct Fake {
    pub nodes: BTreeMap<String, String>,
    pub watches: BTreeSet<(String, String)>,
    /// States written to the back end's directory, in order.
    pub states: Vec<u32>,
    /// Keys of each transaction.
    pub transactions: Vec<Vec<String>>,
    /// Number of reads.
    pub reads: usize,
    /// Number of directories listed.
    pub lists: usize,
    /// Fails the operation after this many, and all later ones.
    pub fail_after: Option<usize>,
    /// Refuses all operations below this path.
    pub refuse: Option<String>,
    /// Removes this directory just before the next transaction.
    pub race: Option<String>,
}

impl Fake {
    pub fn set(&mut self, path: &str, value: &str) {
        self.nodes.insert(path.into(), value.into());
    }

    pub fn get(&self, path: &str) -> Option<&str> {
        self.nodes.get(path).map(String::as_str)
    }

    pub fn rm(&mut self, path: &str) {
        let below = format!("{path}/");
        self.nodes.retain(|p, _| p != path && !p.starts_with(&below));
    }

    /// Writes a vif's keys as a toolstack does.
    pub fn make_vif(&mut self, domid: u16, devid: u32) {
        let (back, front) = (back(domid, devid), front(domid, devid));
        for (key, value) in [
            ("frontend", front.as_str()),
            ("frontend-id", &domid.to_string()),
            ("online", "1"),
            ("state", "1"),
            ("mac", "00:16:3e:00:00:01"),
            ("handle", &devid.to_string()),
            ("hotplug-status", ""),
        ] {
            self.set(&format!("{back}/{key}"), value);
        }
        for (key, value) in [("backend-id", "0"), ("state", "1"), ("trusted", "1")] {
            self.set(&format!("{front}/{key}"), value);
        }
    }

    /// Writes keys as a front end with one queue and one channel does.
    pub fn name_rings(&mut self, front: &str) {
        for (key, value) in [
            ("tx-ring-ref", "8"),
            ("rx-ring-ref", "9"),
            ("event-channel", "5"),
            ("request-rx-copy", "1"),
            ("feature-rx-notify", "1"),
            ("feature-sg", "1"),
        ] {
            self.set(&format!("{front}/{key}"), value);
        }
    }

    fn operation(&mut self, path: &str) -> Result<(), Failure> {
        if self.refuse.as_ref().is_some_and(|refuse| path.starts_with(refuse)) {
            return Err(Failure(format!("{path}: over a quota")));
        }
        if let Some(left) = &mut self.fail_after {
            *left = left.saturating_sub(1);
            if *left == 0 {
                return Err(Failure("xenstore went away".into()));
            }
        }
        Ok(())
    }
}

pub fn back(domid: u16, devid: u32) -> String {
    format!("backend/vif/{domid}/{devid}")
}

pub fn front(domid: u16, devid: u32) -> String {
    format!("/local/domain/{domid}/device/vif/{devid}")
}

impl Tree for Fake {
    fn is_gone(&self) -> bool {
        self.fail_after == Some(0)
    }

    fn read(&mut self, path: &str) -> Result<Option<String>, Failure> {
        self.operation(path)?;
        self.reads += 1;
        Ok(self.nodes.get(path).cloned())
    }

    fn write(
        &mut self,
        dir: &str,
        anchor: &str,
        keys: &[(String, String)],
    ) -> Result<bool, Failure> {
        self.operation(dir)?;
        if let Some(dir) = self.race.take() {
            self.rm(&dir);
        }
        if !self.nodes.contains_key(&format!("{dir}/{anchor}")) {
            return Ok(false);
        }
        for (key, value) in keys {
            if key == "state" {
                self.states.push(value.parse().unwrap());
            }
            self.set(&format!("{dir}/{key}"), value);
        }
        self.transactions.push(keys.iter().map(|(key, _)| key.clone()).collect());
        Ok(true)
    }

    fn write_key(&mut self, path: &str, value: &str) -> Result<(), Failure> {
        self.operation(path)?;
        self.set(path, value);
        Ok(())
    }

    fn remove(&mut self, path: &str) -> Result<(), Failure> {
        self.operation(path)?;
        self.rm(path);
        Ok(())
    }

    fn list(&mut self, dir: &str) -> Result<Vec<String>, Failure> {
        self.operation(dir)?;
        self.lists += 1;
        let below = format!("{dir}/");
        let names = self.nodes.keys().filter_map(|p| p.strip_prefix(&below));
        let names: BTreeSet<_> = names.map(|p| p.split('/').next().unwrap().to_string()).collect();
        Ok(names.into_iter().collect())
    }

    fn watch(&mut self, path: &str, token: &str) -> Result<(), Failure> {
        self.operation(path)?;
        self.watches.insert((path.into(), token.into()));
        Ok(())
    }

    fn unwatch(&mut self, path: &str, token: &str) -> Result<(), Failure> {
        self.operation(path)?;
        self.watches.remove(&(path.into(), token.into()));
        Ok(())
    }
}

/// A plug that counts.
#[derive(Default)]
pub struct Counted {
    /// Number of queues and control rings held.
    pub held: usize,
    pub connects: usize,
    /// Settings set while rings were connected.
    pub settings: Vec<Settings>,
    /// Settings for the next rings, and those of the last rings at their start.
    pub next: Option<Settings>,
    pub began: Option<Settings>,
    pub refuses: Option<Refused>,
    /// Adopted rings, until they are resumed.
    pub adopted: usize,
    pub resumes: usize,
    /// How often rings of another process were given up.
    pub released: usize,
    pub claimed_by: Option<String>,
    /// `None`: it has no interface.
    pub interface: Option<Interface>,
}

impl Plug for Counted {
    fn claimed_by(&mut self) -> Option<String> {
        self.claimed_by.clone()
    }

    fn interface(&mut self) -> Interface {
        self.interface.clone().unwrap_or(Interface::None)
    }

    fn connect(&mut self, request: &Request) -> Result<(), Refused> {
        assert_eq!(self.held, 0, "rings are released before others are connected");
        self.connects += 1;
        if let Some(refused) = &self.refuses {
            return Err(refused.clone());
        }
        self.began = Some(self.next.take().expect("settings come before rings"));
        self.held = request.queues.len() + usize::from(request.ctrl.is_some());
        Ok(())
    }

    fn set(&mut self, settings: &Settings) {
        if self.held == 0 {
            self.next = Some(*settings);
        } else {
            self.settings.push(*settings);
        }
    }

    fn disconnect(&mut self) {
        (self.held, self.adopted) = (0, 0);
    }

    fn release_kept(&mut self) {
        self.released += 1;
    }

    fn adopt(&mut self, request: &Request) -> Result<(), Refused> {
        assert!(self.next.is_some(), "settings come before rings");
        if let Some(refused) = &self.refuses {
            return Err(refused.clone());
        }
        self.adopted = request.queues.len() + usize::from(request.ctrl.is_some());
        Ok(())
    }

    fn resume(&mut self, _: Option<&RingPositions>) -> Result<(), Refused> {
        assert!(self.adopted > 0);
        if let Some(refused) = &self.refuses {
            return Err(refused.clone());
        }
        self.resumes += 1;
        self.began = self.next.take();
        self.held = std::mem::take(&mut self.adopted);
        Ok(())
    }
}
