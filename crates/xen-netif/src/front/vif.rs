//! One vif's front end: follows its back end through the states of xenstore.
//!
//! [`Handshake::poll`] reads the current states of both directories and takes the steps that are
//! due; events only cause a poll.

use super::keys::{self, Agreed, FrontOptions};
use super::step::{Step, step};
use crate::back::{CtrlKeys, Failure, QueueKeys, State, Tree};

/// Token of the watch on the back end's state.
pub const BACK: &str = "back";
/// Token of the watches on keys that affect the carrier.
const LINK: &str = "link";
/// Maximum number of steps per poll: no regular sequence is longer, and a flapping back end causes
/// more polls.
const STEPS_MAX: usize = 8;

/// Rings as named in xenstore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// Keys of each queue.
    pub queues: Vec<QueueKeys>,
    /// Keys of the control ring.
    pub ctrl: Option<CtrlKeys>,
}

/// Creates a vif's rings.
pub trait Rings {
    /// Creates rings, grants and channels: all of them, or none with a reason.
    fn prepare(&mut self, agreed: &Agreed) -> Result<Named, Failure>;
    /// Ends the use of rings, if there are any. The back end may still have them mapped.
    fn stop(&mut self);
    /// Releases rings, if there are any: the back end has unmapped them.
    fn release(&mut self);
}

/// State of a vif.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Waiting for its back end.
    Waiting,
    /// The back end offers only this many queues, fewer than the minimum: no ring was created and
    /// no key written.
    Few(u16),
    /// Frames pass.
    Up,
    /// Closed on our request.
    Over,
    /// The vif does not exist any more.
    Gone,
}

/// One vif's state machine.
pub struct Handshake<R> {
    front: String,
    back: Option<String>,
    options: FrontOptions,
    rings: R,
    agreed: Option<Agreed>,
    carrier: bool,
    mtu: Option<u16>,
    leaving: bool,
}

impl<R: Rings> Handshake<R> {
    /// Creates the handshake of the vif in directory `front`.
    pub fn new(front: String, options: FrontOptions, rings: R) -> Self {
        let (back, agreed, mtu, leaving) = (None, None, None, false);
        Self { front, back, options, rings, agreed, carrier: true, mtu, leaving }
    }

    /// The creator of the rings.
    pub fn rings(&mut self) -> &mut R {
        &mut self.rings
    }

    /// Features of both ends, while there are rings.
    pub fn agreed(&self) -> Option<&Agreed> {
        self.agreed.as_ref()
    }

    /// Whether there is a carrier, as of the last poll: the back end does not deny it, and the
    /// toolstack has not disconnected us (`disconnect`, of XAPI).
    pub fn carrier(&self) -> bool {
        self.carrier
    }

    /// Maximum packet length after the Ethernet header, if the toolstack set it, as of the last
    /// poll.
    pub fn mtu(&self) -> Option<u16> {
        self.mtu
    }

    /// Registers all watches again at the next poll: xenstore is another connection.
    pub fn forget_watches(&mut self) {
        self.back = None;
    }

    /// Closes from the next poll on.
    pub fn leave(&mut self) {
        self.leaving = true;
    }

    /// Reads both states, and takes the steps that are due.
    ///
    /// # Errors
    /// [`Failure`]: xenstore has disconnected, or rings could not be created.
    pub fn poll<T: Tree>(&mut self, store: &mut T) -> Result<Status, Failure> {
        for _ in 0..STEPS_MAX {
            let ours = state(store, &self.front)?;
            let (back, online) = self.read_back(store)?;
            match step(ours, back, self.agreed.is_some(), online, self.leaving) {
                Step::Wait => return Ok(Status::Waiting),
                Step::Up => return Ok(Status::Up),
                Step::Over => return Ok(Status::Over),
                Step::Gone => {
                    self.release();
                    return Ok(Status::Gone);
                }
                Step::Connect => {
                    if let Some(has) = self.connect(store)? {
                        return Ok(Status::Few(has));
                    }
                }
                Step::Close => {
                    self.rings.stop();
                    self.write_state(store, State::Closing)?;
                }
                Step::Closed => {
                    // The next front end may not know this key, and would receive no multicast.
                    if self.agreed.is_some_and(|agreed| agreed.multicast) {
                        store.remove(&format!("{}/{}", self.front, keys::FILTER))?;
                    }
                    self.release();
                    self.write_state(store, State::Closed)?;
                }
                Step::Begin => {
                    self.release();
                    self.write_state(store, State::Initialising)?;
                }
            }
        }
        Ok(Status::Waiting)
    }

