//! Replies to `GET /v1/ports/{name}/why`: they compare counters that are some time apart, and the
//! client waits meanwhile.

use std::time::{Duration, Instant};

use api::http::Response;
use api::routes::Operation;
use api::{Problem, Request};
use serde_json::Value;

use super::{RunError, System};
use crate::why::{Seen, first_sample, reply};

/// Most clients that wait: each has a sample.
const WAITING_MAX: usize = 16;

/// A client's request, and the first sample.
pub(super) struct Why {
    name: String,
    before: Value,
    /// Time of the second sample.
    pub(super) at: Instant,
}

impl System {
    /// Takes the first sample.
    pub(super) fn begin_why(&self, name: &str, seconds: f64) -> Result<Why, Problem> {
        self.port(name).map_err(|error| error.problem())?;
        if self.clients.whys() >= WAITING_MAX {
            let what = format!("{WAITING_MAX} clients wait for this already");
            return Err(Problem::new(503, what, "try again in a few seconds"));
        }
        let before = first_sample(&self.stats(), name);
        let at = Instant::now() + Duration::from_secs_f64(seconds);
        Ok(Why { name: name.into(), before, at })
    }

    fn end_why(&self, why: &Why) -> Result<Value, RunError> {
        // It may have been removed in the meantime.
        self.port(&why.name)?;
        let (show, now, fdb) = (self.show(), self.stats(), self.fdb());
        Ok(reply(&Seen::new(&show, &why.before, &now, &fdb), &why.name))
    }

    /// Replies to clients whose time has come.
    pub(super) fn finish_whys(&mut self) {
        let now = Instant::now();
        while let Some((token, why)) = self.clients.take_why(now) {
            let response = match self.end_why(&why) {
                Ok(value) => {
                    let request = Request::Why { name: why.name, seconds: 0.0 };
                    Operation::of(&request).respond(&value)
                }
                Err(error) => {
                    let problem = error.problem();
                    self.clients.count_refusal(&problem);
                    Response::from(&problem)
                }
            };
            self.reply_later(token, &response);
        }
    }
}
