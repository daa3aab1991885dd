//! `pvswitch lab`: the command line of the studies. They are a room of their own.

use std::process::ExitCode;

use ::lab::plan::Scale;
use ::lab::{self as room, Ask, Error, studies};

use crate::cli::{LabArgs, LabCommand, LabGuest, LabRunArgs};
use crate::{AnyError, Usage};

/// `lab`.
pub fn command(args: LabArgs) -> Result<ExitCode, AnyError> {
    let done = match args.what {
        LabCommand::List { json } => {
            print!("{}", room::list(studies::ALL, json));
            Ok(0)
        }
        LabCommand::Run(args) => room::run::run(&ask(*args), studies::ALL),
        LabCommand::Report { folders } => room::show(&folders, studies::ALL).map(|page| {
            println!("{}", page.display());
            0
        }),
        LabCommand::Guest { end: LabGuest::Serve { setup } } => room::guest::serve(&setup),
        LabCommand::Guest { end: LabGuest::Run { folder, command } } => {
            room::guest::relay(&folder, &command)
        }
    };
    match done {
        Ok(status) => Ok(status.into()),
        Err(Error::Usage(what)) => Err(Usage(what).into()),
        Err(error) => Err(error.into()),
    }
}

fn ask(args: LabRunArgs) -> Ask {
    let scale = match (args.smallest, args.quick, args.full) {
        (true, _, _) => Scale::Smallest,
        (_, true, _) => Scale::Quick,
        (_, _, true) => Scale::Full,
        _ => Scale::Usual,
    };
    Ask {
        study: args.study,
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

/// The command line for people to repeat: the program by its name, what has blanks in quotes.
fn as_typed() -> String {
    let words = std::env::args().skip(1).map(|word| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_=,.:/+@%".contains(c);
        if !word.is_empty() && word.chars().all(plain) {
            word
        } else {
            format!("'{}'", word.replace('\'', "'\\''"))
        }
    });
    std::iter::once("pvswitch".to_string()).chain(words).collect::<Vec<_>>().join(" ")
}
