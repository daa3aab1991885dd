//! What the page shows: the switch's state, and rates of the last ten minutes.
//!
//! The switch is sampled only while a page is open, once for all pages: an idle switch makes no
//! system call, so nothing is recorded while nobody looks. The samples remain until the next page
//! is opened.

use std::sync::Arc;
use std::time::Duration;

use api::Request;
use shm::sync::{Lock, Mutex, MutexGuard};
use tokio::time::Instant;

use super::control::Control;
use super::history::History;

/// Time between two samples.
const EVERY: Duration = Duration::from_secs(2);
/// Time between the first two: a new page has its first rates soon.
const FIRST: Duration = Duration::from_millis(500);
/// Time after the last request until sampling ends.
const UNWATCHED: Duration = Duration::from_secs(5);

/// Samples the switch while pages are open.
pub struct Live {
    control: Arc<Control>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    history: History,
    /// Time of the last request.
    asked: Option<Instant>,
    is_sampling: bool,
}

impl Live {
    /// Samples are taken through `control`.
    pub fn new(control: Arc<Control>) -> Arc<Self> {
        Arc::new(Self { control, state: Mutex::new(Lock::HttpHistory, State::default()) })
    }

    /// The present state, and the samples after `since`, a time of the switch's clock in seconds.
    /// `None`: the switch is shutting down.
    pub async fn reply(self: &Arc<Self>, since: f64) -> Option<String> {
        let (begins, is_empty) = {
            let mut state = self.lock();
            state.asked = Some(Instant::now());
            let begins = !std::mem::replace(&mut state.is_sampling, true);
            (begins, state.history.is_empty())
        };
        if begins {
            let first = self.sample().await;
            tokio::spawn(Arc::clone(self).watch());
            first?;
        } else if is_empty {
            // The first sample of another page is under way.
            self.sample().await?;
        }
        Some(format!("{}\n", self.lock().history.reply(since)))
    }

    /// Takes samples until no page is open.
    async fn watch(self: Arc<Self>) {
        let mut pause = FIRST;
        loop {
            tokio::time::sleep(pause).await;
            pause = EVERY;
            {
                let mut state = self.lock();
                if state.asked.is_none_or(|asked| asked.elapsed() > UNWATCHED) {
                    state.is_sampling = false;
                    return;
                }
            }
            if self.sample().await.is_none() {
                return;
            }
        }
    }

    async fn sample(&self) -> Option<()> {
        let show = self.control.call(Request::Show).await?;
        let stats = self.control.call(Request::Stats).await?;
        let events = self.control.call(Request::LastEvents).await?;
        self.lock().history.add(show, stats, events["events"].clone());
        Some(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}
