//! Tables of `docs/settings.md`, between markers that name them:
//!
//! ```markdown
//! <!-- schema: run -->
//! ...
//! <!-- end -->
//! ```

use crate::schema::port::{KINDS, Kind, LIMIT, common};
use crate::schema::{Choice, Entry, Given, Type, driver, policy, run};

/// End marker of a table.
const END: &str = "<!-- end -->";

/// Makes a table.
type Maker = fn() -> String;

/// Tables by the names of their markers.
const TABLES: [(&str, Maker); 7] = [
    ("run", run_table),
    ("policies", policy_table),
    ("placement", || words_table("placement", run::PLACEMENTS)),
    ("priority", || words_table("priority", run::PRIORITIES)),
    ("ports", port_table),
    ("limits", limit_table),
    ("driver", driver_table),
];

/// Replaces the tables in `text`.
///
/// # Errors
/// A table has no markers, or no end marker.
pub fn fill(text: &str) -> Result<String, String> {
    TABLES.iter().try_fold(text.to_string(), |text, (name, table)| {
        let begin = format!("<!-- schema: {name} -->\n");
        let (before, rest) = text.split_once(&begin).ok_or(format!("no line {begin}"))?;
        let (_, after) = rest.split_once(END).ok_or(format!("no {END} after {begin}"))?;
        Ok(format!("{before}{begin}{}{END}{after}", table()))
    })
}

/// The sentence of a setting, with the addition for the docs.
fn sentence(entry: &Entry) -> String {
    format!("{}{}", entry.help, entry.more)
}

/// Formats text as code.
fn code(text: &str) -> String {
    format!("`{}`", text.replace('|', "\\|"))
}

/// Formats a default: a value as code, descriptions and numbers as plain text.
fn default(entry: &Entry) -> String {
    let number = entry.default.parse::<u64>().is_ok();
    let words = matches!(entry.value, Type::Text(_) | Type::Table(_) | Type::Flag);
    match entry.default_value() {
        Some(_) if !number && !words => code(entry.default),
        _ => entry.default.into(),
    }
}

fn row(cells: &[&str]) -> String {
    let cells: Vec<_> =
        cells.iter().map(|c| if c.is_empty() { " ".into() } else { format!(" {c} ") }).collect();
    format!("|{}|\n", cells.join("|"))
}

fn heading(cells: &[&str]) -> String {
    row(cells) + &format!("|{}\n", "---|".repeat(cells.len()))
}

fn run_table() -> String {
    let mut table = heading(&["command line", "file", "default", "what it does"]);
    for entry in run::TABLE {
        let flag = code(format!("--{} {}", entry.name, entry.value.name()).trim_end());
        let key = match entry.name {
            "port" => "`[port.NAME]`".into(),
            _ if matches!(entry.value, Type::Table(_)) => code(entry.value.name()),
            _ => code(entry.file),
        };
        let (flag, key) = match entry.given {
            Given::Anywhere => (flag, key),
            Given::CommandLine => (flag, String::new()),
            Given::File => (String::new(), key),
        };
        table += &row(&[&flag, &key, &default(entry), &sentence(entry)]);
    }
    table
}

fn policy_table() -> String {
    let mut table = heading(&["policy", "a queue is polled", "a guest is called", "for"]);
    for form in policy::FORMS {
        table += &row(&[&code(form.form), form.polls, form.calls, form.good_for]);
    }
    table
}

/// Words of a setting.
fn words_table(name: &str, words: &[Choice]) -> String {
    let what = |word: &Choice| format!("{}{}", word.help, word.more);
    let rows = words.iter().map(|word| row(&[&code(word.word), &what(word)]));
    heading(&[name, ""]) + &rows.collect::<String>()
}

fn port_table() -> String {
    let mut table = heading(&["kind", "option", "default", ""]);
    for entry in &KINDS {
        let forms: Vec<_> =
            entry.args.iter().map(|arg| code(&format!("{}:{arg}", entry.name))).collect();
        let kind = match &forms[..] {
            [] => code(entry.name),
            forms => format!("{} ({})", forms.join(", "), code(entry.file)),
        };
        if entry.kind == Kind::XenLocal {
            table += &row(&[&kind, "as `xen`", "", entry.help]);
            continue;
        }
        table += &row(&[&kind, "", "", entry.help]);
        for option in entry.kind.options().filter(|option| !option.kinds.is_empty()) {
            table += &option_row("", option);
        }
    }
    let mut any = "any";
    for option in common().filter(|option| !option.name.starts_with(LIMIT)) {
        table += &option_row(any, option);
        any = "";
        if option.per_queue {
            let (name, form) = (option.name, option.value.form());
            let form = format!("`{name}/N={form}` (`\"{name}/N\"`)");
            let what = "the same for its queue pair N, 0 to `queues` - 1";
            table += &row(&["", &form, &format!("`{name}=`"), what]);
        }
    }
    let what = "limit on resources that its peer may use";
    table + &row(&["", "`limit-NAME=N`", "[accounts](#accounts)", what])
}

fn option_row(kind: &str, option: &Entry) -> String {
    let mut form = code(&format!("{}={}", option.name, option.value.form()));
    if option.file != option.name {
        form += &format!(" ({})", code(option.file));
    }
    row(&[kind, &form, &default(option), &sentence(option)])
}

fn limit_table() -> String {
    let mut table = heading(&[
        "option",
        "default",
        "what is limited, and which port is charged",
        "when the limit is reached",
    ]);
    for option in common().filter(|option| option.name.starts_with(LIMIT)) {
        table += &row(&[&code(option.name), option.default, option.help, option.more]);
    }
    table
}

fn driver_table() -> String {
    let mut table = heading(&["key", "values, the default first", ""]);
    for entry in driver::TABLE.iter().filter(|entry| !entry.per_queue) {
        let mut key = code(entry.name);
        match entry.value {
            Type::Choice(words) if words.iter().all(|word| !word.help.is_empty()) => {
                for word in words {
                    table += &row(&[&key, &code(&word.form()), word.help]);
                    key = String::new();
                }
            }
            Type::Choice(words) => {
                let words: Vec<_> = words.iter().map(|word| code(&Choice::form(word))).collect();
                table += &row(&[&key, &words.join(", "), &sentence(entry)]);
            }
            _ => table += &row(&[&key, &code(entry.default), &sentence(entry)]),
        }
    }
    table
}
