//! `pvswitch top`: live view of a running switch. It uses only the control socket, so it works with
//! any switch, at a cost of two requests per interval.
//!
//! One thread sends requests, one reads keys, one waits for signals. The main thread owns the
//! terminal and draws what they send.

mod sample;
mod table;
mod trend;
mod view;

use std::io::{IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::Paragraph;

use crate::cli::TopArgs;
use crate::demo::format::plural;
use crate::{AnyError, Usage};
use api::control::{ControlError, default_path};
use sample::{Picture, Sample, picture};
use trend::Trends;
use view::Sort;

/// Minimum and maximum time between two samples, in seconds.
const INTERVAL_S: (f64, f64) = (0.1, 3600.0);
/// Width of `--once` without a terminal.
const PLAIN_WIDTH: usize = 120;
/// Minimum number of lines for the selected port's page beneath the list.
const LOWER_PANE_MIN: usize = 14;
/// Longest filter.
const FILTER_MAX: usize = 40;
/// Maximum share of the screen for workers.
const WORKERS_SHARE: usize = 3;

/// Runs `pvswitch top`.
pub fn command(args: TopArgs) -> Result<(), AnyError> {
    let (least, most) = INTERVAL_S;
    if !(least..=most).contains(&args.interval) {
        let error = format!("--interval {}: use {least} to {most} seconds", args.interval);
        return Err(Usage(error).into());
    }
    let interval = Duration::from_secs_f64(args.interval);
    let control = args.control.map_or_else(default_path, Ok)?;
    // A wrong path is an error at once; if the switch disconnects later, it is awaited.
    let first = Sample::take(&control)?;
    if args.once || !std::io::stdout().is_terminal() {
        return once(&control, first, interval);
    }
    live(control, first, interval)
}

fn once(control: &Path, first: Sample, interval: Duration) -> Result<(), AnyError> {
    std::thread::sleep(interval);
    let picture = picture(Some(&first), &Sample::take(control)?);
    let size = rustix::termios::tcgetwinsize(std::io::stdout()).ok();
    let width = size.map_or(0, |size| usize::from(size.ws_col));
    let text = view::plain(&picture, if width > 0 { width } else { PLAIN_WIDTH });
    match std::io::stdout().write_all(text.as_bytes()) {
        // The reader closed the pipe.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => Ok(result?),
    }
}

/// Events for the main thread.
enum News {
    Answer(Result<Sample, ControlError>),
    Terminal(Event),
    /// A signal, or the terminal was closed.
    End,
}

fn live(control: PathBuf, first: Sample, interval: Duration) -> Result<(), AnyError> {
    let (send, news) = channel();
    let mut signals = crate::signals::readable()?;
    let (keys, samples) = (send.clone(), send.clone());
    std::thread::spawn(move || {
        let _ = signals.read(&mut [0]);
        let _ = send.send(News::End);
    });
    // Restores the terminal also after a panic.
    let terminal = ratatui::try_init();
    let result = terminal.map_err(AnyError::from).and_then(|terminal| {
        std::thread::spawn(move || read_keys(&keys));
        std::thread::spawn(move || ask(&control, interval, &samples));
        let app = App { interval, last: Some(first), ..App::default() };
        app.run(terminal, &news)
    });
    ratatui::try_restore()?;
    result
}

fn read_keys(news: &Sender<News>) {
    while let Ok(event) = event::read() {
        if news.send(News::Terminal(event)).is_err() {
            return;
        }
    }
    let _ = news.send(News::End);
}

fn ask(control: &Path, interval: Duration, news: &Sender<News>) {
    let mut next = Instant::now();
    loop {
        // A slow reply delays the next request.
        next = (next + interval).max(Instant::now());
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        if news.send(News::Answer(Sample::take(control))).is_err() {
            return;
        }
    }
}

/// Page on the screen.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Page {
    #[default]
    Ports,
    /// Details of the selected port.
    Port,
    Help,
}

#[derive(Default)]
struct App {
    interval: Duration,
    last: Option<Sample>,
    picture: Picture,
    trends: Trends,
    /// Why the switch does not reply, and since when.
    unreachable: Option<(String, Instant)>,
    page: Page,
    sort: Sort,
    /// Whether the list includes the queues of all ports.
    queues: bool,
    /// Name of the selected port.
    selected: String,
    /// Lines of the list or page above the visible part.
    scroll: usize,
    /// Only ports with this in their line are shown.
    filter: String,
    /// Whether keys are letters of the filter.
    is_typing: bool,
    /// Visible lines of the list when last drawn.
    room: usize,
}

