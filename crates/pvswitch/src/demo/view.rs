//! Output while the demo runs: a screen redrawn in place, or lines for a log.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use super::format::{percent, plural, si};

/// Maximum line length, for an 80-column terminal.
pub const WIDTH: usize = 79;
/// Time between two lines about the same scene, without a terminal.
const LINE_EVERY: Duration = Duration::from_secs(1);

/// A port in the table.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// Port name.
    pub port: String,
    /// Description of its guest.
    pub does: String,
    /// Whether a fault was injected at it.
    pub harmed: bool,
    /// Frames per second from the guest.
    pub sent: f64,
    /// Frames per second to the guest.
    pub received: f64,
    /// Bits per second in both directions.
    pub bits: f64,
    /// Notifications per second from the guest.
    pub kicks: f64,
    /// Notifications per second to the guest.
    pub calls: f64,
    /// The guest's share of a core; `None`: there is no guest.
    pub cpu: Option<f64>,
}

/// Contents of the screen.
#[derive(Clone, Debug, Default)]
pub struct Picture {
    /// Scene number and name.
    pub scene: String,
    /// Description: lines of at most [`WIDTH`].
    pub about: [String; 2],
    /// Estimated time until the end of the demo.
    pub left: Duration,
    /// Completed part of the demo.
    pub done: f64,
    /// Ports.
    pub rows: Vec<Row>,
    /// The switch's policy.
    pub policy: String,
    /// The switch's share of a core.
    pub cpu: f64,
    /// The switch's wake-ups per second.
    pub wakeups: f64,
    /// Frames per second between pairs of guests, oldest first.
    pub histories: Vec<(String, Vec<f64>)>,
    /// The current event.
    pub note: String,
}

/// Output of the demo.
pub struct View {
    live: bool,
    utf8: bool,
    colour: bool,
    last_line: Option<Instant>,
    last_note: String,
    scene_started: Instant,
    /// Whether standard output was closed by its reader.
    pub broken: bool,
    /// Results shown.
    shown: Vec<String>,
}

impl View {
    /// Creates the view on standard output; `plain`: lines even on a terminal.
    pub fn new(plain: bool) -> Self {
        let env = |name: &str| std::env::var(name).unwrap_or_default();
        let live = !plain && std::io::stdout().is_terminal() && env("TERM") != "dumb";
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].map(env);
        let locale = locale.iter().find(|l| !l.is_empty()).map(|l| l.to_lowercase());
        let mut view = Self {
            live,
            utf8: live && locale.is_some_and(|l| l.contains("utf-8") || l.contains("utf8")),
            colour: live && env("NO_COLOR").is_empty(),
            last_line: None,
            last_note: String::new(),
            scene_started: Instant::now(),
            broken: false,
            shown: Vec::new(),
        };
        if live {
            // Alternate screen, no cursor, no wrapping of long lines.
            view.write("\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J");
        }
        view
    }

    /// Leaves the live screen.
    pub fn close(&mut self) {
        if std::mem::take(&mut self.live) {
            self.write("\x1b[?7h\x1b[?25h\x1b[?1049l");
        }
    }

    /// Writes `text` unchanged.
    pub fn write(&mut self, text: &str) {
        let mut out = std::io::stdout().lock();
        self.broken |= out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_err();
    }

    /// Returns `text` in a colour (an ANSI code), if colours are enabled.
    pub fn paint(&self, code: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.into() }
    }

    /// Shows the start of a scene.
    pub fn begin(&mut self, picture: &Picture) {
        self.scene_started = Instant::now();
        self.last_line = None;
        if self.live {
            self.draw(picture);
        } else {
            let [first, second] = &picture.about;
            self.write(&format!("\n{}\n  {first}\n  {second}\n", picture.scene));
        }
    }

    /// Shows the current state.
    pub fn update(&mut self, picture: &Picture) {
        if self.live {
            return self.draw(picture);
        }
        // A new event is shown at once; new figures after its colon are not.
        let note = picture.note.split(':').next().unwrap_or_default();
        let same = self.last_note == note;
        if same && self.last_line.is_some_and(|at| at.elapsed() < LINE_EVERY) {
            return;
        }
        self.last_line = Some(Instant::now());
        self.last_note = note.into();
        let line = line(picture, self.scene_started.elapsed());
        self.write(&line);
    }

    /// Shows a result.
    pub fn result(&mut self, text: &str) {
        if !self.live {
            self.write(&format!("  => {text}\n"));
        }
        self.shown.push(text.into());
    }

    fn draw(&mut self, picture: &Picture) {
        let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok();
        let height = size.map_or(24, |s| usize::from(s.ws_row)).max(1);
        let lines = self.screen(picture);
        // Cursor home, each line erased after its text, the rest of the screen erased.
        let mut text = String::from("\x1b[H");
        for (i, line) in lines.iter().take(height).enumerate() {
            text.push_str(if i == 0 { "" } else { "\r\n" });
            text.push_str(line);
            text.push_str("\x1b[0m\x1b[K");
        }
        text.push_str("\x1b[J");
        self.write(&text);
    }

    /// The live screen: at most 23 lines.
    fn screen(&self, p: &Picture) -> Vec<String> {
        let mut lines = vec![self.title(p), self.bar(p.done), String::new()];
        lines.extend(p.about.iter().map(|line| format!(" {line}")));
        lines.push(String::new());
        let head = format!(
            " {:6} {:19}{:>9}{:>9}{:>8}{:>9}{:>9}{:>8}",
            "PORT", "GUEST", "SENT/s", "RCVD/s", "BIT/s", "KICKS/s", "CALLS/s", "CPU"
        );
        lines.push(self.paint("2", &head));
        lines.extend(p.rows.iter().map(|row| self.row(row)));
        if !p.rows.is_empty() {
            lines.push(self.switch(p));
        }
        lines.push(String::new());
        lines.extend(p.histories.iter().map(|(name, history)| self.history(name, history)));
        lines.push(self.paint("33", &format!(" {}", p.note)));
        let show = 23_usize.saturating_sub(lines.len());
        let skip = self.shown.len().saturating_sub(show);
        for result in &self.shown[skip..] {
            let mark = if self.utf8 { "✓" } else { "*" };
            lines.push(format!(" {} {result}", self.paint("32", mark)));
        }
        lines
    }

    fn title(&self, p: &Picture) -> String {
        let left = p.left.as_secs_f64().ceil() as u64;
        let right = format!("{}:{:02} left, Ctrl-C stops", left / 60, left % 60);
        let name = format!(" pvswitch demo  {}", p.scene);
        let gap = WIDTH.saturating_sub(name.len() + right.len()).max(1);
        format!("{}{:gap$}{}", self.paint("1", &name), "", self.paint("2", &right))
    }

    fn bar(&self, done: f64) -> String {
        let width = WIDTH - 1;
        let full = ((done.clamp(0.0, 1.0)) * width as f64) as usize;
        let (on, off) = if self.utf8 { ("━", "─") } else { ("=", "-") };
        let rest = self.paint("2", &off.repeat(width - full));
        format!(" {}{rest}", self.paint("36", &on.repeat(full)))
    }

    fn row(&self, row: &Row) -> String {
        let cpu = row.cpu.map_or_else(|| "-".into(), percent);
        let text = format!(
            " {:6} {:19}{:>9}{:>9}{:>8}{:>9}{:>9}{:>8}",
            row.port,
            row.does,
            si(row.sent),
            si(row.received),
            si(row.bits),
            si(row.kicks),
            si(row.calls),
            cpu
        );
        match row.cpu {
            _ if row.harmed => self.paint("31", &text),
            None => self.paint("2", &text),
            Some(_) => text,
        }
    }

    fn switch(&self, p: &Picture) -> String {
        let wakes = format!("{} wake-ups/s", si(p.wakeups));
        let name = format!("poll {}", p.policy);
        let text = format!(" {:6} {name:27}{wakes:>36}{:>8}", "switch", percent(p.cpu));
        self.paint("1;36", &text)
    }

    fn history(&self, name: &str, history: &[f64]) -> String {
        let marks: Vec<char> =
            if self.utf8 { " ▁▂▃▄▅▆▇█".chars() } else { " .:-=+*#@".chars() }.collect();
        let most = history.iter().copied().fold(0.0, f64::max);
        let last = history.last().copied().unwrap_or(0.0);
        let skip = history.len().saturating_sub(44);
        let mark = |rate: &f64| {
            let part = super::format::ratio(*rate, most);
            marks[((part * 8.0).ceil() as usize).min(marks.len() - 1)]
        };
        let drawn: String = history[skip..].iter().map(mark).collect();
        format!(" {name:14}{} {} frames/s", self.paint("36", &format!("{drawn:44}")), si(last))
    }
}

