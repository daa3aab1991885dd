//! The HTTP thread's access to the control thread.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Sender;

use api::{Problem, Request};
use serde_json::Value;
use shm::sync::{Lock, Mutex};
use tokio::sync::oneshot;

/// A request to the control thread.
pub struct Query {
    /// The request.
    pub request: Request,
    /// Channel for the reply.
    pub reply: oneshot::Sender<Result<Value, Problem>>,
}

/// Sends requests to the control thread.
pub struct Control {
    sender: Mutex<Sender<Query>>,
    wake: Arc<OwnedFd>,
}

impl Control {
    /// Queries go to `sender`; `wake`, an eventfd, is signalled for each.
    pub fn new(sender: Sender<Query>, wake: Arc<OwnedFd>) -> Self {
        Self { sender: Mutex::new(Lock::HttpQueries, sender), wake }
    }

    /// Forwards a request, which only reads, and returns what `ctl --json` prints. `None`: the
    /// switch is shutting down.
    pub async fn call(&self, request: Request) -> Option<Value> {
        let (reply, received) = oneshot::channel();
        {
            let sender = self.sender.lock();
            sender.send(Query { request, reply }).ok()?;
        }
        os::signal(self.wake.as_fd());
        let mut reply = received.await.ok()?.ok()?;
        reply["ok"] = true.into();
        Some(reply)
    }
}
