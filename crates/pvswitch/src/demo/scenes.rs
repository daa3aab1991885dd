//! The scenes: each starts a stage, takes measurements for a while, and keeps the results.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use switch::poll::Policy;

use super::format::{bits, percent, plural, ratio, si, time_ns};
use super::measure::Change;
use super::stage::{NAMES, Role, Setting, Stage};
use super::view::{Picture, Row, View};
use super::{Fail, STEPS};

const ALICE: &str = NAMES[0];
const BOB: &str = NAMES[1];
const CAROL: &str = NAMES[2];
const DAVE: &str = NAMES[3];
/// Interval between measurements.
const TICK: Duration = Duration::from_millis(200);
/// Interval between checks for an interrupt.
const STOP_TICK: Duration = Duration::from_millis(20);
/// Time for new guests to become idle.
const SETTLE: Duration = Duration::from_millis(300);
/// The moderate load, in frames per second.
pub const MODERATE: u32 = 20_000;

/// Result of the idle scene.
pub struct Idle {
    /// Length of the measurement.
    pub span: Duration,
    /// Number of guests.
    pub guests: usize,
    /// CPU time of the switch.
    pub cpu_ns: u64,
    /// Wake-ups of the switch.
    pub wakeups: u64,
}

/// Result of a scene at full speed.
pub struct Flood {
    /// Frame size.
    pub size: u32,
    /// Frames delivered per second.
    pub rate: f64,
    /// Bits delivered per second.
    pub bits: f64,
    /// Fraction of the frames sent that were dropped.
    pub dropped: f64,
    /// Share of a core used by the switch.
    pub cpu: f64,
    /// Frames per notification, in either direction.
    pub frames_per_notice: f64,
}

/// Result of the request-and-response scene.
pub struct RoundTrips {
    /// Round trips per second.
    pub rate: f64,
    /// Latency in ns: p50, p99, p99.9.
    pub latency: [f64; 3],
    /// Share of a core used by the switch.
    pub cpu: f64,
}

/// Result of one poll policy, idle and under a moderate load.
pub struct PolicyRun {
    /// The policy.
    pub policy: Policy,
    /// Share of a core used by the idle switch.
    pub idle_cpu: f64,
    /// Share of a core used under load.
    pub cpu: f64,
    /// Wake-ups of the switch per second under load.
    pub wakeups: f64,
    /// Frames delivered per second.
    pub rate: f64,
    /// Latency from guest to guest in ns: p50, p99.
    pub latency: [f64; 2],
}

/// Result of the scene with hostile guests.
pub struct Hostile {
    /// Frame rate of the unaffected pair: before the faults, and after each of them.
    pub rates: Vec<(&'static str, f64)>,
    /// Frames received by that pair.
    pub frames: u64,
    /// Frames of that pair that were lost.
    pub lost: u64,
    /// Connections with invalid data, and how many of them the switch closed.
    pub invalid: (u32, u32),
    /// Frame rate of the other pair after its restart.
    pub restarted: f64,
}

/// Results of all scenes.
#[derive(Default)]
pub struct Results {
    /// Scene 1.
    pub idle: Option<Idle>,
    /// Scene 2.
    pub floods: Vec<Flood>,
    /// Scene 3.
    pub round_trips: Option<RoundTrips>,
    /// Scene 4.
    pub policies: Vec<PolicyRun>,
    /// Scene 5.
    pub hostile: Option<Hostile>,
    /// Scenes that failed, and why.
    pub failures: Vec<(String, String)>,
    /// Whether the demo was interrupted.
    pub interrupted: bool,
}

/// A running demo.
pub struct Demo<'a> {
    setting: &'a Setting,
    scene: Duration,
    stop: Arc<AtomicBool>,
    /// Output.
    pub view: View,
    /// Results so far.
    pub results: Results,
    picture: Picture,
    /// Completed steps.
    steps: u32,
}

impl<'a> Demo<'a> {
    /// Creates a demo; nothing is started yet.
    pub fn new(setting: &'a Setting, scene: Duration, stop: Arc<AtomicBool>, view: View) -> Self {
        Self {
            setting,
            scene,
            stop,
            view,
            results: Results::default(),
            picture: Picture::default(),
            steps: 0,
        }
    }