    /// Reads the back end's state, and whether the vif is online. Our directory names its
    /// directory, a new one after a migration.
    fn read_back<T: Tree>(&mut self, store: &mut T) -> Result<(State, bool), Failure> {
        let back = store.read(&format!("{}/backend", self.front))?;
        if back != self.back {
            let cut = format!("{}/disconnect", self.front);
            if let Some(old) = self.back.take() {
                store.unwatch(&format!("{old}/state"), BACK)?;
                store.unwatch(&format!("{old}/carrier"), LINK)?;
                store.unwatch(&cut, LINK)?;
            }
            if let Some(new) = &back {
                store.watch(&format!("{new}/state"), BACK)?;
                store.watch(&format!("{new}/carrier"), LINK)?;
                store.watch(&cut, LINK)?;
            }
            self.back = back;
        }
        let Some(back) = &self.back else { return Ok((State::Unknown, false)) };
        let carrier = keys::number(store, &format!("{back}/carrier"), 1)? != 0;
        let cut = keys::number(store, &format!("{}/disconnect", self.front), 0)? != 0;
        self.carrier = carrier && !cut;
        let mtu = keys::number(store, &format!("{}/mtu", self.front), 0)?;
        self.mtu = u16::try_from(mtu).ok().filter(|mtu| *mtu > 0);
        let online = store.read(&format!("{back}/online"))?;
        Ok((state(store, back)?, online.is_none_or(|online| online.trim() != "0")))
    }

    /// Connects. Returns the number of queues offered if it is too small.
    fn connect<T: Tree>(&mut self, store: &mut T) -> Result<Option<u16>, Failure> {
        let back = self.back.clone().unwrap_or_default();
        let Some(agreed) = Agreed::read(store, &self.front, &back, &self.options)? else {
            let text = format!("{back}/feature-rx-copy is not 1: page flipping is not supported");
            return Err(Failure(text));
        };
        if agreed.queues < self.options.fewest {
            return Ok(Some(agreed.queues));
        }
        let named = self.rings.prepare(&agreed)?;
        for key in keys::STALE {
            store.remove(&format!("{}/{key}", self.front))?;
        }
        store.remove(&format!("{}/multi-queue-num-queues", self.front))?;
        self.agreed = Some(agreed);
        let keys = keys::connected_keys(&agreed, &named.queues, named.ctrl.as_ref());
        store.write(&self.front, "backend", &keys)?;
        self.write_state(store, State::Connected)?;
        Ok(None)
    }

    fn release(&mut self) {
        self.rings.stop();
        self.rings.release();
        self.agreed = None;
    }

    /// Writes our state, if our directory still exists.
    fn write_state<T: Tree>(&self, store: &mut T, state: State) -> Result<(), Failure> {
        let key = ("state".to_string(), state.number().to_string());
        store.write(&self.front, "backend", &[key])?;
        Ok(())
    }
}

fn state<T: Tree>(store: &mut T, dir: &str) -> Result<State, Failure> {
    let value = store.read(&format!("{dir}/state"))?;
    Ok(value.and_then(|value| State::parse(&value)).unwrap_or(State::Unknown))
}

#[cfg(test)]
mod tests;
