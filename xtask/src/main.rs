//! Project tasks: `cargo xtask bench`, `ci`, `lab`, `test`, `settings`, `static`, `book`, `house` and
//! `tidy`.
#![forbid(unsafe_code)]

mod bench;
mod book;
mod ci;
mod command;
mod cycles;
mod house;
mod lab;
mod licence;
mod links;
mod musl;
mod test;
mod text;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask bench --before COMMIT   runs the benchmarks of this tree beside a commit's
       cargo xtask ci [STEP...]    runs all steps of CI, or those named
       cargo xtask lab [STUDY...]  runs all studies in their smallest form, or those named
       cargo xtask test            runs the tests of the workspace, several programs in parallel
       cargo xtask settings        writes the tables of docs/settings.md, docs/config.schema.json,
                                   docs/openapi.json
       cargo xtask static          builds static programs, with musl, and checks that they are
       cargo xtask book            makes the documents a book in target/book, by mdBook
       cargo xtask house [--lists] counts lines, long files and functions, cycles, and packages
       cargo xtask tidy            checks house rules that neither rustc nor clippy check";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let passed = match arguments.split_first() {
        Some((task, names)) if task == "ci" || task == "lab" => {
            let run = if task == "ci" { ci::run } else { lab::run };
            match run(&root(), names) {
                Ok(passed) => passed,
                Err(why) => {
                    eprintln!("cargo xtask {task}: {why}");
                    return ExitCode::from(2);
                }
            }
        }
        Some((task, words)) if task == "bench" || task == "house" => {
            let run = if task == "bench" { bench::run } else { house::run };
            match run(&root(), words) {
                Ok(()) => true,
                Err(why) => {
                    eprintln!("cargo xtask {task}: {why}");
                    return ExitCode::from(2);
                }
            }
        }
        Some((task, [])) if task == "test" => match test::run(&root()) {
            Ok(passed) => passed,
            Err(why) => {
                eprintln!("cargo xtask test: {why}");
                return ExitCode::from(2);
            }
        },
        Some((task, [])) if task == "tidy" => {
            let violations = tidy::check(&root());
            for violation in &violations {
                println!("{violation}");
            }
            println!("tidy: {} violations", violations.len());
            violations.is_empty()
        }
        Some((task, [])) if task == "book" => match book::make(&root()) {
            Ok(at) => {
                println!("{}", at.display());
                true
            }
            Err(why) => {
                eprintln!("cargo xtask book: {why}");
                false
            }
        },
        Some((task, [])) if task == "static" => match musl::build(&root()) {
            Ok(programs) => {
                programs.iter().for_each(|path| println!("{}", path.display()));
                true
            }
            Err(why) => {
                eprintln!("cargo xtask static: {why}");
                false
            }
        },
        Some((task, [])) if task == "settings" => match settings(&root()) {
            Ok(()) => true,
            Err(why) => {
                eprintln!("cargo xtask settings: {why}");
                false
            }
        },
        _ => {
            eprintln!("{USAGE}\nsteps of ci: {}", ci::names().join(" "));
            return ExitCode::from(2);
        }
    };
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
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
