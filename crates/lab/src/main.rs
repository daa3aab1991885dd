//! pvswitch-lab: the studies of pvswitch, as `pvswitch lab` runs them.

#![forbid(unsafe_code)]

mod cli;

use std::process::ExitCode;

use clap::Parser;
use cli::{Cli, Command, Guest, RunArgs};
use pvswitch_lab::plan::Scale;
use pvswitch_lab::{Ask, Error, guest, import, index, list, print, run, show, studies};

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::List { json } => {
            print(&list(studies::ALL, json));
            Ok(0)
        }
        Command::Run(args) => run::run(&ask(*args), studies::ALL),
        Command::Report { folders, out } => show(&folders, out, studies::ALL).map(|page| {
            print(&format!("{}\n", page.display()));
            0
        }),
        Command::Index { folder, out } => index(&folder, &out, studies::ALL).map(|page| {
            print(&format!("{}\n", page.display()));
            0
        }),
        Command::Import { file, out } => import(&file, &out).map(|runs| {
            print(&format!("{}: {runs} runs\n", out.display()));
            0
        }),
        Command::Guest { end: Guest::Serve { setup } } => guest::serve(&setup),
        Command::Guest { end: Guest::Uml { args } } => guest::uml(&args),
        Command::Guest { end: Guest::Run { folder, command } } => guest::relay(&folder, &command),
    };
    match done {
        Ok(status) => status.into(),
        Err(error) => {
            eprintln!("pvswitch-lab: {error}");
            if matches!(error, Error::Usage(_)) { 2.into() } else { ExitCode::FAILURE }
        }
    }
}

fn ask(args: RunArgs) -> Ask {
    let scale = match (args.smallest, args.quick, args.full) {
        (true, _, _) => Scale::Smallest,
        (_, true, _) => Scale::Quick,
        (_, _, true) => Scale::Full,
        _ => Scale::Usual,
    };
    Ask {
        study: args.study,
        program: None,
        scale,
        repeats: args.repeats,
        seconds: args.seconds,
        plan: args.plan,
        only: args.only,
        proto: args.proto,
        guest: args.guest,
        kernel: args.kernel,
        out: args.out,
        switch_cpus: args.switch_cpus,
        guest_cpus: args.guest_cpus,
        judge: args.judge,
        dry_run: args.dry_run,
        json: args.json,
        command: as_typed(),
    }
}

/// The command line to repeat the run; arguments with blanks are quoted.
fn as_typed() -> String {
    let words = std::env::args().skip(1).map(|word| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_=,.:/+@%".contains(c);
        if !word.is_empty() && word.chars().all(plain) {
            word
        } else {
            format!("'{}'", word.replace('\'', "'\\''"))
        }
    });
    std::iter::once("pvswitch lab".to_string()).chain(words).collect::<Vec<_>>().join(" ")
}
