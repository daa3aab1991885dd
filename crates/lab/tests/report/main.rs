//! A whole report: what is in its files, and what a browser makes of it.

mod browser;
mod sample;

use std::path::{Path, PathBuf};

use pvswitch_lab::report::{
    Document, Error, PAGE, PLOTS, Part, Plot, Point, Series, Table, Value, write,
};
use pvswitch_lab::stats::paired::Estimate;
use roxmltree::Document as Xml;

/// A folder for one test, empty.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    folder
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

fn plots(document: &Document) -> impl Iterator<Item = &Plot> {
    document.parts.iter().filter_map(|part| match part {
        Part::Plot(plot) => Some(plot),
        _ => None,
    })
}

#[test]
fn page_needs_nothing_but_itself() {
    let folder = folder("itself");
    let page = write(&folder, &sample::document()).unwrap();
    assert_eq!(page, folder.join(PAGE));
    let html = read(&page);
    for foreign in
        ["http:", "https:", "//www", "<script src", "<link", "<img", "<iframe", "url(", "@import"]
    {
        assert!(!html.contains(foreign), "{foreign} in the page");
    }
    // What is linked is in the page or in its folder.
    for (at, _) in html.match_indices("href=\"") {
        let link = html[at + 6..].split('"').next().unwrap();
        match link.strip_prefix('#') {
            Some(id) => assert!(html.contains(&format!("id=\"{id}\"")), "{link}"),
            None => assert!(folder.join(link).is_file(), "{link}"),
        }
    }
    assert!(html.contains("default-src 'none'"));
}

#[test]
fn all_contents_are_in_the_page() {
    let document = sample::document();
    let html = read(&write(&folder("everything"), &document).unwrap());
    let texts = document.machine.iter().chain(&document.method).map(|(_, value)| value.as_str());
    let texts = texts.chain(document.verdicts.iter().map(|v| v.what.as_str()));
    let texts =
        texts.chain(document.warnings.iter().flat_map(|w| [w.what.as_str(), w.why.as_str()]));
    let original = document.original.unwrap();
    for text in
        texts.chain([&*document.title, &*document.question, original.claim, original.source])
    {
        assert!(html.contains(&text.replace('"', "&quot;").replace('\'', "&#39;")), "{text}");
    }
    for part in &document.parts {
        if let Part::Table(table) = part {
            in_page(&html, table);
        }
        let command = match part {
            Part::Text { .. } => continue,
            Part::Table(table) => &table.command,
            Part::Plot(plot) => &plot.command,
        };
        assert!(!command.is_empty() && html.contains(&format!("<code>{command}</code>")));
    }
    let buttons = html.matches("class=\"copy needs-script\"").count();
    assert_eq!(buttons, document.parts.len() - 2 + 1, "one for each table and plot, and for all");
}

/// Every value of a table, in a cell of its kind.
fn in_page(html: &str, table: &Table) {
    for value in table.rows.iter().flatten() {
        let wanted = match value {
            Value::Text(text) => format!(">{text}</"),
            Value::Number(value, digits) if *value < 10_000.0 => format!(">{value:.digits$}</"),
            Value::Number(value, _) => format!("data-v=\"{value}\""),
            Value::Spread(Estimate { median, low, high, .. }, digits) => format!(
                ">{median:.digits$} <span class=\"range\">{low:.digits$}\u{2013}{high:.digits$}"
            ),
            Value::Original(value, digits) => {
                format!("class=\"n original\" data-v=\"{value}\">{value:.digits$}</")
            }
            Value::Missing(why) => format!("title=\"{why}\">\u{2014}<sup>"),
        };
        assert!(html.contains(&wanted), "{wanted}");
    }
}

