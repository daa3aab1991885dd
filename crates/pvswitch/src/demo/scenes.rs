//! The scenes: each starts a stage, looks at it for a while, and keeps what it saw.

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
/// How often the demo looks.
const TICK: Duration = Duration::from_millis(200);
/// How often it looks whether it is to stop.
const STOP_TICK: Duration = Duration::from_millis(20);
/// For guests that have just come to come to rest.
const SETTLE: Duration = Duration::from_millis(300);
/// The moderate load, in frames a second.
pub const MODERATE: u32 = 20_000;

/// Nothing moves.
pub struct Idle {
    /// For how long.
    pub span: Duration,
    /// How many guests.
    pub guests: usize,
    /// What the switch used.
    pub cpu_ns: u64,
    /// How often it woke.
    pub wakeups: u64,
}

/// As much as goes.
pub struct Flood {
    /// Frame size.
    pub size: u32,
    /// Frames delivered a second.
    pub rate: f64,
    /// Bits of those.
    pub bits: f64,
    /// Part of the frames sent that was dropped.
    pub dropped: f64,
    /// Share of a core the switch took.
    pub cpu: f64,
    /// Frames for each notification, in either direction.
    pub frames_per_notice: f64,
}

/// One at a time.
pub struct RoundTrips {
    /// Round trips a second.
    pub rate: f64,
    /// Latency in ns: p50, p99, p99.9.
    pub latency: [f64; 3],
    /// Share of a core the switch took.
    pub cpu: f64,
}

/// One poll policy, idle and under a moderate load.
pub struct PolicyRun {
    /// Which.
    pub policy: Policy,
    /// Share of a core the idle switch took.
    pub idle_cpu: f64,
    /// The same under load.
    pub cpu: f64,
    /// Its wake-ups a second under load.
    pub wakeups: f64,
    /// Frames delivered a second.
    pub rate: f64,
    /// Latency from guest to guest in ns: p50, p99.
    pub latency: [f64; 2],
}

/// A guest misbehaves.
pub struct Hostile {
    /// Rate of the pair that has nothing to do with it: before, and while each thing happens.
    pub rates: Vec<(&'static str, f64)>,
    /// Frames of that pair, and how many of them were lost.
    pub frames: u64,
    /// See `frames`.
    pub lost: u64,
    /// Connections with nonsense, and how many of them the switch ended.
    pub nonsense: (u32, u32),
    /// Frames a second of the other pair when it was back.
    pub back: f64,
}

/// All that was seen.
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
    /// It was stopped before its end.
    pub interrupted: bool,
}

/// The demo on its way.
pub struct Demo<'a> {
    setting: &'a Setting,
    scene: Duration,
    stop: Arc<AtomicBool>,
    /// What is seen.
    pub view: View,
    /// What was seen.
    pub results: Results,
    picture: Picture,
    /// Steps done.
    steps: u32,
}

impl<'a> Demo<'a> {
    /// Nothing is started yet.
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

