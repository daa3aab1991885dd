//! pvswitch: network back-end and virtual switch for virtual machines.

mod capture;
mod cli;
mod config;
mod control;
mod cost;
mod ctl;
mod demo;
mod generate;
mod guest;
mod hints;
mod http;
mod lab;
mod limit;
mod nic;
mod pool;
mod ports;
mod run;
mod spec;
mod tap;
mod top;
mod worker;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use cli::{Cli, Command, ForwardArg, RunArgs};
use config::Config;
use run::Options;
use switch::fdb::Mac;
use switch::forward::Mode;

/// Default of `ageing`, in seconds (IEEE 802.1Q).
const AGEING_S: u32 = 300;
/// Default of `addresses_per_port`.
const ADDRESSES_PER_PORT: u32 = 4096;

type AnyError = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    end_quietly();
    let cli = Cli::parse();
    init_log();
    let result = match cli.command {
        Command::Run(args) => run_command(args),
        Command::Top(args) => top::command(args),
        Command::Ctl(args) => ctl::command(args).map_err(Into::into),
        Command::Capture(args) => {
            let control = args.control.map_or_else(control::default_path, Ok);
            let captured = control.and_then(|at| capture::command(&at, &args.port, &args.write));
            captured.map_err(Into::into)
        }
        Command::Nic(args) => nic::command(args),
        Command::Gen(args) => generate::command(args),
        Command::Demo(args) => demo::command(args),
        Command::Lab(args) => match lab::command(args) {
            Ok(status) => return status,
            Err(error) => Err(error),
        },
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_broken_pipe(&*error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pvswitch: {error}");
            if error.downcast_ref::<Usage>().is_some() {
                return ExitCode::from(2);
            }
            ExitCode::FAILURE
        }
    }
}

/// A mistake on the command line or in the configuration: exit status 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Usage(pub String);

/// Whoever read our output has enough of it: a quiet end. `println!` panics there.
fn end_quietly() {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let said = panic.payload_as_str().unwrap_or_default();
        if said.starts_with("failed printing to stdout") && said.contains("Broken pipe") {
            std::process::exit(0);
        }
        hook(panic);
    }));
}

fn is_broken_pipe(error: &(dyn std::error::Error + 'static)) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

fn init_log() {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_target(false)
        .with_writer(std::io::stderr)
        // An error of the log itself has nowhere to go.
        .log_internal_errors(false)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .init();
}

fn run_command(args: RunArgs) -> Result<(), AnyError> {
    let options = options(args).map_err(|error| Usage(error.to_string()))?;
    Ok(run::run(options)?)
}

/// Command line over configuration file over defaults.
fn options(args: RunArgs) -> Result<Options, AnyError> {
    let (config, mut ports) = match &args.config {
        Some(path) => {
            let config = Config::load(path)?;
            let ports = config.ports(path)?;
            (config, ports)
        }
        None => (Config::default(), Vec::new()),
    };
    ports.extend(args.ports);
    for (i, port) in ports.iter().enumerate() {
        if ports[..i].iter().any(|p| p.name == port.name) {
            return Err(run::RunError::DuplicatePort(port.name.clone()).into());
        }
    }
    if ports.is_empty() && args.control.is_none() && config.control.is_none() {
        return Err("no ports: add --port NAME=KIND:ARG, or --control PATH to add them later; \
                    see pvswitch run --help"
            .into());
    }
    let named = |name: Option<String>, what: &str, known: &[&str]| match name {
        Some(name) if !known.contains(&name.as_str()) => {
            let hint = ::lab::near::did_you_mean(&name, known.iter().copied());
            Err(format!("{what} = \"{name}\"{hint}: use one of {}", known.join(", ")))
        }
        name => Ok(name),
    };
    let forward = named(config.forward.clone(), "forward", &["switch", "cross"])?;
    let mode = match (args.forward, forward.as_deref()) {
        (Some(ForwardArg::Cross), _) | (None, Some("cross")) => Mode::Cross,
        _ => Mode::Switch,
    };
    let workers = args.workers.or(config.workers).unwrap_or(1);
    if !(1..=run::WORKERS_MAX).contains(&workers) {
        return Err(format!("workers = {workers}: use 1 to {}", run::WORKERS_MAX).into());
    }
    let (says, cpus) = match (args.cpus, config.cpus) {
        (given, Some(cpus)) if given.is_empty() => ("cpus =", cpus),
        (given, _) => ("--cpus", given),
    };
    if let Some(cpu) = cpus.iter().find(|cpu| **cpu >= rustix::thread::CpuSet::MAX_CPU) {
        return Err(format!("{says} {cpu}: there is no such CPU").into());
    }
    let static_addresses = config
        .static_addresses
        .iter()
        .map(|(mac, port)| Ok((Mac(spec::mac(mac)?), port.clone())))
        .collect::<Result<_, String>>()?;
    Ok(Options {
        ports,
        policy: args.poll.or(config.poll).unwrap_or_default(),
        call: args.call.or(config.call).unwrap_or(switch::poll::Policy::Event),
        workers,
        placement: args.placement.or(config.placement).unwrap_or_default(),
        cpus,
        mode,
        control: args.control.or(config.control),
        http: args.http.or(config.http),
        duration: args.duration.map(seconds).transpose()?,
        ageing_s: config.ageing.unwrap_or(AGEING_S),
        addresses_per_port: config.addresses_per_port.unwrap_or(ADDRESSES_PER_PORT),
        static_addresses,
        hints: !args.quiet,
    })
}

/// Longest duration taken, in seconds: thirty years. Beyond, clocks overflow.
const SECONDS_MAX: f64 = 1e9;

/// A duration given in seconds.
fn seconds(secs: f64) -> Result<Duration, String> {
    let duration = Duration::try_from_secs_f64(secs).ok().filter(|_| secs <= SECONDS_MAX);
    duration.ok_or_else(|| format!("{secs} is no length of time: use seconds, 0 to {SECONDS_MAX}"))
}