impl App {
    fn run(
        mut self,
        mut terminal: ratatui::DefaultTerminal,
        news: &Receiver<News>,
    ) -> Result<(), AnyError> {
        if let Some(first) = &self.last {
            self.picture = picture(None, first);
        }
        loop {
            terminal.draw(|frame| self.draw(frame))?;
            match news.recv()? {
                News::Answer(answer) => self.record(answer),
                News::Terminal(Event::Key(key)) if key.kind != KeyEventKind::Release => {
                    if !self.key(key) {
                        return Ok(());
                    }
                }
                // A new size is used in the next draw.
                News::Terminal(_) => {}
                News::End => return Ok(()),
            }
        }
    }

    fn record(&mut self, answer: Result<Sample, ControlError>) {
        match answer {
            Ok(sample) => {
                self.picture = picture(self.last.as_ref(), &sample);
                self.trends.add(&self.picture);
                self.last = Some(sample);
                self.unreachable = None;
            }
            Err(error) => {
                let since = self.unreachable.take().map_or_else(Instant::now, |(_, since)| since);
                self.unreachable = Some((error.to_string(), since));
            }
        }
    }

    // ---- keys ----

    /// Handles a key. Returns whether to continue.
    fn key(&mut self, key: KeyEvent) -> bool {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        let jump = self.room.max(1) as isize;
        match key.code {
            KeyCode::Char('c') if control => return false,
            code if self.is_typing => self.type_filter(code),
            KeyCode::Char('/') if self.page == Page::Ports => self.is_typing = true,
            KeyCode::Char('q') | KeyCode::Esc if self.page != Page::Ports => {
                self.open(Page::Ports);
            }
            KeyCode::Char('q') => return false,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('?' | 'h') if self.page == Page::Help => self.open(Page::Ports),
            KeyCode::Char('?' | 'h') => self.open(Page::Help),
            KeyCode::Enter if self.page == Page::Ports => self.open(Page::Port),
            KeyCode::Enter => self.open(Page::Ports),
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char('t') | KeyCode::Tab => self.queues = !self.queues,
            KeyCode::Up | KeyCode::Char('k') => self.step(-1),
            KeyCode::Down | KeyCode::Char('j') => self.step(1),
            KeyCode::PageUp => self.step(-jump),
            KeyCode::PageDown => self.step(jump),
            KeyCode::Home => self.step(isize::MIN),
            KeyCode::End => self.step(isize::MAX),
            _ => {}
        }
        true
    }

