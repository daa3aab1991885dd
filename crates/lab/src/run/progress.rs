//! Progress of a study: a bar on a terminal, lines elsewhere.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Reports runs as they finish.
pub struct Progress {
    bar: Option<ProgressBar>,
    /// Estimated seconds of all runs, of finished ones, and of the current one.
    all_s: f64,
    over_s: f64,
    this_s: f64,
    begin: Instant,
    this_begin: Instant,
    number: usize,
    count: usize,
    what: String,
}

impl Progress {
    /// For `count` runs that take `all_s` seconds together.
    pub fn new(count: usize, all_s: f64, on_terminal: bool) -> Self {
        let bar = on_terminal.then(|| {
            let bar = ProgressBar::new(1000);
            let style = ProgressStyle::with_template("{bar:30} {wide_msg}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        let (begin, what) = (Instant::now(), String::new());
        let this_begin = begin;
        Self { bar, all_s, over_s: 0.0, this_s: 0.0, begin, this_begin, number: 0, count, what }
    }

    /// Records the start of a run with its estimated seconds.
    pub fn begin(&mut self, what: String, expected_s: f64) {
        self.number += 1;
        self.what = what;
        self.this_s = expected_s;
        self.this_begin = Instant::now();
        self.tick();
    }

    /// Updates the bar.
    pub fn tick(&self) {
        let Some(bar) = &self.bar else { return };
        bar.set_position((1000.0 * self.part()) as u64);
        // What is cut off in a narrow window comes last.
        let (number, count) = (self.number, self.count);
        bar.set_message(format!("{number}/{count}, {} left: {}", self.left(), self.what));
    }

    /// Records the end of a run.
    pub fn end(&mut self, outcome: &str) {
        self.pass();
        let line = format!("{}/{} {}: {outcome}", self.number, self.count, self.what);
        if self.bar.is_some() {
            self.say(&line);
            self.tick();
        } else {
            eprintln!("{line}; {} left", self.left());
        }
    }

    /// Counts the run as done, without a line.
    pub fn pass(&mut self) {
        self.over_s += self.this_s;
        self.this_s = 0.0;
    }

    /// Prints a message.
    pub fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{line}")),
            None => eprintln!("{line}"),
        }
    }

    /// Removes the bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn part(&self) -> f64 {
        let now = self.this_begin.elapsed().as_secs_f64().min(self.this_s);
        if self.all_s > 0.0 { ((self.over_s + now) / self.all_s).min(1.0) } else { 1.0 }
    }

    /// Estimates the time left: the remaining runs deviate from estimates like the finished ones.
    fn left(&self) -> String {
        let taken = self.begin.elapsed().as_secs_f64();
        let part = self.part();
        let guess = self.all_s * (1.0 - part);
        // Weighs the estimate against measured times, which dominate towards the end.
        let seen = if part > 0.0 { taken / part * (1.0 - part) } else { guess };
        length(part.sqrt() * seen + (1.0 - part.sqrt()) * guess)
    }
}

/// Formats a duration.
pub fn length(seconds: f64) -> String {
    let whole = Duration::try_from_secs_f64(seconds.max(0.0)).map_or(u64::MAX, |d| d.as_secs());
    match whole {
        0..100 => format!("{whole} s"),
        100..6000 => format!("{} min", whole.div_ceil(60)),
        6000..172_800 => format!("{} h {:02} min", whole / 3600, whole / 60 % 60),
        _ => format!("{} days", whole / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths() {
        let lengths = [0.4, 99.0, 100.0, 5999.0, 6000.0, 172_800.0, -1.0].map(length);
        assert_eq!(lengths, ["0 s", "99 s", "2 min", "100 min", "1 h 40 min", "2 days", "0 s"]);
        assert!(length(f64::INFINITY).ends_with("days"));
    }

    #[test]
    fn no_time_is_left_after_all_runs() {
        let mut progress = Progress::new(2, 20.0, false);
        assert_eq!(progress.left(), "20 s");
        progress.begin("a".into(), 10.0);
        progress.end("done");
        progress.begin("b".into(), 10.0);
        progress.end("done");
        assert_eq!(progress.left(), "0 s");
    }
}
