//! The command line of `pvswitch lab`. It is a contract: scripts rely on it.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// Run studies of polling, workers, notifications and copies, with reports.
#[derive(Parser)]
#[command(name = "pvswitch-lab", bin_name = "pvswitch lab", version)]
#[command(max_term_width = 100, after_help = EXAMPLES)]
pub struct Cli {
    /// Subcommand.
    #[command(subcommand)]
    pub command: Command,
}

const EXAMPLES: &str = "\
Examples:
  pvswitch lab list
  pvswitch lab run polling --quick
      Under five minutes; the report is pvswitch-lab-polling/report.html
  pvswitch lab run polling --only guests=1,3 --only variant=event,adaptive --repeats 5 --dry-run
      Prints the cells, and how long they would take
  pvswitch lab run fairness --full --out results
      With the matrix of the original study; if interrupted, the same command resumes it
  pvswitch lab report results
  pvswitch lab report before after --out both
      Compares two folders: charts, ratios with intervals, and p
  pvswitch lab index docs/results --out reports
      All reports, and reports/index.html, which says what each can tell";

const RUN_HELP: &str = "\
All processes run in private namespaces, which are removed at the end. Without root, user
namespaces must be allowed. Guests in User-Mode Linux (--guest uml; Debian package user-mode-linux)
or in QEMU's emulation (--guest qemu; packages qemu-system-x86, busybox-static, linux-image-amd64)
have a stock driver: cells that need policies of our own front end fail with a message. The kernel
need not be installed: apt-get download PACKAGE, dpkg -x PACKAGE DIR, --kernel DIR. A PLAN is a
plan.toml, as in each folder of results.
Exit status: 0 success; 1 nothing was measured, or --assert failed; 2 bad usage; 130, 143
interrupted: the same command resumes.";

/// Subcommands.
#[derive(Subcommand)]
pub enum Command {
    /// List studies, their questions, and how long they take
    List {
        /// Print JSON, with axes and measures
        #[arg(long)]
        json: bool,
    },
    /// Run a study, and write a report
    #[command(after_help = RUN_HELP)]
    Run(Box<RunArgs>),
    /// Rewrite the report of results; of several folders, compare them in a report of its own
    Report {
        /// Folder of the report of several [default: pvswitch-lab-STUDY-all]
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// Folders of results of one study; the first is the base of comparisons
        #[arg(required = true, value_name = "DIR")]
        folders: Vec<PathBuf>,
    },
    /// Write the reports of all folders of results in a folder, and an index page of them
    Index {
        /// Folder of the page; each report is in a folder of its name in it
        #[arg(long, value_name = "DIR", default_value = "pvswitch-lab-index")]
        out: PathBuf,
        /// Folder of folders of results; nothing is written into them
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
    /// Store what a rig has measured as a folder of results; for rigs
    #[command(hide = true)]
    Import {
        /// JSON: axes, measures and runs
        file: PathBuf,
        /// The new folder
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
    },
    /// Run commands in a guest, at either end; for the lab itself
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
    /// Run as the first program of a guest
    Serve {
        /// Its set-up
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        setup: Vec<String>,
    },
    /// Run User-Mode Linux
    Uml {
        /// Its arguments
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Run a command in a guest
    Run {
        /// Folder of its channels
        folder: PathBuf,
        /// Program and arguments
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
}

/// `run`.
#[derive(Args)]
pub struct RunArgs {
    /// Name of the study, see lab list
    pub study: String,
    /// The fewest cells that show the main result; under a minute
    #[arg(long, group = "scale")]
    pub smallest: bool,
    /// Under five minutes on two CPUs
    #[arg(long, group = "scale")]
    pub quick: bool,
    /// The whole matrix and durations of the original study; hours
    #[arg(long, group = "scale")]
    pub full: bool,
    /// Cells, repeats and seconds from a file
    #[arg(long, value_name = "FILE", group = "scale")]
    pub plan: Option<PathBuf>,
    /// Only these values of an axis; may be repeated
    #[arg(long, value_name = "AXIS=V,V")]
    pub only: Vec<String>,
    /// Number of runs of each cell
    #[arg(long, value_name = "N")]
    pub repeats: Option<u32>,
    /// Seconds measured in each run
    #[arg(long, value_name = "S")]
    pub seconds: Option<f64>,
    /// Folder of results; existing ones are resumed [default: pvswitch-lab-STUDY]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Protocol of guests: virtio or xen
    #[arg(long, value_name = "PROTO")]
    pub proto: Option<String>,
    /// Kind of guests: netns; uml or qemu: with their own kernel and its virtio-net driver
    #[arg(long, value_name = "KIND")]
    pub guest: Option<String>,
    /// Folder of an unpacked linux-image package, for --guest qemu [default: the installed one]
    #[arg(long, value_name = "DIR")]
    pub kernel: Option<PathBuf>,
    /// CPUs of the switch: 0 or 0,1 [default: the first half]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub switch_cpus: Vec<usize>,
    /// CPUs of guests [default: the second half]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub guest_cpus: Vec<usize>,
    /// Exit with 1 unless counts confirm the main result of the original study
    #[arg(long = "assert")]
    pub judge: bool,
    /// Print cells and estimated time only
    #[arg(long)]
    pub dry_run: bool,
    /// Print the summary as JSON on standard output
    #[arg(long)]
    pub json: bool,
}
