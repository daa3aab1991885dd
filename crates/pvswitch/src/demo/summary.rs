//! What was seen, in words. Every figure is of this very run.

use std::fmt::Write;

use super::format::{bits, percent, plural, ratio, si, time_ns};
use super::scenes::{Flood, Hostile, MODERATE, PolicyRun, Results};
use super::stage::Setting;
use super::view::View;
use super::{CORES_TO_POLL, Machine};
use crate::hints;
use crate::spec::{Kind, PortSpec};

/// Longest line of running text.
const WIDTH: usize = 78;

/// The summary.
pub fn text(results: &Results, machine: &Machine, setting: &Setting, view: &View) -> String {
    let mut out = String::new();
    let mut chapter = |name: &str, body: String| {
        if !body.is_empty() {
            let _ = write!(out, "\n{}\n{body}", view.paint("1", name));
        }
    };
    chapter("Idle", wrap(&idle(results)));
    chapter("Full speed", full_speed(&results.floods));
    chapter("Request and response", wrap(&round_trips(results)));
    chapter("Sleep or poll", policies(&results.policies));
    chapter("Guests that misbehave", results.hostile.as_ref().map_or_else(String::new, hostile));
    for (name, why) in &results.failures {
        chapter(&view.paint("31", &format!("Failed: {name}")), format!("  {why}\n"));
    }
    let title =
        if results.interrupted { "Stopped. What was seen until then" } else { "What was seen" };
    let nothing = results.idle.is_none() && results.failures.is_empty();
    let seen = if nothing { "\n  Nothing yet.\n".into() } else { out };
    let mut text = format!("\n{}\n{seen}", view.paint("1;36", title));
    if !nothing {
        let _ = write!(text, "\n{}\n{}", view.paint("1", "This machine"), this(machine, setting));
    }
    if !results.interrupted {
        let _ = write!(text, "\n{}\n{}", view.paint("1;36", "What next"), next());
    }
    text
}

fn idle(results: &Results) -> String {
    let Some(idle) = &results.idle else { return String::new() };
    let guests = plural(idle.guests as u64, "connected guest");
    let wakes = match idle.wakeups {
        0 => "never woke".into(),
        1 => "woke once".into(),
        n => format!("woke {n} times"),
    };
    let cpu = match idle.cpu_ns {
        0 => "used no CPU time at all".into(),
        ns => format!("used {} of CPU time", time_ns(ns as f64)),
    };
    format!(
        "With {guests} and nothing to do, the switch {wakes} in {:.1} s and {cpu}. All its \
         threads are counted, by the kernel.",
        idle.span.as_secs_f64()
    )
}

fn full_speed(floods: &[Flood]) -> String {
    let mut text = String::new();
    for flood in floods {
        let mut words = format!(
            "{} B: {} frames/s, {}, each frame copied once from guest to guest. The switch took \
             {} of a core, and {} frames moved for each notification.",
            flood.size,
            si(flood.rate),
            bits(flood.bits),
            percent(flood.cpu),
            si(flood.frames_per_notice.max(1.0)),
        );
        if flood.dropped > 0.0 {
            let part = percent(flood.dropped);
            let _ = write!(words, " {part} of the frames sent found the receiver too slow.");
        }
        text += &wrap(&words);
    }
    text
}

fn round_trips(results: &Results) -> String {
    let Some(trips) = &results.round_trips else { return String::new() };
    let [p50, p99, p999] = trips.latency.map(time_ns);
    format!(
        "{} round trips a second, one at a time. Half took less than {p50}, 99 of 100 less than \
         {p99}, 999 of 1000 less than {p999}: twice through the switch, and both guests. The \
         switch took {} of a core.",
        si(trips.rate),
        percent(trips.cpu)
    )
}

fn policies(runs: &[PolicyRun]) -> String {
    if runs.is_empty() {
        return String::new();
    }
    let mut text = format!(
        "  {:9}{:>10}{:>10}{:>12}{:>12}{:>10}{:>10}\n",
        "--poll", "CPU idle", "CPU busy", "wake-ups/s", "frames/s", "p50", "p99"
    );
    for run in runs {
        let [p50, p99] = run.latency.map(time_ns);
        let _ = writeln!(
            text,
            "  {:9}{:>10}{:>10}{:>12}{:>12}{p50:>10}{p99:>10}",
            run.policy.to_string(),
            percent(run.idle_cpu),
            percent(run.cpu),
            si(run.wakeups),
            si(run.rate)
        );
    }
    text + &wrap(&verdict(runs))
}

/// The table above in words, whichever way it came out.
fn verdict(runs: &[PolicyRun]) -> String {
    let least = |key: fn(&PolicyRun) -> f64| runs.iter().min_by(|a, b| key(a).total_cmp(&key(b)));
    let (Some(cpu), Some(p50), Some(p99)) =
        (least(|r| r.cpu), least(|r| r.latency[0]), least(|r| r.latency[1]))
    else {
        return String::new();
    };
    let mut words = format!(
        "At {} frames/s offered: least CPU with {}, lowest median latency with {}, lowest p99 with \
         {}.",
        si(MODERATE.into()),
        cpu.policy,
        p50.policy,
        p99.policy
    );
    let named = |name: &str| runs.iter().find(|run| run.policy.to_string() == name);
    if let (Some(adaptive), Some(spin)) = (named("adaptive"), named("spin")) {
        let _ = write!(
            words,
            " The default, adaptive, took {} of a core idle and {} busy, where spin took {} and \
             {}; its median latency was {:.1} times that of spin.",
            percent(adaptive.idle_cpu),
            percent(adaptive.cpu),
            percent(spin.idle_cpu),
            percent(spin.cpu),
            ratio(adaptive.latency[0], spin.latency[0]),
        );
    }
    words
}

