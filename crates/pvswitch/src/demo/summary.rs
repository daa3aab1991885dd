//! The summary of a demo. All figures are from this run.

use std::fmt::Write;
use std::path::Path;

use api::control::SYSTEM_DIR;

use super::format::{bits, percent, plural, ratio, si, time_ns};
use super::scenes::{Flood, Hostile, MODERATE, PolicyRun, Results};
use super::stage::Setting;
use super::view::View;
use super::{CORES_TO_POLL, Machine};
use crate::hints;
use crate::spec::{Kind, PortSpec};

/// Maximum length of running text.
const WIDTH: usize = 78;

/// Writes the summary.
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
    chapter("Hostile guests", results.hostile.as_ref().map_or_else(String::new, hostile));
    for (name, why) in &results.failures {
        chapter(&view.paint("31", &format!("Failed: {name}")), format!("  {why}\n"));
    }
    let title = if results.interrupted { "Interrupted. Results so far" } else { "Results" };
    let empty = results.idle.is_none() && results.failures.is_empty();
    let body = if empty { "\n  None yet.\n".into() } else { out };
    let mut text = format!("\n{}\n{body}", view.paint("1;36", title));
    if !empty {
        let _ = write!(text, "\n{}\n{}", view.paint("1", "This machine"), this(machine, setting));
    }
    if !results.interrupted {
        let _ = write!(text, "\n{}\n{}", view.paint("1;36", "Next steps"), next());
    }
    text
}

fn idle(results: &Results) -> String {
    let Some(idle) = &results.idle else { return String::new() };
    let guests = plural(idle.guests as u64, "connected guest");
    let wakes = match idle.wakeups {
        0 => "did not wake".into(),
        1 => "woke once".into(),
        n => format!("woke {n} times"),
    };
    let cpu = match idle.cpu_ns {
        0 => "used no CPU time".into(),
        ns => format!("used {} of CPU time", time_ns(ns as f64)),
    };
    format!(
        "With {guests} and no traffic, the switch {wakes} in {:.1} s and {cpu}: all its \
         threads, as counted by the kernel.",
        idle.span.as_secs_f64()
    )
}

fn full_speed(floods: &[Flood]) -> String {
    let mut text = String::new();
    for flood in floods {
        let mut words = format!(
            "{} B: {} frames/s, {}, each copied once from guest to guest. The switch used \
             {} of a core; there were {} frames per notification.",
            flood.size,
            si(flood.rate),
            bits(flood.bits),
            percent(flood.cpu),
            si(flood.frames_per_notice.max(1.0)),
        );
        if flood.dropped > 0.0 {
            let part = percent(flood.dropped);
            let _ = write!(words, " {part} of the frames were dropped: the receiver was too slow.");
        }
        text += &wrap(&words);
    }
    text
}

fn round_trips(results: &Results) -> String {
    let Some(trips) = &results.round_trips else { return String::new() };
    let [p50, p99, p999] = trips.latency.map(time_ns);
    format!(
        "{} round trips per second, one at a time. Latency: p50 {p50}, p99 {p99}, p99.9 \
         {p999}, for two passes through the switch and both guests. The switch used {} \
         of a core.",
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

/// Describes the table in words.
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
            " The default, adaptive, used {} of a core idle and {} busy, spin {} and \
             {}; the median latency of adaptive was {:.1} times that of spin.",
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
        String::from("  Frames that Bob received from Alice, in frames/s, while it happened:\n");
    for (when, rate) in &seen.rates {
        let _ = writeln!(text, "    {when:24}{:>9}", si(*rate));
    }
    let (sent, closed) = seen.invalid;
    let lost = match seen.lost {
        0 => "none were lost".into(),
        n => format!("{n} were lost"),
    };
    let closed = match closed {
        n if n == sent => "all closed by the switch".into(),
        n => format!("{n} closed by the switch"),
    };
    let restarted = match seen.restarted {
        rate if rate > 0.0 => {
            format!("New guests on the ports of the killed ones received {} frames/s", si(rate))
        }
        _ => "New guests on the ports of the killed ones received nothing".into(),
    };
    let words = format!(
        "Of {} frames between those two, {lost}. There were {sent} connections with invalid \
         data, {closed}. {restarted}. The switch process ran throughout.",
        si(seen.frames as f64)
    );
    text + &wrap(&words)
}

/// The machine's effect on the figures.
fn this(machine: &Machine, setting: &Setting) -> String {
    let cores = machine.cores();
    let mut words = format!("{} for the demo: ", plural(cores as u64, "core"));
    words += match &setting.cpus {
        None => "switch and guests shared it.",
        Some(_) if cores < 3 => {
            "one for the switch, one shared by all guests. With a core for each \
             guest the figures will differ."
        }
        Some(_) => "one for the switch, the others for the guests.",
    };
    if cores < CORES_TO_POLL {
        words += " Guests slept when idle, so latencies include their \
                  wake-ups.";
    }
    if machine.is_busy() {
        let _ = write!(
            words,
            " Other programs were running (load {:.1} at the start): expect better figures on \
             an idle machine, above all for p99.",
            machine.load
        );
    }
    wrap(&words)
}

/// Commands to attach virtual machines.
fn next() -> String {
    let exe = program();
    // The directory of this user's switch: nobody else can make a socket in it.
    let control = api::control::default_path().ok();
    let dir = control.as_deref().and_then(Path::parent).unwrap_or(Path::new(SYSTEM_DIR)).display();
    let ports = ["vm1", "vm2"].map(|name| format!("{name}=vhost-user:{dir}/{name}.sock"));
    let qemu = match ports[0].parse::<PortSpec>() {
        Ok(PortSpec { name, kind: Kind::VhostUser(conf), .. }) => hints::qemu(&name, &conf),
        _ => String::new(),
    };
    format!(
        "  To connect two virtual machines:\n\n\
         \x20 {exe} run --port {} \\\n      --port {}\n\n\
         \x20 It prints the options for each guest; for vm1 and QEMU:\n\n{qemu}\n\
         \x20 In another terminal, while it runs:\n\n\
         \x20 {exe} ctl stats\n",
        ports[0], ports[1]
    )
}

/// The command that runs this program: relative to the current directory if it is below it.
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
    // A number is not separated from its unit.
    for word in unbreakable_words(text) {
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

/// Splits `text` at white space, except between a number and its unit.
fn unbreakable_words(text: &str) -> Vec<String> {
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
    fn verdict_follows_from_the_figures() {
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
