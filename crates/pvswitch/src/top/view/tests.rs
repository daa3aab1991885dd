use super::super::sample::{picture, tests::sample};
use super::*;

#[test]
fn plain_text_keeps_its_width_and_shows_every_queue() {
    let picture = picture(Some(&sample(1, 10, 40, 2)), &sample(1, 11, 40, 2));
    for width in [80, 120] {
        let text = plain(&picture, width);
        let long = text.lines().skip(1).find(|line| line.chars().count() > width);
        assert_eq!(long, None, "{text}");
        assert_eq!(text.lines().filter(|line| line.starts_with("vm7 ")).count(), 1 + 2);
        assert!(!text.contains('\x1b') && !text.contains("NaN"), "{text}");
    }
    let wide = plain(&picture, 120);
    assert!(wide.contains("coalesce:1000,32") && wide.contains("vhost-user:/run"), "{wide}");
}

#[test]
fn ports_are_sorted_by_the_selected_key() {
    let port = |name: &str, frames: f64| Port {
        name: name.into(),
        in_frames: Some(frames),
        ..Port::default()
    };
    let mut ports = vec![port("b", 1.0), port("c", 3.0), port("a", 2.0)];
    let mut order = |sort: Sort| {
        sort.apply(&mut ports);
        ports.iter().map(|port| port.name.as_str()).collect::<String>()
    };
    assert_eq!((order(Sort::Name), order(Sort::In)), ("abc".into(), "cab".into()));
    let mut sort = Sort::default();
    for _ in 0..5 {
        sort = sort.next();
    }
    assert_eq!(sort, Sort::Added);
}