    /// All scenes. One that fails is noted, and the next begins.
    pub fn play(&mut self) {
        type Scene<'a> = fn(&mut Demo<'a>) -> Result<(), Fail>;
        let scenes: [(&str, u32, Scene<'a>); 5] = [
            ("idle", 1, Self::idle),
            ("full speed", 2, Self::full_speed),
            ("request and response", 1, Self::round_trips),
            ("sleep or poll", 3, Self::policies),
            ("guests that misbehave", 1, Self::hostile),
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

    /// The clock: `part` of the current step is over.
    fn progress(&mut self, part: f64) {
        let done = (f64::from(self.steps) + part.clamp(0.0, 1.0)) / f64::from(STEPS);
        // Each step takes a little longer than its scene: processes start and end.
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

    /// Sleeps, in pieces short enough to stop when asked to.
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

    /// Watches a stage for part of a scene; returns what happened from its start to its end. With
    /// `ask` off, the switch is not asked for its counters on the way: it would wake.
    fn watch(
        &mut self,
        stage: &mut Stage<'_>,
        ask: bool,
        parts: std::ops::Range<f64>,
    ) -> Result<Change, Fail> {
        let span = self.scene.mul_f64((parts.end - parts.start).max(0.0));
        stage.ask()?;
        if !ask {
            // The answer's own wake-ups are not to be seen.
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
            if ask {
                stage.ask()?;
                now.at = Instant::now();
                now.ports = stage.snapshot().ports;
            }
            let part = ratio(first.at.elapsed().as_secs_f64(), self.scene.as_secs_f64());
            self.progress(parts.start + part);
            self.paint(stage, &Change::between(&last, &now));
            last = now;
        }
        let mut end = stage.snapshot();
        stage.ask()?;
        let asked = stage.snapshot();
        if ask {
            end.at = asked.at;
        }
        end.ports = asked.ports;
        Ok(Change::between(&first, &end))
    }

    /// Draws what happened since the last look.
    fn paint(&mut self, stage: &Stage<'_>, change: &Change) {
        let row = |port: &&'static str| {
            let count = change.port(port);
            let role = stage.role(port);
            Row {
                port: (*port).into(),
                does: stage.does(port).into(),
                harmed: stage.harm(port).is_some(),
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
        // One that asks knows how long it waits for answers.
        let asks = |port: &&&str| stage.role(port).is_some_and(|role| role.mode == "rr");
        if let Some(told) = stage.ports().iter().find(asks).and_then(|port| stage.report(port)) {
            let [p50, p99] = ["p50", "p99"].map(|q| time_ns(latency(&told, q)));
            picture.note = format!("round trips so far: p50 {p50}, p99 {p99}");
        }
        self.view.update(picture);
    }

    // ---- the scenes ----

    fn idle(&mut self) -> Result<(), Fail> {
        self.begin([
            "Four guests are connected and nothing moves. A switch that polls would burn",
            "a core now; this one sleeps. Seen from outside, so as not to wake it.",
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
                60 => "Alice sends the smallest frames Ethernet has, as fast as she can; Bob reads",
                _ => "Now the largest ordinary ones: 1514 bytes. Bob reads",
            };
            self.begin([about, "each. One copy, from her memory into his."]);
            let does = if size == 60 { "sends 60 B" } else { "sends 1514 B" };
            let send = sender(ALICE, BOB, size, None, does);
            let mut stage =
                self.stage(Policy::ADAPTIVE, &[ALICE, BOB], &[Role::sink(BOB, "reads")])?;
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
            "Alice asks, Bob answers, Alice asks again: one frame at a time, so every",
            "delay on the way shows. There and back is two passes through the switch.",
        ]);
        let echo = Role { mode: "echo", ..Role::sink(BOB, "answers") };
        let ask = Role { mode: "rr", ..sender(ALICE, BOB, 60, None, "asks") };
        let mut stage = self.stage(Policy::ADAPTIVE, &[ALICE, BOB], &[echo])?;
        self.join(&mut stage, &[ask])?;
        let change = self.watch(&mut stage, true, 0.0..1.0)?;
        let told = stage.leave(ALICE)?;
        let trips = RoundTrips {
            rate: change.rate(change.port(ALICE).received),
            latency: ["p50", "p99", "p999"].map(|q| latency(&told, q)),
            cpu: change.switch_cpu(),
        };
        if trips.latency[0] <= 0.0 {
            return Err(String::from("no answer came back").into());
        }
        let [p50, p99, p999] = trips.latency.map(time_ns);
        let rate = si(trips.rate);
        self.view.result(&format!("{rate} round trips/s: p50 {p50}, p99 {p99}, p99.9 {p999}"));
        self.results.round_trips = Some(trips);
        stage.end()
    }

    fn policies(&mut self) -> Result<(), Fail> {
        for (policy, words) in [
            (Policy::Event, "sleeps whenever it finds nothing to do (--poll event)."),
            (Policy::ADAPTIVE, "polls, naps or sleeps, whichever costs least (--poll adaptive)."),
            (Policy::Spin, "never sleeps, as DPDK's do (--poll spin)."),
        ] {
            let load =
                format!("First nothing, then {} frames a second. The switch", si(MODERATE.into()));
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
        // The guests are the same for all: they sleep when they have nothing to do.
        let poll = Some(Policy::Event);
        let read = Role { poll, ..Role::sink(BOB, "reads") };
        let send = Role { poll, ..sender(ALICE, BOB, 60, Some(MODERATE), "sends 60 B, paced") };
        let mut stage = self.stage(policy, &[ALICE, BOB], &[read])?;
        self.sleep(SETTLE.min(self.scene / 4))?;
        let idle = self.watch(&mut stage, false, 0.0..0.25)?;
        self.join(&mut stage, &[send])?;
        let busy = self.watch(&mut stage, true, 0.25..1.0)?;
        stage.leave(ALICE)?;
        let told = stage.leave(BOB)?;
        stage.end()?;
        Ok(PolicyRun {
            policy,
            idle_cpu: idle.switch_cpu(),
            cpu: busy.switch_cpu(),
            wakeups: busy.rate(busy.switch.wakeups),
            rate: busy.rate(busy.port(BOB).received),
            latency: ["p50", "p99"].map(|q| latency(&told, q)),
        })
    }

    fn hostile(&mut self) -> Result<(), Fail> {
        self.begin([
            "Two pairs on one switch. Dave freezes, Carol is killed in mid-traffic, then",
            "somebody talks nonsense on her socket. Alice and Bob should not notice.",
        ]);
        let pace = Some(MODERATE / 2);
        let sinks = [Role::sink(BOB, "reads"), Role::sink(DAVE, "reads")];
        let carol = sender(CAROL, DAVE, 60, pace, "sends 60 B, paced");
        let senders = [sender(ALICE, BOB, 60, pace, "sends 60 B, paced"), carol];
        let mut stage = self.stage(Policy::ADAPTIVE, &NAMES, &sinks)?;
        self.join(&mut stage, &senders)?;
        let mut rates = Vec::new();
        let rate = |change: &Change, port| change.rate(change.port(port).received);
        self.picture.note = "all is well".into();
        let change = self.watch(&mut stage, true, 0.0..0.25)?;
        rates.push(("before", rate(&change, BOB)));

        self.picture.note = "Dave is frozen: he takes nothing any more".into();
        stage.freeze(DAVE);
        let change = self.watch(&mut stage, true, 0.25..0.45)?;
        rates.push(("while Dave is frozen", rate(&change, BOB)));

        self.picture.note = "Carol and Dave are killed (SIGKILL)".into();
        stage.kill(CAROL);
        stage.kill(DAVE);
        let change = self.watch(&mut stage, true, 0.45..0.6)?;
        rates.push(("after both are killed", rate(&change, BOB)));

        self.picture.note = "nonsense arrives on Carol's socket".into();
        let nonsense = self.nonsense(&stage)?;
        let change = self.watch(&mut stage, true, 0.6..0.75)?;
        rates.push(("after the nonsense", rate(&change, BOB)));

        self.picture.note = "Carol and Dave are back, in new processes".into();
        self.join(&mut stage, &[Role::sink(DAVE, "reads")])?;
        self.join(&mut stage, &[carol])?;
        let change = self.watch(&mut stage, true, 0.75..1.0)?;
        rates.push(("with both back", rate(&change, BOB)));
        let back = rate(&change, DAVE);
        stage.leave(ALICE)?;
        let told = stage.leave(BOB)?;
        let count = |key: &str| told[key].as_u64().unwrap_or(0);
        let hostile = Hostile {
            rates,
            frames: count("received_frames"),
            lost: count("lost_frames"),
            nonsense,
            back,
        };
        let slowest = hostile.rates.iter().map(|r| r.1).fold(f64::INFINITY, f64::min);
        self.view.result(&format!(
            "crash: the other pair never below {} frames/s, {} of {} lost",
            si(slowest),
            hostile.lost,
            si(hostile.frames as f64)
        ));
        self.results.hostile = Some(hostile);
        stage.end()
    }

    /// Says things on a port's socket that are no vhost-user; returns how many, and to how many
    /// the switch answered by ending the connection.
    fn nonsense(&self, stage: &Stage<'_>) -> Result<(u32, u32), Fail> {
        // An unknown request, a size beyond all bounds, plain text, half a header.
        let message = |request: u32, size: u32| {
            [request.to_le_bytes(), 1_u32.to_le_bytes(), size.to_le_bytes()].concat()
        };
        let said = [
            [message(9999, 8), vec![0xff; 8]].concat(),
            message(1, u32::MAX),
            b"GET / HTTP/1.1\r\nHost: switch\r\n\r\n".to_vec(),
            message(5, 8)[..7].to_vec(),
        ];
        let (mut tried, mut ended) = (0, 0);
        for bytes in said {
            let mut stream = UnixStream::connect(stage.socket(CAROL))
                .map_err(|error| format!("{CAROL}'s socket: {error}"))?;
            // What is under way shows when nothing more comes.
            let _ = stream.write_all(&bytes);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
            tried += 1;
            let mut answer = Vec::new();
            let end = stream.take(4096).read_to_end(&mut answer);
            let waited = |e: &std::io::Error| e.kind() == std::io::ErrorKind::WouldBlock;
            ended += u32::from(!end.is_err_and(|e| waited(&e)));
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

/// A latency of a generator's report, in ns.
fn latency(told: &Value, quantile: &str) -> f64 {
    told[format!("latency_ns_{quantile}")].as_f64().unwrap_or(0.0)
}
