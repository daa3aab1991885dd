//! The live screen, drawn into memory.

use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::sample::tests::sample;
use super::*;

fn app(ports: usize, queues: usize) -> App {
    App {
        interval: Duration::from_secs(1),
        picture: picture(Some(&sample(1, 10, ports, queues)), &sample(1, 11, ports, queues)),
        ..App::default()
    }
}

fn screen(app: &mut App, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| app.draw(frame)).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let row = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..height).map(|y| row(y).trim_end().to_string()).collect()
}

fn press(app: &mut App, code: KeyCode) -> bool {
    app.key(KeyEvent::new(code, KeyModifiers::NONE))
}

#[test]
fn main_columns_fit_80_columns_and_24_rows() {
    let mut app = app(3, 1);
    let text = screen(&mut app, 80, 24).join("\n");
    for want in
        ["WORKER", "42%", "50%", " HELD ", "a-long-name-015", "1.23M", "1.50k no_room +1", "q quit"]
    {
        assert!(text.contains(want), "{want} is not in:\n{text}");
    }
    press(&mut app, KeyCode::Char('t'));
    let text = screen(&mut app, 80, 24).join("\n");
    for want in ["cold", "warm", "hot", "25%", "12.3us", "1.50ms", "1.23k"] {
        assert!(text.contains(want), "{want}:\n{text}");
    }
}

#[test]
fn selected_port_stays_on_the_screen() {
    let mut app = app(40, 2);
    for queues in [false, true] {
        app.queues = queues;
        for key in [KeyCode::End, KeyCode::Up, KeyCode::PageUp, KeyCode::Home, KeyCode::PageDown] {
            press(&mut app, key);
            let lines = screen(&mut app, 80, 24);
            assert!(lines.iter().any(|l| l.starts_with(&app.selected)), "{key:?} {lines:?}");
        }
    }
    press(&mut app, KeyCode::End);
    assert_eq!(app.selected, "vm39");
}

/// Issue 16, row 7: one colour over the whole width, and no empty half of a large screen.
#[test]
fn the_selected_row_is_whole_and_its_port_fills_a_large_screen() {
    let mut app = app(3, 1);
    press(&mut app, KeyCode::Down);
    let mut terminal = Terminal::new(TestBackend::new(160, 50)).unwrap();
    terminal.draw(|frame| app.draw(frame)).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let starts = |y: u16| (0..4).map(|x| buffer[(x, y)].symbol()).collect::<String>() == "vm1 ";
    let row = (0..50).find(|y| starts(*y)).expect("its row");
    let style = buffer[(0, row)].style();
    assert!(style.add_modifier.contains(Modifier::REVERSED));
    assert!((0..160).all(|x| buffer[(x, row)].style() == style), "patches");
    let text = screen(&mut app, 160, 50).join("\n");
    assert!(text.contains("Port vm1") && text.contains("From the guest"), "{text}");
    let text = screen(&mut app, 80, 24).join("\n");
    assert!(!text.contains("From the guest"), "no room: {text}");
}

#[test]
fn every_page_survives_every_size() {
    for (ports, queues) in [(0, 0), (1, 1), (40, 16)] {
        let mut app = app(ports, queues);
        app.unreachable = Some(("error".into(), Instant::now()));
        for (width, height) in [(1, 1), (2, 3), (20, 5), (80, 24), (300, 100)] {
            for page in [Page::Ports, Page::Port, Page::Help] {
                app.open(page);
                app.queues = !app.queues;
                screen(&mut app, width, height);
                press(&mut app, KeyCode::End);
                screen(&mut app, width, height);
            }
        }
    }
}

#[test]
fn missing_replies_are_reported_until_one_arrives() {
    let mut app = app(2, 1);
    app.record(Err(ControlError::missing("no switch")));
    let text = screen(&mut app, 80, 24).join("\n");
    assert!(text.contains("NO REPLY for 0 s, retrying: no switch"), "{text}");
    assert!(text.contains("vm1"), "the last sample stays: {text}");
    app.record(Ok(sample(2, 1, 1, 1)));
    let text = screen(&mut app, 80, 24).join("\n");
    assert!(!text.contains("NO REPLY") && !text.contains("vm1"), "{text}");
}