    /// Runs all scenes. A failure is recorded, and the next scene begins.
    pub fn play(&mut self) {
        type Scene<'a> = fn(&mut Demo<'a>) -> Result<(), Fail>;
        let scenes: [(&str, u32, Scene<'a>); 5] = [
            ("idle", 1, Self::idle),
            ("full speed", 2, Self::full_speed),
            ("request and response", 1, Self::round_trips),
            ("sleep or poll", 3, Self::policies),
            ("hostile guests", 1, Self::hostile),
        ];
        let mut due = 0;
        for (i, (name, steps, scene)) in scenes.iter().enumerate() {
            self.steps = due;
            due += steps;
            self.picture = Picture {
                scene: format!("scene {} of {}: {name}", i + 1, scenes.len()),
                ..Picture::default()
            };
            match scene(self) {
                Ok(()) => {}
                Err(Fail::Interrupted) => {
                    self.results.interrupted = true;
                    return;
                }
                Err(Fail::Failed(why)) => {
                    let first = why.lines().next().unwrap_or_default();
                    let short: String = first.chars().take(60).collect();
                    self.view.result(&format!("failed: {short}"));
                    self.results.failures.push((name.to_string(), why));
                }
            }
        }
    }

    fn begin(&mut self, about: [&str; 2]) {
        self.picture.about = about.map(String::from);
        self.picture.note = "starting processes".into();
        self.picture.histories.clear();
        self.progress(0.0);
        self.view.begin(&self.picture);
    }

    /// Updates the progress bar: `part` of the current step is done.
    fn progress(&mut self, part: f64) {
        let done = (f64::from(self.steps) + part.clamp(0.0, 1.0)) / f64::from(STEPS);
        // Each step takes a little longer than its scene, for processes to start and stop.
        let step = self.scene + Duration::from_millis(600);
        self.picture.done = done;
        self.picture.left = (step * STEPS).mul_f64((1.0 - done).max(0.0));
    }

    fn stage(
        &mut self,
        policy: Policy,
        ports: &[&'static str],
        roles: &[Role],
    ) -> Result<Stage<'a>, Fail> {
        let stop = Arc::clone(&self.stop);
        let stopped = move || stop.load(Ordering::Relaxed);
        let mut stage = Stage::new(self.setting, policy, ports, &stopped)?;
        stage.join(roles, &stopped)?;
        self.picture.note.clear();
        Ok(stage)
    }

    fn join(&self, stage: &mut Stage<'_>, roles: &[Role]) -> Result<(), Fail> {
        let stop = Arc::clone(&self.stop);
        stage.join(roles, &move || stop.load(Ordering::Relaxed))
    }

    /// Sleeps in steps short enough to react to an interrupt.
    fn sleep(&self, time: Duration) -> Result<(), Fail> {
        let end = Instant::now() + time;
        loop {
            if self.stop.load(Ordering::Relaxed) || self.view.broken {
                return Err(Fail::Interrupted);
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(STOP_TICK));
        }
    }

    /// Measures a stage for part of a scene. Unless `query` is set, the switch is not queried in
    /// between, because that would wake it.
    fn watch(
        &mut self,
        stage: &mut Stage<'_>,
        query: bool,
        parts: std::ops::Range<f64>,
    ) -> Result<Change, Fail> {
        let span = self.scene.mul_f64((parts.end - parts.start).max(0.0));
        stage.query()?;
        if !query {
            // Excludes the wake-ups of this query.
            self.sleep(Duration::from_millis(20))?;
        }
        let first = stage.snapshot();
        let mut last = first.clone();
        loop {
            let gone = first.at.elapsed();
            if gone >= span {
                break;
            }
            self.sleep(TICK.min(span - gone).min((span / 4).max(STOP_TICK)))?;
            stage.check()?;
            let mut now = stage.snapshot();
            if query {
                stage.query()?;
                now.at = Instant::now();
                now.ports = stage.snapshot().ports;
            }
            let part = ratio(first.at.elapsed().as_secs_f64(), self.scene.as_secs_f64());
            self.progress(parts.start + part);
            self.paint(stage, &Change::between(&last, &now));
            last = now;
        }
        let mut end = stage.snapshot();
        stage.query()?;
        let last = stage.snapshot();
        if query {
            end.at = last.at;
        }
        end.ports = last.ports;
        Ok(Change::between(&first, &end))
    }