fn hostile(seen: &Hostile) -> String {
    let mut text =
        String::from("  What Bob received from Alice, in frames/s, while it happened:\n");
    for (when, rate) in &seen.rates {
        let _ = writeln!(text, "    {when:24}{:>9}", si(*rate));
    }
    let (said, ended) = seen.nonsense;
    let lost = match seen.lost {
        0 => "none was lost".into(),
        n => format!("{n} were lost"),
    };
    let nonsense = match ended {
        n if n == said => "all of which the switch hung up on".into(),
        n => format!("{n} of which the switch hung up on"),
    };
    let back = match seen.back {
        rate if rate > 0.0 => {
            format!("New guests took the dead ones' ports at once ({} frames/s)", si(rate))
        }
        _ => "New guests at the dead ones' ports received nothing".into(),
    };
    let words = format!(
        "Of {} frames between those two {lost}. There were {said} connections with nonsense, \
         {nonsense}. {back}. It was the same switch process all along.",
        si(seen.frames as f64)
    );
    text + &wrap(&words)
}

/// What the machine means for the figures.
fn this(machine: &Machine, setting: &Setting) -> String {
    let cores = machine.cores();
    let mut words = format!("{} for the demo: ", plural(cores as u64, "core"));
    words += match &setting.cpus {
        None => "switch and guests took turns on it.",
        Some(_) if cores < 3 => {
            "one for the switch, and one that all guests took turns on. With a core for each \
             guest the figures will differ."
        }
        Some(_) => "one for the switch, the others for the guests.",
    };
    if cores < CORES_TO_POLL {
        words += " Guests slept whenever they had nothing to do, so latencies contain their \
                  wake-ups too.";
    }
    if machine.is_busy() {
        let _ = write!(
            words,
            " Other programs were at work (load {:.1} when it began): expect better figures on \
             an idle machine, p99 above all.",
            machine.load
        );
    }
    wrap(&words)
}

/// The commands for guests of one's own.
fn next() -> String {
    let exe = program();
    let ports = ["vm1", "vm2"].map(|name| format!("{name}=vhost-user:/tmp/{name}.sock"));
    let qemu = match ports[0].parse::<PortSpec>() {
        Ok(PortSpec { name, kind: Kind::VhostUser(conf), .. }) => hints::qemu(&name, &conf),
        _ => String::new(),
    };
    format!(
        "  Two virtual machines on one switch:\n\n\
         \x20 {exe} run --port {} \\\n      --port {}\n\n\
         \x20 It prints what to add for each guest; for vm1 and QEMU, this:\n\n{qemu}\n\
         \x20 While it runs, in another terminal:\n\n\
         \x20 {exe} ctl stats\n",
        ports[0], ports[1]
    )
}

/// How to call this program: as it was called, if that was by path.
fn program() -> String {
    let exe = std::env::current_exe().unwrap_or_default();
    let short = std::env::current_dir()
        .ok()
        .and_then(|dir| exe.strip_prefix(dir).ok().map(|rest| format!("./{}", rest.display())));
    short.unwrap_or_else(|| "pvswitch".into())
}

/// Breaks running text into indented lines.
fn wrap(text: &str) -> String {
    let mut out = String::new();
    let mut line = String::new();
    // A number stays with its unit.
    for word in glue(text) {
        if !line.is_empty() && line.len() + word.len() + 3 > WIDTH {
            let _ = writeln!(out, "  {line}");
            line.clear();
        }
        line += if line.is_empty() { "" } else { " " };
        line += &word;
    }
    if !line.is_empty() {
        let _ = writeln!(out, "  {line}");
    }
    out
}

fn glue(text: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        let unit = word.trim_end_matches([',', '.', ';', ':', ')']);
        let is_unit = ["%", "B", "k", "M", "G", "ns", "us", "ms", "s"].contains(&unit);
        match words.last_mut() {
            Some(number) if is_unit => {
                number.push(' ');
                number.push_str(word);
            }
            _ => words.push(word.into()),
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use switch::poll::Policy;

    use super::*;

    #[test]
    fn lines_break_between_words_and_never_before_a_unit() {
        let text = wrap(&format!("{} 12 us. And on it goes from here", "x".repeat(70)));
        assert!(text.lines().all(|line| line.len() <= WIDTH && line.starts_with("  ")));
        assert_eq!(text.lines().nth(1), Some("  12 us. And on it goes from here"));
        assert_eq!(wrap(""), "");
    }

    fn run(policy: Policy, cpu: f64, p50: f64) -> PolicyRun {
        PolicyRun { policy, idle_cpu: 0.0, cpu, wakeups: 0.0, rate: 0.0, latency: [p50, 2.0 * p50] }
    }

    #[test]
    fn the_verdict_follows_the_figures() {
        let runs = [
            run(Policy::Event, 0.2, 30e3),
            run(Policy::ADAPTIVE, 0.3, 20e3),
            run(Policy::Spin, 1.0, 10e3),
        ];
        let words = verdict(&runs);
        assert!(words.contains("least CPU with event, lowest median latency with spin"), "{words}");
        assert!(words.contains("2.0 times"), "{words}");
        let words = verdict(&[run(Policy::ADAPTIVE, 0.3, 0.0), run(Policy::Spin, 1.0, 0.0)]);
        assert!(!words.contains("NaN") && !words.contains("inf"), "{words}");
    }
}
