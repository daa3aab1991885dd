//! One vif's front end: follows its back end through the states of xenstore.
//!
//! [`Handshake::look`] reads what both directories say now and does what is due; events are hints
//! to look, no more.

use super::keys::{self, Agreed, Wishes};
use super::step::{Step, step};
use crate::back::{CtrlKeys, Failure, QueueKeys, State, Tree};

/// Token of the watch on the back end's state.
pub const BACK: &str = "back";
/// Token of the watches on what says whether there is a carrier.
const LINK: &str = "link";
/// Steps of one look: no chain of ours is longer, and a back end that flaps is looked at again.
const STEPS_MAX: usize = 8;

/// Rings as they are named in xenstore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// One for each queue.
    pub queues: Vec<QueueKeys>,
    /// The control ring.
    pub ctrl: Option<CtrlKeys>,
}

/// What makes a vif's rings.
pub trait Rings {
    /// Makes rings, grants them, and makes channels: all of them, or none and says why.
    fn prepare(&mut self, agreed: &Agreed) -> Result<Named, Failure>;
    /// Ends their use. The back end may still have them mapped. Also when there are none.
    fn stop(&mut self);
    /// Gives them back: the back end has let go. Also when there are none.
    fn release(&mut self);
}

/// How a vif is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Waiting for its back end.
    Waiting,
    /// It offers so many queues and no more, fewer than we can do with: no ring was made for it,
    /// and nothing written.
    Few(u16),
    /// Frames pass.
    Up,
    /// Closed, as we wanted.
    Over,
    /// It does not exist any more.
    Gone,
}

/// One vif's state machine.
pub struct Handshake<R> {
    front: String,
    back: Option<String>,
    wishes: Wishes,
    rings: R,
    agreed: Option<Agreed>,
    carrier: bool,
    mtu: Option<u16>,
    leaving: bool,
}

impl<R: Rings> Handshake<R> {
    /// For the vif whose own directory is `front`.
    pub fn new(front: String, wishes: Wishes, rings: R) -> Self {
        let (back, agreed, mtu, leaving) = (None, None, None, false);
        Self { front, back, wishes, rings, agreed, carrier: true, mtu, leaving }
    }

    /// What makes the rings.
    pub fn rings(&mut self) -> &mut R {
        &mut self.rings
    }

    /// What was agreed on, while there are rings.
    pub fn agreed(&self) -> Option<&Agreed> {
        self.agreed.as_ref()
    }

    /// Whether there is a carrier, as of the last look: the back end says so, or nothing, and the
    /// toolstack does not say that we are cut off (`disconnect`, of XAPI).
    pub fn carrier(&self) -> bool {
        self.carrier
    }

    /// Longest packet behind an Ethernet header that the toolstack set for this vif, if it did, as
    /// of the last look.
    pub fn mtu(&self) -> Option<u16> {
        self.mtu
    }

    /// Closes from the next look on.
    pub fn leave(&mut self) {
        self.leaving = true;
    }

    /// Reads both states, and does what is due.
    ///
    /// # Errors
    /// [`Failure`]: xenstore is gone, or rings could not be made.
    pub fn look<T: Tree>(&mut self, store: &mut T) -> Result<Status, Failure> {
        for _ in 0..STEPS_MAX {
            let ours = state(store, &self.front)?;
            let (back, online) = self.see_back(store)?;
            match step(ours, back, self.agreed.is_some(), online, self.leaving) {
                Step::Wait => return Ok(Status::Waiting),
                Step::Up => return Ok(Status::Up),
                Step::Over => return Ok(Status::Over),
                Step::Gone => {
                    self.give_back();
                    return Ok(Status::Gone);
                }
                Step::Connect => {
                    if let Some(has) = self.connect(store)? {
                        return Ok(Status::Few(has));
                    }
                }
                Step::Close => {
                    self.rings.stop();
                    self.say(store, State::Closing)?;
                }
                Step::Closed => {
                    // The next front end may not know of it, and would hear no multicast.
                    if self.agreed.is_some_and(|agreed| agreed.multicast) {
                        store.remove(&format!("{}/{}", self.front, keys::FILTER))?;
                    }
                    self.give_back();
                    self.say(store, State::Closed)?;
                }
                Step::Begin => {
                    self.give_back();
                    self.say(store, State::Initialising)?;
                }
            }
        }
        Ok(Status::Waiting)
    }

    /// The back end's state, and whether it is to be. Our directory names its, anew after a
    /// migration.
    fn see_back<T: Tree>(&mut self, store: &mut T) -> Result<(State, bool), Failure> {
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

    /// How many queues there are, if they are too few.
    fn connect<T: Tree>(&mut self, store: &mut T) -> Result<Option<u16>, Failure> {
        let back = self.back.clone().unwrap_or_default();
        let Some(agreed) = Agreed::read(store, &self.front, &back, &self.wishes)? else {
            let text = format!("{back}/feature-rx-copy is not 1: pages are not flipped any more");
            return Err(Failure(text));
        };
        if agreed.queues < self.wishes.fewest {
            return Ok(Some(agreed.queues));
        }
        let named = self.rings.prepare(&agreed)?;
        for key in keys::STALE {
            store.remove(&format!("{}/{key}", self.front))?;
        }
        store.remove(&format!("{}/multi-queue-num-queues", self.front))?;
        self.agreed = Some(agreed);
        let keys = keys::written(&agreed, &named.queues, named.ctrl.as_ref());
        store.write(&self.front, "backend", &keys)?;
        self.say(store, State::Connected)?;
        Ok(None)
    }

    fn give_back(&mut self) {
        self.rings.stop();
        self.rings.release();
        self.agreed = None;
    }

    /// Writes our state, if our directory is still there.
    fn say<T: Tree>(&self, store: &mut T, state: State) -> Result<(), Failure> {
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
