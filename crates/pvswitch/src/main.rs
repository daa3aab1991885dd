//! pvswitch: network back-end and virtual switch for virtual machines.

mod backend;
mod capture;
mod cli;
mod clock;
mod config;
mod cost;
mod ctl;
mod demo;
mod error;
mod generate;
mod hints;
mod http;
mod keeper;
mod lab;
mod limit;
mod log;
mod manual;
mod nic;
mod pin_xdp;
mod pool;
mod ports;
mod run;
mod save;
mod signals;
mod spec;
mod store_tap;
mod tap;
mod tenant;
mod top;
mod why;
mod worker;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use api::{Config, Settings};
use cli::{Cli, Command, RunArgs};
use config::Origin;
pub use error::{AnyError, Usage};
use os::{Priority, Sandbox};
use run::{Options, Start};
use spec::Access;
use switch::forward::Mode;
use switch::schedule::Placement;

fn main() -> ExitCode {
    exit_on_closed_stdout();
    outlive_file_limit();
    let Some(args) = backend::arguments(std::env::args_os()) else {
        backend::print_capabilities();
        return ExitCode::SUCCESS;
    };
    let cli = Cli::parse_or_exit(args);
    if !matches!(cli.command, Command::Run(_)) {
        // Its error is of journald only.
        let _ = log::init(log::Format::Human);
    }
    let result = match cli.command {
        Command::Run(args) if args.keep && !is_managed() => {
            match keeper::command(std::env::args_os().skip(1)) {
                Ok(code) => return code,
                Err(error) => Err(error),
            }
        }
        Command::Run(args) => run_command(args),
        Command::Check(args) => match config::check(&args) {
            Ok(false) => return ExitCode::FAILURE,
            result => result.map(drop),
        },
        Command::Top(args) => top::command(args),
        Command::Ctl(args) => ctl::command(args),
        Command::Capture(args) => capture::command(args.control, &args.port, &args.write),
        Command::Nic(args) => nic::command(&args),
        Command::Gen(args) => generate::command(&args),
        Command::VhostUserNet(args) => backend::command(args),
        Command::Demo(args) => demo::command(args),
        Command::Lab(args) => lab::command(args),
        Command::StoreTap(args) => store_tap::command(&args),
        Command::PinXdp(args) => pin_xdp::command(&args),
        Command::Manual(args) => manual::command(&args),
        Command::Helper => run::serve_helper(),
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

/// The reader of our output has closed it: exit without an error. `println!` panics in that case.
fn exit_on_closed_stdout() {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let message = panic.payload_as_str().unwrap_or_default();
        if message.starts_with("failed printing to stdout") && message.contains("Broken pipe") {
            std::process::exit(0);
        }
        hook(panic);
    }));
}

/// A file that reaches the limit of file sizes is an error of the write and not our end.
fn outlive_file_limit() {
    // That there is a handler is enough.
    let _ = signal_hook::flag::register(rustix::process::Signal::XFSZ.as_raw(), Arc::default());
}