#[test]
fn plots_are_files_that_can_be_read() {
    let folder = folder("plots");
    let document = sample::document();
    write(&folder, &document).unwrap();
    for plot in plots(&document) {
        let path = folder.join(PLOTS).join(&plot.file);
        let svg = read(&path.with_extension("svg"));
        let xml = Xml::parse(&svg).unwrap_or_else(|error| panic!("{}: {error}", plot.file));
        let texts: Vec<&str> =
            xml.descendants().filter(|n| n.is_text()).filter_map(|n| n.text()).collect();
        let title = xml.root_element().children().find(|n| n.has_tag_name(tag("title"))).unwrap();
        assert_eq!(title.text(), Some(plot.title.as_str()));
        for text in [&plot.y, &plot.x, &plot.right].into_iter().filter(|text| !text.is_empty()) {
            assert!(texts.contains(&text.as_str()), "{text} in {}", plot.file);
        }
        assert!(svg.contains("prefers-color-scheme: dark") && !svg.contains("NaN"));
        let png = std::fs::read(path.with_extension("png")).unwrap();
        let map = resvg::tiny_skia::Pixmap::decode_png(&png).unwrap();
        let inked = map.pixels().iter().filter(|p| p.red() < 250 || p.blue() < 250).count();
        assert!(inked > 5000, "{} is almost blank: {inked} pixels", plot.file);
        assert!(map.pixels().iter().all(|pixel| pixel.is_opaque()));
    }
}

fn tag(name: &str) -> (&str, &str) {
    ("http://www.w3.org/2000/svg", name)
}

#[test]
fn every_point_is_drawn_and_said() {
    let folder = folder("points");
    let mut document = sample::document();
    document.parts.extend(sample::kinds().into_iter().map(Part::Plot));
    write(&folder, &document).unwrap();
    for plot in plots(&document) {
        let svg = read(&folder.join(PLOTS).join(format!("{}.svg", plot.file)));
        let xml = Xml::parse(&svg).unwrap();
        let hints = xml.descendants().filter(|n| n.has_tag_name(tag("title")));
        let hints: Vec<&str> = hints.filter_map(|n| n.text()).collect();
        for series in &plot.series {
            let shown = hints.iter().filter(|hint| hint.starts_with(&format!("{}, ", series.name)));
            let drawable =
                series.points.iter().filter(|p| !plot.log.1 || series.right || p.y > 0.0);
            assert_eq!(shown.count(), drawable.count(), "{} of {}", series.name, plot.file);
        }
        let view = xml.root_element().attribute("viewBox").unwrap();
        let size: Vec<f64> = view.split(' ').map(|number| number.parse().unwrap()).collect();
        for (axis, most) in [("x", size[2]), ("y", size[3]), ("cx", size[2]), ("cy", size[3])] {
            for at in xml.descendants().filter_map(|n| n.attribute(axis)) {
                let at: f64 = at.parse().unwrap();
                assert!((0.0..=most).contains(&at), "{axis}={at} is outside {}", plot.file);
            }
        }
    }
}

#[test]
fn no_content_becomes_markup() {
    let evil = "</style></script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>&\u{1}";
    let mut document = sample::document();
    let text = || evil.to_owned();
    (document.title, document.question, document.command) = (text(), text(), text());
    document.machine.push((text(), text()));
    document.method.push((text(), text()));
    document.verdicts[0].what = text();
    document.warnings[0].what = text();
    document.warnings[0].why = text();
    document.parts.push(Part::Text { title: text(), body: text() });
    document.parts.push(Part::Table(Table {
        title: text(),
        note: text(),
        columns: vec![text(), text()],
        rows: vec![vec![Value::Text(text()), Value::Missing(text())]],
        command: text(),
    }));
    let point = Point { low: 0.5, high: 2.0, ..Point::at(0.0, 1.0) };
    let series = Series { name: text(), points: vec![point], ..Series::default() };
    document.parts.push(Part::Plot(Plot {
        title: text(),
        note: text(),
        file: "evil".into(),
        x: text(),
        categories: vec![text()],
        y: text(),
        right: text(),
        series: vec![series.clone(), Series { right: true, bars: true, ..series }],
        command: text(),
        ..Plot::default()
    }));
    let folder = folder("evil");
    let html = read(&write(&folder, &document).unwrap());
    assert!(!html.contains("<script>alert") && !html.contains("<img") && !html.contains('\u{1}'));
    assert_eq!(html.matches("<script>").count(), 1);
    assert!(html.matches("&lt;script&gt;alert(1)").count() > 20);
    let svg = read(&folder.join(PLOTS).join("evil.svg"));
    let xml = Xml::parse(&svg).unwrap();
    let kept = |n: roxmltree::Node| n.text().is_some_and(|t| t.contains("<script>alert(1)"));
    assert!(xml.descendants().any(kept));
    assert!(
        !xml.descendants().any(|n| n.has_tag_name(tag("script")) || n.has_tag_name(tag("img")))
    );
}

