//! The command line, as `pvswitch lab` shows it. It is a contract: scripts rely on it.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// Measure: studies of polling, workers, notifications and copies, with reports.
#[derive(Parser)]
#[command(name = "pvswitch-lab", bin_name = "pvswitch lab", version)]
#[command(max_term_width = 100, after_help = EXAMPLES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const EXAMPLES: &str = "\
Examples:
  pvswitch lab list
  pvswitch lab run polling --quick
      Under five minutes; the report is pvswitch-lab-polling/report.html
  pvswitch lab run polling --only guests=1,3 --only policy=event,adaptive --repeats 5 --dry-run
      Which cells that would be, and how long it would take
  pvswitch lab run fairness --full --out results
      As the seed did it; interrupted, the same command goes on
  pvswitch lab report results";

const RUN_HELP: &str = "\
Everything is started in namespaces of its own; nothing is left behind. Without root, user
namespaces must be allowed. Guests in User-Mode Linux (--guest uml; Debian package user-mode-linux)
or in QEMU's emulation (--guest qemu; packages qemu-system-x86, busybox-static, linux-image-amd64)
have a stock driver: cells that ask for our own front end's policies fail, and say so. A kernel need
not be installed: apt-get download it, dpkg -x PACKAGE DIR, --kernel DIR. A PLAN is a plan.toml, as
each folder of results has one.
Exit status: 0 measured; 1 nothing could be, or --assert found otherwise; 2 bad usage;
130, 143 interrupted: the same command goes on.";

/// Subcommands.
#[derive(Subcommand)]
pub enum Command {
    /// The studies, their questions, and how long they take
    List {
        /// Print JSON: axes and measures too
        #[arg(long)]
        json: bool,
    },
    /// Measure a study, and write a report
    #[command(after_help = RUN_HELP)]
    Run(Box<RunArgs>),
    /// Write the report of results again; of several machines' into the first folder
    Report {
        /// Folders of results of one study
        #[arg(required = true, value_name = "DIR")]
        folders: Vec<PathBuf>,
    },
    /// Both ends of what runs commands in a guest; for the lab itself
    #[command(hide = true)]
    Guest {
        /// Which end.
        #[command(subcommand)]
        end: Guest,
    },
}

/// `guest`.
#[derive(Subcommand)]
pub enum Guest {
    /// Serve as the first program of a guest
    Serve {
        /// How it is set up
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        setup: Vec<String>,
    },
    /// Run a command in a guest
    Run {
        /// Where its channels are
        folder: PathBuf,
        /// Program and arguments
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
}

/// `run`.
#[derive(Args)]
pub struct RunArgs {
    /// Its name, as lab list has it
    pub study: String,
    /// The fewest cells that show the main result; under a minute
    #[arg(long, group = "scale")]
    pub smallest: bool,
    /// Under five minutes on two CPUs
    #[arg(long, group = "scale")]
    pub quick: bool,
    /// The seed's whole matrix with its own times; hours
    #[arg(long, group = "scale")]
    pub full: bool,
    /// Cells, repeats and seconds from a file
    #[arg(long, value_name = "FILE", group = "scale")]
    pub plan: Option<PathBuf>,
    /// Only these values of an axis; may be repeated
    #[arg(long, value_name = "AXIS=V,V")]
    pub only: Vec<String>,
    /// How often each cell is measured
    #[arg(long, value_name = "N")]
    pub repeats: Option<u32>,
    /// Seconds measured in each run
    #[arg(long, value_name = "S")]
    pub seconds: Option<f64>,
    /// Folder of results; measured already: goes on [default: pvswitch-lab-STUDY]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// What guests speak: virtio or xen
    #[arg(long, value_name = "PROTO")]
    pub proto: Option<String>,
    /// What guests are: netns; uml or qemu: a kernel of their own with its virtio-net driver
    #[arg(long, value_name = "KIND")]
    pub guest: Option<String>,
    /// Folder of an unpacked linux-image package, for --guest qemu [default: the one installed]
    #[arg(long, value_name = "DIR")]
    pub kernel: Option<PathBuf>,
    /// CPUs of the switch: 0 or 0,1 [default: the first half]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub switch_cpus: Vec<usize>,
    /// CPUs of guests [default: the second half]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub guest_cpus: Vec<usize>,
    /// Exit with 1 unless the counts show the seed's main result
    #[arg(long = "assert")]
    pub judge: bool,
    /// Print cells and time, and measure nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Print the summary as JSON on standard output
    #[arg(long)]
    pub json: bool,
}
