//! Options of `run` for the settings of the switch, one for each entry of the schema.

use api::help::{of_run, run_options};
use api::schema::{Choice, Entry, Type, Value};
use clap::builder::{
    PossibleValue, PossibleValuesParser, RangedU64ValueParser, TypedValueParser, ValueParser,
};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

/// Settings given on the command line.
#[derive(Clone, Debug, Default)]
pub struct Settings(pub api::Settings);

impl FromArgMatches for Settings {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut settings = Self::default();
        settings.update_from_arg_matches(matches)?;
        Ok(settings)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for entry in run_options() {
            let given = match entry.value {
                Type::Flag => matches.get_flag(entry.name).then_some(Value::Flag),
                Type::Cpus => matches.get_many::<Value>(entry.name).map(all_cpus),
                _ => matches.get_one::<Value>(entry.name).cloned(),
            };
            if let Some(value) = given {
                self.0.set(entry, value);
            }
        }
        Ok(())
    }
}

impl Args for Settings {
    fn augment_args(command: Command) -> Command {
        run_options().fold(command, |command, entry| command.arg(option(entry)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

fn option(entry: &'static Entry) -> Arg {
    let arg = Arg::new(entry.name).long(entry.name).help(of_run(entry));
    match entry.value {
        Type::Flag => arg.action(ArgAction::SetTrue),
        Type::Cpus => {
            let arg = arg.value_name(entry.value.name()).value_parser(parser(entry));
            arg.action(ArgAction::Append)
        }
        value => arg.value_name(value.name()).value_parser(parser(entry)),
    }
}

/// Joins lists of CPUs: the option may be repeated.
fn all_cpus<'a>(lists: impl Iterator<Item = &'a Value>) -> Value {
    let cpus = lists.flat_map(|list| match list {
        Value::Cpus(cpus) => cpus.clone(),
        _ => Vec::new(),
    });
    Value::Cpus(cpus.collect())
}

/// Values that clap validates and lists itself (choices, ranges) have clap's own parsers.
fn parser(entry: &'static Entry) -> ValueParser {
    let parse = |text: String| entry.parse(&text);
    match entry.value {
        Type::Choice(words) => {
            let word = |word: &Choice| PossibleValue::new(word.word).help(word.help);
            PossibleValuesParser::new(words.iter().map(word)).try_map(parse).into()
        }
        Type::Number(min, max) => {
            RangedU64ValueParser::<u64>::new().range(min..=max).map(Value::Number).into()
        }
        _ => ValueParser::new(move |text: &str| entry.parse(text)),
    }
}