    /// Draws the differences since the last measurement.
    fn paint(&mut self, stage: &Stage<'_>, change: &Change) {
        let row = |port: &&'static str| {
            let count = change.port(port);
            let role = stage.role(port);
            Row {
                port: (*port).into(),
                does: stage.does(port).into(),
                harmed: stage.fault(port).is_some(),
                sent: change.rate(count.sent),
                received: change.rate(count.received),
                bits: change.rate((count.sent_bytes + count.received_bytes) * 8),
                kicks: change.rate(count.kicks),
                calls: change.rate(count.calls),
                cpu: role.map(|_| change.guest_cpu(port)),
            }
        };
        let picture = &mut self.picture;
        picture.rows = stage.ports().iter().map(row).collect();
        picture.policy = stage.policy.to_string();
        picture.cpu = change.switch_cpu();
        picture.wakeups = change.rate(change.switch.wakeups);
        for pair in stage.ports().chunks(2) {
            let [from, to] = pair else { continue };
            let name = format!("{from} > {to}");
            let rate = change.rate(change.port(to).received);
            match picture.histories.iter_mut().find(|(n, _)| *n == name) {
                Some((_, history)) => history.push(rate),
                None => picture.histories.push((name, vec![rate])),
            }
        }
        // A guest in request mode reports the latency of its round trips.
        let requests = |port: &&&str| stage.role(port).is_some_and(|role| role.mode == "rr");
        let port = stage.ports().iter().find(requests);
        if let Some(report) = port.and_then(|port| stage.report(port)) {
            let [p50, p99] = ["p50", "p99"].map(|q| time_ns(latency(&report, q)));
            picture.note = format!("round trips so far: p50 {p50}, p99 {p99}");
        }
        self.view.update(picture);
    }

    // ---- the scenes ----

    fn idle(&mut self) -> Result<(), Fail> {
        self.begin([
            "Four guests are connected and idle. A switch that polls would use a whole",
            "core; this one sleeps. Measured from outside, so as not to wake it.",
        ]);
        let roles = NAMES.map(|port| Role::sink(port, "waits"));
        let mut stage = self.stage(Policy::ADAPTIVE, &NAMES, &roles)?;
        self.sleep(SETTLE)?;
        let change = self.watch(&mut stage, false, 0.0..1.0)?;
        let idle = Idle {
            span: change.span,
            guests: roles.len(),
            cpu_ns: change.switch.cpu_ns,
            wakeups: change.switch.wakeups,
        };
        let cpu = if idle.cpu_ns == 0 { "no".into() } else { time_ns(idle.cpu_ns as f64) + " of" };
        self.view.result(&format!(
            "idle: {} in {:.1} s, {cpu} CPU time",
            plural(idle.wakeups, "wake-up"),
            idle.span.as_secs_f64(),
        ));
        self.results.idle = Some(idle);
        stage.end()
    }

    fn full_speed(&mut self) -> Result<(), Fail> {
        for (step, size) in [60, 1514].into_iter().enumerate() {
            let about = match size {
                60 => "Alice sends minimum-size Ethernet frames as fast as she can; Bob receives",
                _ => "Now the largest standard frames: 1514 bytes. Bob receives",
            };
            self.begin([about, "them. Each is copied once, from her memory into his."]);
            let does = if size == 60 { "sends 60 B" } else { "sends 1514 B" };
            let send = sender(ALICE, BOB, size, None, does);
            let mut stage =
                self.stage(Policy::ADAPTIVE, &[ALICE, BOB], &[Role::sink(BOB, "receives")])?;
            self.join(&mut stage, &[send])?;
            self.sleep(SETTLE.min(self.scene / 4))?;
            let change = self.watch(&mut stage, true, 0.0..1.0)?;
            let flood = flood(size, &change);
            self.view.result(&format!(
                "{size:4} B: {} frames/s, {}, switch {} CPU",
                si(flood.rate),
                bits(flood.bits),
                percent(flood.cpu)
            ));
            self.results.floods.push(flood);
            stage.end()?;
            self.steps += u32::from(step == 0);
        }
        Ok(())
    }

    fn round_trips(&mut self) -> Result<(), Fail> {
        self.begin([
            "Alice sends a frame, Bob returns it, Alice sends the next: one at a time, so",
            "every delay shows. A round trip is two passes through the switch.",
        ]);
        let echo = Role { mode: "echo", ..Role::sink(BOB, "replies") };
        let ask = Role { mode: "rr", ..sender(ALICE, BOB, 60, None, "requests") };
        let mut stage = self.stage(Policy::ADAPTIVE, &[ALICE, BOB], &[echo])?;
        self.join(&mut stage, &[ask])?;
        let change = self.watch(&mut stage, true, 0.0..1.0)?;
        let report = stage.leave(ALICE)?;
        let trips = RoundTrips {
            rate: change.rate(change.port(ALICE).received),
            latency: ["p50", "p99", "p999"].map(|q| latency(&report, q)),
            cpu: change.switch_cpu(),
        };
        if trips.latency[0] <= 0.0 {
            return Err(String::from("no reply was received").into());
        }
        let [p50, p99, p999] = trips.latency.map(time_ns);
        let rate = si(trips.rate);
        self.view.result(&format!("{rate} round trips/s: p50 {p50}, p99 {p99}, p99.9 {p999}"));
        self.results.round_trips = Some(trips);
        stage.end()
    }

    fn policies(&mut self) -> Result<(), Fail> {
        for (policy, words) in [
            (Policy::Event, "sleeps whenever it is idle (--poll event)."),
            (Policy::ADAPTIVE, "polls, naps or sleeps, whichever costs least (--poll adaptive)."),
            (Policy::Spin, "never sleeps, like those of DPDK (--poll spin)."),
        ] {
            let load =
                format!("First idle, then {} frames per second. The switch", si(MODERATE.into()));
            self.begin([&load, words]);
            let run = self.policy(policy)?;
            let [p50, p99] = run.latency.map(time_ns);
            self.view.result(&format!(
                "{:8} CPU {} idle, {} loaded; p50 {p50}, p99 {p99}",
                policy.to_string(),
                percent(run.idle_cpu),
                percent(run.cpu)
            ));
            self.results.policies.push(run);
            self.steps += u32::from(policy != Policy::Spin);
        }
        Ok(())
    }

    fn policy(&mut self, policy: Policy) -> Result<PolicyRun, Fail> {
        // The guests are the same for all policies: they sleep when idle.
        let poll = Some(Policy::Event);
        let read = Role { poll, ..Role::sink(BOB, "receives") };
        let send = Role { poll, ..sender(ALICE, BOB, 60, Some(MODERATE), "sends 60 B, paced") };
        let mut stage = self.stage(policy, &[ALICE, BOB], &[read])?;
        self.sleep(SETTLE.min(self.scene / 4))?;
        let idle = self.watch(&mut stage, false, 0.0..0.25)?;
        self.join(&mut stage, &[send])?;
        let busy = self.watch(&mut stage, true, 0.25..1.0)?;
        stage.leave(ALICE)?;
        let report = stage.leave(BOB)?;
        stage.end()?;
        Ok(PolicyRun {
            policy,
            idle_cpu: idle.switch_cpu(),
            cpu: busy.switch_cpu(),
            wakeups: busy.rate(busy.switch.wakeups),
            rate: busy.rate(busy.port(BOB).received),
            latency: ["p50", "p99"].map(|q| latency(&report, q)),
        })
    }

    fn hostile(&mut self) -> Result<(), Fail> {
        self.begin([
            "Two pairs on one switch. Dave freezes, Carol is killed under traffic, then",
            "invalid data is sent to her socket. Alice and Bob must not be affected.",
        ]);
        let pace = Some(MODERATE / 2);
        let sinks = [Role::sink(BOB, "receives"), Role::sink(DAVE, "receives")];
        let carol = sender(CAROL, DAVE, 60, pace, "sends 60 B, paced");
        let senders = [sender(ALICE, BOB, 60, pace, "sends 60 B, paced"), carol];
        let mut stage = self.stage(Policy::ADAPTIVE, &NAMES, &sinks)?;
        self.join(&mut stage, &senders)?;
        let mut rates = Vec::new();
        let rate = |change: &Change, port| change.rate(change.port(port).received);
        self.picture.note = "no fault yet".into();
        let change = self.watch(&mut stage, true, 0.0..0.25)?;
        rates.push(("before", rate(&change, BOB)));

        self.picture.note = "Dave is frozen: he receives nothing".into();
        stage.freeze(DAVE);
        let change = self.watch(&mut stage, true, 0.25..0.45)?;
        rates.push(("while Dave is frozen", rate(&change, BOB)));

        self.picture.note = "Carol and Dave are killed (SIGKILL)".into();
        stage.kill(CAROL);
        stage.kill(DAVE);
        let change = self.watch(&mut stage, true, 0.45..0.6)?;
        rates.push(("after both are killed", rate(&change, BOB)));

        self.picture.note = "invalid data is sent to Carol's socket".into();
        let invalid = self.send_invalid(&stage)?;
        let change = self.watch(&mut stage, true, 0.6..0.75)?;
        rates.push(("after the invalid data", rate(&change, BOB)));

        self.picture.note = "Carol and Dave are restarted".into();
        self.join(&mut stage, &[Role::sink(DAVE, "receives")])?;
        self.join(&mut stage, &[carol])?;
        let change = self.watch(&mut stage, true, 0.75..1.0)?;
        rates.push(("after their restart", rate(&change, BOB)));
        let restarted = rate(&change, DAVE);
        stage.leave(ALICE)?;
        let report = stage.leave(BOB)?;
        let count = |key: &str| report[key].as_u64().unwrap_or(0);
        let hostile = Hostile {
            rates,
            frames: count("received_frames"),
            lost: count("lost_frames"),
            invalid,
            restarted,
        };
        let slowest = hostile.rates.iter().map(|r| r.1).fold(f64::INFINITY, f64::min);
        self.view.result(&format!(
            "faults: the other pair at {} frames/s or more, {} of {} lost",
            si(slowest),
            hostile.lost,
            si(hostile.frames as f64)
        ));
        self.results.hostile = Some(hostile);
        stage.end()
    }

    /// Sends data that is not valid vhost-user to a port's socket. Returns the number of
    /// connections, and how many of them the switch closed.
    fn send_invalid(&self, stage: &Stage<'_>) -> Result<(u32, u32), Fail> {
        // An unknown request, an excessive size, plain text, a truncated message.
        let message = |request: u32, size: u32| {
            [request.to_le_bytes(), 1_u32.to_le_bytes(), size.to_le_bytes()].concat()
        };
        let invalid = [
            [message(9999, 8), vec![0xff; 8]].concat(),
            message(1, u32::MAX),
            b"GET / HTTP/1.1\r\nHost: switch\r\n\r\n".to_vec(),
            message(5, 8)[..7].to_vec(),
        ];
        let (mut tried, mut ended) = (0, 0);
        for bytes in invalid {
            let mut stream = UnixStream::connect(stage.socket(CAROL))
                .map_err(|error| format!("{CAROL}'s socket: {error}"))?;
            // The write side is shut down, so that a truncated message is noticed.
            let _ = stream.write_all(&bytes);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
            tried += 1;
            let mut reply = Vec::new();
            let end = stream.take(4096).read_to_end(&mut reply);
            let timed_out = |e: &std::io::Error| e.kind() == std::io::ErrorKind::WouldBlock;
            ended += u32::from(!end.is_err_and(|e| timed_out(&e)));
            self.sleep(Duration::ZERO)?;
        }
        Ok((tried, ended))
    }
}

/// A guest that sends.
fn sender(
    port: &'static str,
    peer: &'static str,
    size: u32,
    rate: Option<u32>,
    does: &'static str,
) -> Role {
    Role { port, mode: "send", peer, size, rate, poll: None, does }
}

fn flood(size: u32, change: &Change) -> Flood {
    let (alice, bob) = (change.port(ALICE), change.port(BOB));
    let notices = alice.kicks + alice.calls + bob.kicks + bob.calls;
    Flood {
        size,
        rate: change.rate(bob.received),
        bits: change.rate(bob.received_bytes * 8),
        dropped: ratio((alice.drops + bob.drops) as f64, alice.sent as f64),
        cpu: change.switch_cpu(),
        frames_per_notice: ratio(bob.received as f64, notices.max(1) as f64),
    }
}

/// A latency in a generator's report, in ns.
fn latency(report: &Value, quantile: &str) -> f64 {
    report[format!("latency_ns_{quantile}")].as_f64().unwrap_or(0.0)
}