/// Traffic in two samples, then none.
fn with_history(ports: usize) -> App {
    let mut app = App { interval: Duration::from_secs(1), ..App::default() };
    for secs in 10..14 {
        app.record(Ok(sample(1, secs, ports, 1)));
    }
    app
}

#[test]
fn history_is_shown_where_there_is_room() {
    let mut app = with_history(2);
    let text = screen(&mut app, 160, 30).join("\n");
    assert!(text.contains(" HISTORY KIND") && text.contains("███ vhost-user:/run"), "{text}");
    let text = screen(&mut app, 80, 24).join("\n");
    assert!(!text.contains("HISTORY") && text.contains("no_room"), "{text}");
}

#[test]
fn filter_shows_only_ports_with_the_text() {
    let mut app = with_history(40);
    let keys = |app: &mut App, keys: &str| {
        keys.chars().for_each(|key| assert!(press(app, KeyCode::Char(key))));
    };
    keys(&mut app, "/vm3q");
    assert!(screen(&mut app, 80, 24)[23].starts_with("/vm3q_  Enter done"), "q does not quit");
    press(&mut app, KeyCode::Backspace);
    let lines = screen(&mut app, 80, 24);
    assert!(lines[23].ends_with("11 of 40 ports with 'vm3', as added"), "{}", lines[23]);
    let shown = lines.iter().filter(|line| line.starts_with("vm")).count();
    assert_eq!((shown, app.selected.as_str()), (11, "vm3"));
    press(&mut app, KeyCode::Enter);
    keys(&mut app, "j");
    assert_eq!(app.selected, "vm30");
    keys(&mut app, "/x");
    let text = screen(&mut app, 80, 24).join("\n");
    assert!(text.contains("No port has 'vm3x' in its name, state or kind"), "{text}");
    press(&mut app, KeyCode::Esc);
    assert!(screen(&mut app, 80, 24)[23].ends_with("40 ports, as added"));
    keys(&mut app, "/DOWN");
    press(&mut app, KeyCode::Enter);
    assert!(screen(&mut app, 80, 24)[23].ends_with("10 of 40 ports with 'DOWN', as added"));
    press(&mut app, KeyCode::Esc);
    assert!(app.filter.is_empty() && !app.is_typing);
    let one = screen(&mut with_history(1), 80, 24);
    assert!(one[23].ends_with("1 port, as added"), "{}", one[23]);
}

#[test]
fn red_is_for_losses_and_faults_only() {
    let mut app = with_history(3);
    let mut terminal = Terminal::new(TestBackend::new(120, 24)).unwrap();
    press(&mut app, KeyCode::Down);
    terminal.draw(|frame| app.draw(frame)).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let red: String = (0..24)
        .flat_map(|y| (0..120).map(move |x| (x, y)))
        .filter(|at| buffer[*at].style().fg == Some(Color::Red))
        .map(|at| buffer[at].symbol().to_string())
        .collect();
    let words: Vec<_> = red.split_whitespace().collect();
    // Two rows that are not selected; the second has a fault.
    assert_eq!(words, ["1.50k", "no_room", "+1", "11.50k", "no_room", "+1"], "{red}");
}

#[test]
fn keys_open_pages_and_return() {
    let mut app = app(3, 1);
    screen(&mut app, 80, 24);
    press(&mut app, KeyCode::Down);
    press(&mut app, KeyCode::Enter);
    let text = screen(&mut app, 80, 40).join("\n");
    for want in ["Port vm1", "EVENT_IDX", "From the guest", "To the guest", "link_local"] {
        assert!(text.contains(want), "{want} is not in:\n{text}");
    }
    assert!(press(&mut app, KeyCode::Char('q')) && app.page == Page::Ports);
    press(&mut app, KeyCode::Char('?'));
    assert!(screen(&mut app, 80, 40).join("\n").contains("F/KICK"));
    press(&mut app, KeyCode::Esc);
    press(&mut app, KeyCode::Char('s'));
    press(&mut app, KeyCode::Char('s'));
    assert!(screen(&mut app, 80, 24)[23].ends_with("3 ports, frames in"));
    assert!(!press(&mut app, KeyCode::Char('q')));
    assert!(!app.key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
}