impl Drop for View {
    fn drop(&mut self) {
        self.close();
    }
}

/// A line of the log.
fn line(p: &Picture, elapsed: Duration) -> String {
    let pairs = p.histories.iter().map(|(name, history)| {
        format!("{name} {} frames/s", si(history.last().copied().unwrap_or(0.0)))
    });
    let mut parts: Vec<String> = pairs.collect();
    parts.push(format!("switch {} CPU", percent(p.cpu)));
    parts.push(plural_rate(p.wakeups));
    let note = if p.note.is_empty() { String::new() } else { format!("          {}\n", p.note) };
    format!("{note}  {:4.1} s  {}\n", elapsed.as_secs_f64(), parts.join(", "))
}

fn plural_rate(wakeups: f64) -> String {
    if wakeups < 0.05 { plural(0, "wake-up") } else { format!("{} wake-ups/s", si(wakeups)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view() -> View {
        View {
            live: false,
            utf8: false,
            colour: false,
            last_line: None,
            last_note: String::new(),
            scene_started: Instant::now(),
            broken: false,
            shown: (0..20).map(|i| format!("{:76}", format!("result {i}"))).collect(),
        }
    }

    fn picture() -> Picture {
        let row = Row {
            port: "carol".into(),
            does: "x".repeat(19),
            harmed: false,
            sent: 123e6,
            received: 123e6,
            bits: 123e9,
            kicks: 123e3,
            calls: 123e3,
            cpu: Some(0.004),
        };
        Picture {
            scene: "scene 5 of 5: hostile guests".into(),
            about: ["x".repeat(78), "y".repeat(78)],
            rows: vec![row; 4],
            policy: "adaptive".into(),
            histories: vec![("alice > bob".into(), vec![5.0, f64::NAN, 0.0]); 2],
            ..Picture::default()
        }
    }

    #[test]
    fn the_screen_fits_80_columns_and_24_rows() {
        let lines = view().screen(&picture());
        assert!(lines.len() <= 23);
        for line in &lines {
            assert!(line.chars().count() <= WIDTH, "{line}");
            assert!(!line.contains("NaN"), "{line}");
        }
        assert!(lines.last().unwrap().contains("result 19"), "the newest results stay");
    }

    #[test]
    fn without_colour_no_escapes_are_written() {
        assert!(view().screen(&picture()).iter().all(|line| !line.contains('\x1b')));
        assert!(!line(&picture(), Duration::ZERO).contains('\x1b'));
    }
}