#[test]
fn plots_of_nothing_and_of_odd_values() {
    let folder = folder("odd");
    let odd = [f64::NAN, f64::INFINITY, -1.0, 0.0, 1e300, 1e-300, 5.0];
    for (n, log) in [(false, false), (true, true), (false, true)].into_iter().enumerate() {
        for count in 0..=odd.len() {
            let points: Vec<_> = odd[..count].iter().map(|v| Point::at(*v, *v)).collect();
            let series = Series { name: "odd".into(), points, ..Series::default() };
            let bars = Series { bars: true, right: true, ..series.clone() };
            let file = format!("odd-{n}-{count}");
            let plot = Plot { file, log, series: vec![series, bars], ..Plot::default() };
            let document = Document { parts: vec![Part::Plot(plot)], ..Document::default() };
            let html = read(&write(&folder, &document).unwrap());
            assert!(!html.contains("NaN") && !html.contains("inf "), "{n} {count}");
        }
    }
    let html = read(&write(&folder, &Document::default()).unwrap());
    assert!(html.contains("<main"));
}

#[test]
fn a_report_replaces_the_one_before() {
    let folder = folder("again");
    let mut document = sample::document();
    write(&folder, &document).unwrap();
    document.title = "second".into();
    let html = read(&write(&folder, &document).unwrap());
    assert!(html.contains("<h1>second</h1>"));
    let left = std::fs::read_dir(&folder).unwrap().flatten();
    assert_eq!(
        left.filter(|entry| entry.path().extension().is_some_and(|e| e == "part")).count(),
        0
    );
}

#[test]
fn what_cannot_be_written_is_reported() {
    let plot = |file: &str| Part::Plot(Plot { file: file.into(), ..Plot::default() });
    let of = |parts: Vec<Part>| Document { parts, ..Document::default() };
    for parts in [vec![plot("")], vec![plot("../x")], vec![plot("A")], vec![plot("a"), plot("a")]] {
        let folder = folder("names");
        assert!(matches!(write(&folder, &of(parts)), Err(Error::Name(_))));
        assert!(!folder.exists(), "something was written");
    }
    let short = Table { columns: vec!["a".into()], rows: vec![vec![]], ..Table::default() };
    let error = write(&folder("rows"), &of(vec![Part::Table(short)])).unwrap_err();
    assert_eq!(error.to_string(), "table '', row 1: 0 values for 1 columns");
    let folder = folder("file");
    std::fs::write(&folder, "not a folder").unwrap();
    let error = write(&folder, &of(Vec::new())).unwrap_err();
    assert!(matches!(&error, Error::Write { path, .. } if path.starts_with(&folder)), "{error}");
    std::fs::remove_file(&folder).unwrap();
}

/// The lines of a series in a file, without axes: the paths in its colour that are not closed.
fn lines_of(svg: &str, colour: usize) -> usize {
    let class = format!("class=\"s-c{colour}\"");
    let of =
        |line: &&str| line.starts_with("<path") && line.contains(&class) && !line.contains('z');
    svg.lines().filter(of).count()
}

