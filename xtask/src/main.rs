//! Project tasks: `cargo xtask ci`, `cargo xtask lab`, `cargo xtask test`, `cargo xtask settings`
//! and `cargo xtask tidy`.
#![forbid(unsafe_code)]

mod ci;
mod circles;
mod lab;
mod licence;
mod test;
mod text;
mod tidy;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask ci [STEP...]    everything CI checks, or the steps named
       cargo xtask lab [STUDY...]  every study of the lab in its smallest form, or those named
       cargo xtask test            the tests of the workspace, several programs side by side
       cargo xtask settings        makes the tables of docs/settings.md from the schema
       cargo xtask tidy            the house rules that neither rustc nor clippy know";

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
        Some((task, [])) if task == "test" => match test::run(&root()) {
            Ok(passed) => passed,
            Err(why) => {
                eprintln!("cargo xtask test: {why}");
                return ExitCode::from(2);
            }
        },
        Some((task, [])) if task == "tidy" => {
            let offences = tidy::check(&root());
            for offence in &offences {
                println!("{offence}");
            }
            println!("tidy: {} offences", offences.len());
            offences.is_empty()
        }
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

/// Makes the tables of settings anew.
fn settings(root: &Path) -> Result<(), String> {
    let path = root.join(tidy::SETTINGS);
    let text = std::fs::read_to_string(&path).map_err(|error| error.to_string())?;
    std::fs::write(path, api::docs::fill(&text)?).map_err(|error| error.to_string())
}

/// The workspace.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("xtask lies in the workspace").into()
}
