//! Project tasks: `cargo xtask bench`, `ci`, `counts`, `deny`, `lab`, `prove`, `test`, `sanitize`,
//! `sbom`, `settings`, `static`, `book`, `house` and `tidy`.
#![forbid(unsafe_code)]

mod bench;
mod book;
mod ci;
mod command;
mod counts;
mod cycles;
mod fuzz;
mod house;
mod lab;
mod licence;
mod links;
mod musl;
mod prove;
mod sanitize;
mod supply;
mod test;
mod text;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask bench --before COMMIT   runs the benchmarks of this tree beside a commit's
       cargo xtask ci [weekly] [STEP...]
                                   runs all steps of CI, or those named; of its weekly form
       cargo xtask counts [--bisect | --write | --baseline FILE]
                                   compares instructions of each frame with the baseline
       cargo xtask lab [--default] [STUDY...]
                                   runs all studies in their smallest form, or those named;
                                   or those named in their default form
       cargo xtask fuzz [--runs N] [TARGET...]
                                   runs fuzz targets, guided by coverage, and keeps what is new
       cargo xtask sanitize [miri] [thread]
                                   runs tests under Miri and ThreadSanitizer
       cargo xtask prove [NAME...] runs proofs by Kani, or those with such names
       cargo xtask test            runs the tests of the workspace, several programs in parallel
       cargo xtask settings        writes the tables of docs/settings.md, docs/config.schema.json,
                                   docs/openapi.json
       cargo xtask static [--check | --twice]
                                   builds static programs, with musl, and checks that they are;
                                   or only compiles; or also builds a clone of the commit at
                                   another path, which must make the same bytes
       cargo xtask deny [--advisories]
                                   checks packages by cargo-deny; also for known vulnerabilities
       cargo xtask sbom            lists the packages of the programs in target/pvswitch.cdx.json
       cargo xtask book            makes the documents a book in target/book, by mdBook
       cargo xtask house [--lists] [--binary] [FOLDER]
                                   counts lines, long files and functions, cycles, and packages
       cargo xtask tidy            checks house rules that neither rustc nor clippy check";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let root = root();
    let passed = match words[..] {
        ["ci", ..] => ci::run(&root, &arguments[1..]),
        ["counts", ..] => counts::run(&root, &arguments[1..]),
        ["lab", ..] => lab::run(&root, &arguments[1..]),
        ["bench", ..] => bench::run(&root, &arguments[1..]).map(|()| true),
        ["house", ..] => house::run(&root, &arguments[1..]).map(|()| true),
        ["fuzz", ..] => fuzz::run(&root, &arguments[1..]),
        ["prove", ..] => prove::run(&root, &arguments[1..]),
        ["sanitize", ..] => sanitize::run(&root, &arguments[1..]),
        ["test"] => test::run(&root),
        ["tidy"] => Ok(tidy(&root)),
        ["book"] => book::make(&root).map(|at| {
            println!("{}", at.display());
            true
        }),
        ["static"] => musl::build(&root).map(|programs| {
            programs.iter().for_each(|path| println!("{}", path.display()));
            true
        }),
        ["static", "--check"] => musl::check(&root),
        ["static", "--twice"] => musl::build_twice(&root).map(|programs| {
            programs.iter().for_each(|path| println!("the same twice: {}", path.display()));
            true
        }),
        ["deny"] => supply::deny(&root, false),
        ["deny", "--advisories"] => supply::deny(&root, true),
        ["sbom"] => supply::sbom(&root).map(|path| {
            println!("{}", path.display());
            true
        }),
        ["settings"] => settings(&root).map(|()| true),
        _ => {
            let [usual, weekly] = ci::names().map(|names| names.join(" "));
            eprintln!("{USAGE}\nsteps of ci: {usual}\nof ci weekly: {weekly}");
            return ExitCode::from(2);
        }
    };
    match passed {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("cargo xtask {}: {why}", words[0]);
            ExitCode::from(if ["book", "static", "sbom", "settings"].contains(&words[0]) {
                1
            } else {
                2
            })
        }
    }
}

/// Prints violations; returns whether there are none.
fn tidy(root: &Path) -> bool {
    let violations = tidy::check(root);
    for violation in &violations {
        println!("{violation}");
    }
    println!("tidy: {} violations", violations.len());
    violations.is_empty()
}

/// Rewrites the tables of settings, the JSON Schema of the file, and the description of the control
/// socket.
fn settings(root: &Path) -> Result<(), String> {
    let path = root.join(tidy::SETTINGS);
    let text = std::fs::read_to_string(&path).map_err(|error| error.to_string())?;
    std::fs::write(path, api::docs::fill(&text)?).map_err(|error| error.to_string())?;
    let path = root.join(api::json_schema::PATH);
    std::fs::write(path, api::json_schema::text()).map_err(|error| error.to_string())?;
    let path = root.join(api::openapi::PATH);
    std::fs::write(path, api::openapi::text()).map_err(|error| error.to_string())
}

/// The folder of the workspace.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("xtask is in the workspace").into()
}
