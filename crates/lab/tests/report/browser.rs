//! The page in a browser: headless Chromium, where it is installed.

use std::path::Path;
use std::process::{Command, Output};

use pvswitch_lab::report::write;

use super::{folder, sample};

const NAMES: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

fn chromium(folder: &Path, args: &[&str], page: &Path) -> Option<Output> {
    let found = NAMES.iter().find(|name| {
        Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success())
    });
    let Some(name) = found else {
        println!("skipped: no Chromium here (package chromium)");
        return None;
    };
    let profile = format!("--user-data-dir={}", folder.join("profile").display());
    let output = Command::new("timeout")
        .args(["-k", "5", "120", name, "--headless", "--disable-gpu", "--no-first-run"])
        // As root there is no sandbox to be had.
        .args(["--no-sandbox", "--disable-dev-shm-usage", "--enable-logging=stderr", &profile])
        .args(["--force-color-profile=srgb", "--hide-scrollbars"])
        .args(args)
        .arg(format!("file://{}", page.display()))
        .output()
        .expect("timeout is part of every system with Chromium");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let errors: Vec<&str> = said.lines().filter(|line| line.contains("CONSOLE")).collect();
    assert!(errors.is_empty(), "{errors:#?}");
    Some(output)
}

/// Writes the sample with a script behind it, and gives what the browser made of it.
fn dom(name: &str, script: &str) -> Option<String> {
    let folder = folder(name);
    let page = write(&folder, &sample::document()).unwrap();
    let html = std::fs::read_to_string(&page).unwrap();
    let probed = html.replace("</body>", &format!("<script>{script}</script></body>"));
    let page = folder.join("probed.html");
    std::fs::write(&page, probed).unwrap();
    let output = chromium(
        &folder,
        &["--window-size=1100,900", "--virtual-time-budget=3000", "--dump-dom"],
        &page,
    )?;
    Some(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn page_is_shown_without_an_error() {
    let folder = folder("browser");
    let page = write(&folder, &sample::document()).unwrap();
    for (name, wide, scheme) in [("light", 1100, "1"), ("dark", 1100, "0"), ("narrow", 500, "1")] {
        let shot = folder.join(format!("{name}.png"));
        let args = [
            format!("--screenshot={}", shot.display()),
            format!("--window-size={wide},7000"),
            format!("--blink-settings=preferredColorScheme={scheme}"),
        ];
        let Some(_) = chromium(&folder, &args.each_ref().map(String::as_str), &page) else {
            return;
        };
        let map = resvg::tiny_skia::Pixmap::decode_png(&std::fs::read(&shot).unwrap()).unwrap();
        let paper = map.pixel(1, 1).unwrap();
        let written = map.pixels().iter().filter(|pixel| **pixel != paper).count();
        assert!(written > 50_000, "{name}: almost blank, {written} pixels");
        assert_eq!(paper.red() < 100, name == "dark", "{name}: paper is {paper:?}");
    }
}

#[test]
fn page_is_no_wider_than_its_window() {
    let script = "document.title = 'wide ' + document.documentElement.scrollWidth + ' of ' + \
                  innerWidth";
    for (name, size) in [("width-desk", "1100,900"), ("width-hand", "500,900")] {
        let folder = folder(name);
        let page = write(&folder, &sample::document()).unwrap();
        let html = std::fs::read_to_string(&page).unwrap();
        let script = format!("<script>{script}</script></body>");
        std::fs::write(&page, html.replace("</body>", &script)).unwrap();
        let size = format!("--window-size={size}");
        let Some(output) = chromium(&folder, &[&size, "--dump-dom"], &page) else { return };
        let dom = String::from_utf8_lossy(&output.stdout).into_owned();
        let said = dom.split("<title>wide ").nth(1).unwrap().split('<').next().unwrap();
        let (is, may) = said.split_once(" of ").unwrap();
        assert_eq!(is, may, "{name}");
    }
}

#[test]
fn tables_sort_by_number_and_back() {
    let script = "const table = document.querySelector('table.sorts');\
        const column = [...table.tHead.rows[0].cells].findIndex(c => c.textContent == 'ratio');\
        const read = () => [...table.tBodies[0].rows].map(r => r.cells[column].dataset.v ?? 'x');\
        const button = table.tHead.rows[0].cells[column].querySelector('button');\
        const seen = [read().join()];\
        for (let i = 0; i < 3; i++) { button.click(); \
        seen.push(table.tHead.rows[0].cells[column].getAttribute('aria-sort') + read().join()); }\
        document.title = 'sorted ' + seen.join('; ')";
    let Some(dom) = dom("sorts", script) else { return };
    let said = dom.split("<title>sorted ").nth(1).unwrap().split('<').next().unwrap();
    let seen: Vec<&str> = said.split("; ").collect();
    let (numbers, none) = ([",0.57"; 6].concat(), [",x"; 6].concat());
    let sorted = format!("{numbers}{none}");
    assert_eq!(seen[0], format!("none{}", seen[0]).trim_start_matches("none"));
    assert_eq!(seen[1], format!("ascending{}", &sorted[1..]));
    assert_eq!(seen[2], format!("descending{}", &sorted[1..]));
    assert_eq!(seen[3], format!("none{}", seen[0]));
}

#[test]
fn theme_goes_round() {
    let script = "const theme = document.getElementById('theme');\
        const seen = [];\
        for (let i = 0; i < 3; i++) { theme.click();\
        seen.push(theme.textContent + ' ' + document.documentElement.dataset.theme + ' ' + \
        getComputedStyle(document.body).backgroundColor); }\
        document.title = 'themes ' + seen.join('; ')";
    let Some(dom) = dom("theme", script) else { return };
    let said = dom.split("<title>themes ").nth(1).unwrap().split('<').next().unwrap();
    let seen: Vec<&str> = said.split("; ").collect();
    assert_eq!(seen[0], "Theme: light light rgb(255, 255, 255)");
    assert_eq!(seen[1], "Theme: dark dark rgb(22, 25, 29)");
    assert!(seen[2].starts_with("Theme: system undefined"), "{}", seen[2]);
}

#[test]
fn commands_are_copied_the_new_way_or_by_hand() {
    let script = "const button = document.querySelector('button.copy'); const seen = [];\
        const clipboard = { writeText: async (text) => { seen.push(text); } };\
        Object.defineProperty(navigator, 'clipboard', { value: clipboard });\
        const later = (then) => setTimeout(then, 100);\
        button.click();\
        later(() => { seen.push(button.textContent);\
          clipboard.writeText = async () => { throw 'not allowed'; };\
          document.execCommand = () => { seen.push(getSelection().toString()); return false; };\
          button.click();\
          later(() => { seen.push(button.textContent, getSelection().toString());\
            document.title = 'copied ' + seen.join('; '); }); })";
    let Some(dom) = dom("copy", script) else { return };
    let said = dom.split("<title>copied ").nth(1).unwrap().split('<').next().unwrap();
    let command = sample::COMMAND;
    assert_eq!(said, format!("{command}; Copied; {command}; Press Ctrl-C; {command}"));
}