    /// Handles a key while the filter is typed.
    fn type_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Char(c) if self.filter.len() < FILTER_MAX => self.filter.push(c),
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Enter => self.is_typing = false,
            KeyCode::Esc => {
                self.filter.clear();
                self.is_typing = false;
            }
            _ => {}
        }
    }

    fn open(&mut self, page: Page) {
        self.page = page;
        self.scroll = 0;
    }

    /// Selects another port; on other pages, scrolls.
    fn step(&mut self, by: isize) {
        if self.page != Page::Ports {
            self.scroll = self.scroll.saturating_add_signed(by);
            return;
        }
        let ports = self.sorted();
        let at = ports.iter().position(|port| port.name == self.selected).unwrap_or(0);
        let to = at.saturating_add_signed(by).min(ports.len().saturating_sub(1));
        self.selected = ports.get(to).map_or_else(String::new, |port| port.name.clone());
    }

    fn sorted(&self) -> Vec<sample::Port> {
        let wanted = self.filter.to_lowercase();
        let mut ports = self.picture.ports.clone();
        ports.retain(|port| port.matches(&wanted));
        self.sort.apply(&mut ports);
        ports
    }

    // ---- drawing ----

    fn draw(&mut self, frame: &mut Frame<'_>) {
        let area = frame.area();
        let (width, height) = (usize::from(area.width), usize::from(area.height));
        let every = format!("every {} s", self.interval.as_secs_f64());
        let mut top = vec![view::title(&self.picture, width, &every), self.news(width)];
        if self.page != Page::Help {
            top.extend(view::workers(&self.picture, width, (height / WORKERS_SHARE).max(2)));
            top.push(Line::raw(""));
        }
        let body = self.body(width, height.saturating_sub(top.len() + 1), &mut top);
        top.extend(body);
        let rest = Rect { height: area.height.saturating_sub(1), ..area };
        let mut lines = Paragraph::new(top);
        if self.unreachable.is_some() {
            // The values are out of date.
            lines = lines.style(Style::new().add_modifier(Modifier::DIM));
        }
        frame.render_widget(lines, rest);
        let foot = Rect { y: area.bottom().saturating_sub(1), height: area.height.min(1), ..area };
        frame.render_widget(Paragraph::new(self.footer(width)), foot);
    }

    /// The second line: whether the switch replies.
    fn news(&self, width: usize) -> Line<'static> {
        let Some((error, since)) = &self.unreachable else { return Line::raw("") };
        let secs = since.elapsed().as_secs();
        let text = format!(" NO REPLY for {secs} s, retrying: {error}");
        let style = Style::new().fg(Color::Red).add_modifier(Modifier::REVERSED);
        Line::styled(table::cut(&text, width), style)
    }

    /// The lines between the workers and the footer; column heads are added to `top`.
    fn body(&mut self, width: usize, room: usize, top: &mut Vec<Line<'_>>) -> Vec<Line<'static>> {
        let ports = self.sorted();
        if !ports.iter().any(|port| port.name == self.selected) && self.page == Page::Ports {
            self.selected = ports.first().map_or_else(String::new, |port| port.name.clone());
        }
        let page = match self.page {
            Page::Help => view::help(),
            Page::Port => match ports.iter().find(|port| port.name == self.selected) {
                Some(port) => view::detail(port, width),
                None => vec![Line::raw(format!("Port {} was removed.", self.selected))],
            },
            Page::Ports => {
                let (heads, lines) = view::ports(&ports, width, self.queues, Some(&self.trends));
                let room = room.saturating_sub(heads.len());
                top.extend(heads);
                let mut lines = self.list(&ports, lines, room, width);
                lines.extend(self.lower_pane(&ports, width, room.saturating_sub(lines.len())));
                return lines;
            }
        };
        self.room = room;
        self.scroll = self.scroll.min(page.len().saturating_sub(room));
        page.into_iter().skip(self.scroll).take(room).collect()
    }

    /// The visible part of the list, with the selected port.
    fn list(
        &mut self,
        ports: &[sample::Port],
        mut lines: Vec<view::PortLine>,
        room: usize,
        width: usize,
    ) -> Vec<Line<'static>> {
        if ports.is_empty() {
            let why = match self.filter.is_empty() {
                true => "No ports: pvswitch ctl add-port NAME=KIND:ARG".into(),
                false => format!("No port has '{}' in its name, state or kind", self.filter),
            };
            return vec![Line::raw(why)];
        }
        let selected = ports.iter().position(|port| port.name == self.selected);
        let mine = |(port, _): &view::PortLine| Some(*port) == selected;
        let first = lines.iter().position(mine).unwrap_or(0);
        let last = lines.iter().rposition(mine).unwrap_or(0);
        if let Some((_, line)) = lines.get_mut(first) {
            // Colours of cells would make patches, and the row ends at its last cell.
            let text = format!("{:width$}", line.to_string());
            *line = Line::styled(text, Style::new().add_modifier(Modifier::REVERSED));
        }
        // The port's last line is shown if possible, its first line in any case.
        self.scroll = self.scroll.max((last + 1).saturating_sub(room)).min(first);
        self.scroll = self.scroll.min(lines.len().saturating_sub(room));
        self.room = room;
        lines.into_iter().map(|(_, line)| line).skip(self.scroll).take(room).collect()
    }

    /// The selected port's page below the list, if the screen has room for most of it.
    fn lower_pane(&self, ports: &[sample::Port], width: usize, room: usize) -> Vec<Line<'static>> {
        let selected = ports.iter().find(|port| port.name == self.selected);
        let Some(port) = selected.filter(|_| room >= LOWER_PANE_MIN) else { return Vec::new() };
        let blank = std::iter::once(Line::raw(""));
        blank.chain(view::detail(port, width)).take(room).collect()
    }

    /// Number of ports, and their order.
    fn count(&self) -> String {
        let all = plural(self.picture.ports.len() as u64, "port");
        let order = self.sort.name();
        match self.filter.is_empty() {
            true => format!("{all}, {order}"),
            false => format!("{} of {all} with '{}', {order}", self.sorted().len(), self.filter),
        }
    }

    /// The last line: the keys of the page, and the number of ports.
    fn footer(&self, width: usize) -> Line<'static> {
        let typed = format!("/{}_  Enter done  Esc all ports", self.filter);
        let keys = match self.page {
            _ if self.is_typing => &typed,
            Page::Ports => "q quit  j k choose  Enter port  t queues  s sort  / filter  ? help",
            Page::Port => "q back  j k scroll  ? help",
            Page::Help => "q back  j k scroll",
        };
        let right = if self.page == Page::Ports { self.count() } else { String::new() };
        let room = width.saturating_sub(right.len());
        let text = format!("{:room$}{right}", table::cut(keys, room.saturating_sub(1)));
        Line::styled(table::cut(&text, width), Style::new().add_modifier(Modifier::REVERSED))
    }
}

#[cfg(test)]
mod tests;