fn is_broken_pipe(error: &(dyn std::error::Error + 'static)) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

/// Whether a service manager can keep descriptors for us.
fn is_managed() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some()
}

fn run_command(args: RunArgs) -> Result<(), AnyError> {
    let mut start = match &args {
        RunArgs { takeover: true, .. } => Start::takeover()?,
        RunArgs { keep: true, .. } | RunArgs { kept: true, .. } => Start::kept(args.keep)?,
        _ => Start::new()?,
    };
    if let Some(takeover) = &start.takeover {
        match taken_options(takeover) {
            Ok(options) => return Ok(run::run(options, start)?),
            Err(error) if takeover.is_after_kill() => start.discard(&error),
            Err(error) => {
                takeover.fail(&error);
                return Err(error);
            }
        }
    }
    let (options, log) = options(args).map_err(|error| Usage(error.to_string()))?;
    log::init(log)?;
    for (_, warning) in options.config.warnings().into_iter().take(api::file::PROBLEMS_MAX) {
        tracing::warn!("{warning}");
    }
    Ok(run::run(options, start)?)
}

/// Options of the switch that is taken over.
fn taken_options(takeover: &run::Takeover) -> Result<Options, AnyError> {
    let (config, origin, include, duration) = takeover.configuration()?;
    let (options, log) = options_of(config, origin, include)?;
    log::init(log)?;
    Ok(Options { duration, ..options })
}

/// Merges command line, configuration file and defaults, in this order of precedence.
fn options(args: RunArgs) -> Result<(Options, log::Format), AnyError> {
    let settings: Settings = args.settings.0;
    let hints = !settings.flag("quiet");
    let uplink = args.uplink.map(|kind| format!("uplink={kind}").parse());
    let uplink = uplink.transpose().expect("it has no argument that could be wrong");
    let bridges = args.evpn.into_iter().map(|bridge| bridge.0);
    let ports = args.ports.into_iter().chain(uplink).chain(bridges).collect();
    let command_line = Config { settings, ports, statics: Vec::new() };
    let file = args.config.map(std::path::absolute).transpose()?;
    let origin = Origin { file, command_line };
    let (config, include) = origin.load()?;
    let (options, log) = options_of(config, origin, include)?;
    Ok((Options { hints, ..options }, log))
}

/// Options of a run with this configuration.
fn options_of(
    config: Config,
    origin: Origin,
    include: Option<PathBuf>,
) -> Result<(Options, log::Format), AnyError> {
    let settings = &config.settings;
    let access = |socket: &str| Access {
        mode: settings.number(&format!("{socket}-mode")).map(|mode| mode as u32),
        group: settings.text(&format!("{socket}-group")).map(Into::into),
    };
    let (control_access, http_access) = (access("control"), access("http"));
    let control_write = settings.word("control-write") == Some("group");
    if control_write && control_access.group.is_none() {
        return Err("--control-write group: name the group with --control-group GROUP".into());
    }
    let is_inherited = settings.text("control").is_some_and(|at| at.starts_with(api::INHERITED));
    if is_inherited && control_access.mode.is_some() {
        return Err("--control-mode: the mode of an inherited socket is set where it is created: \
                    SocketMode= of the socket unit"
            .into());
    }
    let http = settings.address("http");
    if http_access != Access::default() && !matches!(http, Some(api::Address::Unix(_))) {
        return Err(
            "--http-mode and --http-group are for a Unix socket that the switch makes: use \
                    --http unix:PATH"
                .into(),
        );
    }
    let number = |name: &str| settings.number(name).expect("has a default");
    let policy = |name: &str| spec::policy(&settings.policy(name).expect("has a default"));
    // `auto`. xen-netback, which `xen:` ports replace, runs in interrupts: docs/xen.md.
    let priority = match settings.word("priority").and_then(Priority::named) {
        Some(priority) => priority,
        None if config.ports.iter().any(|port| port.kind == api::schema::port::Kind::Xen) => {
            Priority::high_if_permitted()
        }
        None => Priority::Normal,
    };
    let log = settings.word("log-format").and_then(log::Format::named).unwrap_or_default();
    let options = Options {
        policy: policy("poll"),
        call: policy("call"),
        workers: number("workers") as u8,
        placement: settings.word("placement").and_then(Placement::named).unwrap_or_default(),
        cpus: settings.cpus("cpus"),
        priority,
        sandbox: settings.word("sandbox").and_then(Sandbox::named).unwrap_or(Sandbox::On),
        mode: match settings.word("forward") {
            Some("cross") => Mode::Cross,
            _ => Mode::Switch,
        },
        control: settings.text("control").map(PathBuf::from),
        control_access,
        control_write,
        http,
        http_access,
        duration: settings.seconds("duration"),
        ageing_s: number("ageing") as u32,
        addresses_per_port: number("addresses_per_port") as u32,
        hints: false,
        config,
        origin,
        include,
    };
    Ok((options, log))
}
