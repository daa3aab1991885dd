//! Text of `--help` about settings.

use crate::schema::port::{KINDS, Kind, LIMIT, common};
use crate::schema::{Entry, Given, Type, driver, policy, run};

/// Width of help text, in columns.
const COLUMNS: usize = 100;
/// Column where the sentences of options begin.
const SENTENCE: usize = 34;

/// A setting of `run`: its sentence, its forms, and its default.
pub fn of_run(entry: &Entry) -> String {
    let sentence = capital(entry.help.trim_end_matches(", below"));
    let forms = match entry.value {
        Type::Policy if entry.name == "poll" => format!(": {}", policy::forms()),
        Type::Policy => "; same forms".into(),
        _ => String::new(),
    };
    let default = entry.default.replace('`', "");
    match entry.value {
        Type::Flag => sentence,
        _ => format!("{sentence}{forms} [default: {default}]"),
    }
}

/// The settings that `run` accepts on its command line, except ports.
pub fn run_options() -> impl Iterator<Item = &'static Entry> {
    let plain = |entry: &&Entry| !matches!(entry.value, Type::Table(_));
    run::TABLE.iter().filter(|entry| entry.given != Given::File).filter(plain)
}

/// Kinds of ports with their options.
pub fn ports() -> String {
    let mut text = String::from("Port kinds, with their options (,key=value):\n");
    for entry in &KINDS {
        let forms: Vec<_> = entry.args.iter().map(|arg| format!("{}:{arg}", entry.name)).collect();
        let forms = if forms.is_empty() { entry.name.into() } else { forms.join(", ") };
        line(&mut text, 2, &forms, entry.help);
        if entry.kind == Kind::XenLocal {
            line(&mut text, 6, "", "options as xen");
            continue;
        }
        for option in entry.kind.options().filter(|option| !option.kinds.is_empty()) {
            self::option(&mut text, option);
        }
    }
    line(&mut text, 2, "with any kind", "");
    for option in common().filter(|option| !option.name.starts_with(LIMIT)) {
        self::option(&mut text, option);
    }
    let limits = common().filter_map(|option| option.name.strip_prefix(LIMIT));
    let limits = limits.collect::<Vec<_>>().join(", ");
    let what = format!(
        "limit on resources that its peer may use; NAME is one of {limits}; bytes also as 512K, \
         64M, 16G, 4T"
    );
    line(&mut text, 6, "limit-NAME=N", &what);
    text
}

fn option(text: &mut String, entry: &Entry) {
    let form = format!("{}={}", entry.name, entry.value.form());
    let default = entry.default.replace('`', "");
    let sentence = format!("{} [{default}]", entry.help);
    line(text, 6, &form, &sentence);
    if entry.per_queue {
        let form = format!("{}/N={}", entry.name, entry.value.form());
        line(text, 6, &form, "the same for queue pair N, from 0 on");
    }
}

/// Settings of the driver half.
pub fn driver() -> String {
    let mut text =
        String::from("Driver settings (--set KEY=VALUE, may be repeated; default in brackets):\n");
    for entry in driver::TABLE.iter().filter(|entry| !entry.per_queue) {
        let form = format!("{}={}", entry.name, entry.value.form());
        line(&mut text, 2, &form, &format!("{} [{}]", entry.help, entry.default));
    }
    for entry in driver::TABLE.iter().filter(|entry| entry.per_queue) {
        line(&mut text, 2, &format!("{}/QUEUE={}", entry.name, entry.value.form()), entry.help);
    }
    text += "  Xen rings support only the first three, tx-burst, policies, offset (of transmitted \
             frames) and\n  suppress=none.\n";
    text += &wrapped("Policies (--poll, --kick): ", 2, &policy::forms());
    text
}

fn capital(text: &str) -> String {
    let mut chars = text.chars();
    let first = chars.next().map(|c| c.to_ascii_uppercase());
    first.into_iter().chain(chars).collect()
}

/// Appends a form and its sentence, wrapped; the sentence goes below a long form.
fn line(text: &mut String, indent: usize, form: &str, sentence: &str) {
    let head = format!("{:indent$}{form}", "");
    let head = if head.chars().count() + 2 > SENTENCE {
        *text += &head;
        *text += "\n";
        " ".repeat(SENTENCE)
    } else {
        format!("{head:SENTENCE$}")
    };
    if sentence.is_empty() {
        *text += head.trim_end();
    } else {
        *text += &wrapped(&head, SENTENCE, sentence);
    }
    *text += "\n";
}

/// Appends words to `head`; continuation lines begin at column `indent`.
fn wrapped(head: &str, indent: usize, words: &str) -> String {
    let (mut text, mut column) = (head.to_string(), head.chars().count());
    let mut first = true;
    for word in words.split_whitespace() {
        let len = word.chars().count();
        if !first && column + 1 + len > COLUMNS {
            text += "\n";
            text += &" ".repeat(indent);
            column = indent;
            first = true;
        }
        if !first {
            text.push(' ');
            column += 1;
        }
        text += word;
        column += len;
        first = false;
    }
    text
}