#[test]
fn no_line_joins_single_runs_and_every_point_says_of_how_many_it_is() {
    let folder = folder("joined");
    let point = |x: f64, y: f64, count| Point { count, interval: count > 4, ..Point::at(x, y) };
    let series = |counts: [usize; 3], colour| Series {
        name: format!("series {colour}"),
        points: (0..3).map(|n| point(n as f64, 1.5, counts[n])).collect(),
        colour,
        ..Series::default()
    };
    let plot = Plot {
        file: "joined".into(),
        level: Some(1.0),
        // A model or a published line is not of runs.
        series: vec![series([1, 1, 1], 0), series([10, 10, 10], 1), series([0, 0, 0], 2)],
        ..Plot::default()
    };
    write(&folder, &Document { parts: vec![Part::Plot(plot)], ..Document::default() }).unwrap();
    let svg = read(&folder.join(PLOTS).join("joined.svg"));
    // The legend has a line of each.
    assert_eq!([lines_of(&svg, 0), lines_of(&svg, 1), lines_of(&svg, 2)], [1, 2, 2], "{svg}");
    assert!(svg.contains(">n 1-10<") && svg.contains(", n 1<") && svg.contains(", n 10<"), "{svg}");
    // The line at 1.
    assert!(svg.contains("class=\"s-text\" stroke-width=\"1.4\" stroke-dasharray"), "{svg}");
}

#[test]
fn colours_differ_for_every_eye_and_on_both_backgrounds() {
    // Linear RGB of the colours, as normal sight, protanopia and deuteranopia have it (Viénot,
    // Brettel and Mollon, 1999), then as lightness and hue of Oklab.
    let html = read(&write(&self::folder("colours"), &sample::document()).unwrap());
    let theme = |from: &str| -> Vec<[f64; 3]> {
        let block = &html[html.find(from).unwrap()..];
        (0..8)
            .map(|n| {
                let at = block.find(&format!("--c{n}:#")).unwrap() + 6;
                let value = u32::from_str_radix(&block[at..at + 6], 16).unwrap();
                [16, 8, 0].map(|shift| {
                    let channel = f64::from(value >> shift & 255) / 255.0;
                    if channel <= 0.04045 {
                        channel / 12.92
                    } else {
                        ((channel + 0.055) / 1.055).powf(2.4)
                    }
                })
            })
            .collect()
    };
    let eyes: [fn([f64; 3]) -> [f64; 3]; 3] = [
        |rgb| rgb,
        |[r, g, b]| {
            [
                0.112_38 * r + 0.887_62 * g,
                0.112_38 * r + 0.887_62 * g,
                0.004_01 * r - 0.004_01 * g + b,
            ]
        },
        |[r, g, b]| {
            [
                0.292_75 * r + 0.707_25 * g,
                0.292_75 * r + 0.707_25 * g,
                -0.022_34 * r + 0.022_34 * g + b,
            ]
        },
    ];
    let lab = |[r, g, b]: [f64; 3]| {
        let l = (0.412_221_470_8 * r + 0.536_332_536_3 * g + 0.051_445_992_9 * b).cbrt();
        let m = (0.211_903_498_2 * r + 0.680_699_545_1 * g + 0.107_396_956_6 * b).cbrt();
        let s = (0.088_302_461_9 * r + 0.281_718_837_6 * g + 0.629_978_700_5 * b).cbrt();
        [
            0.210_454_255_3 * l + 0.793_617_785_0 * m - 0.004_072_046_8 * s,
            1.977_998_495_1 * l - 2.428_592_205_0 * m + 0.450_593_709_9 * s,
            0.025_904_037_1 * l + 0.782_771_766_2 * m - 0.808_675_766_0 * s,
        ]
    };
    for (name, from) in [("light", ":root{color-scheme:light"), ("dark", "color-scheme:dark")] {
        let colours = theme(from);
        for (eye, sees) in eyes.iter().enumerate() {
            // The first five, of which most plots have no more; the others differ by symbol, too.
            for (i, j) in (0..5).flat_map(|i| (0..i).map(move |j| (i, j))) {
                let [a, b] = [colours[i], colours[j]].map(|colour| lab(sees(colour)));
                let apart = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
                assert!(apart > 0.08, "{name}, eye {eye}: c{i} and c{j} are {apart:.3} apart");
            }
        }
    }
}
