//! `pvswitch manual DIR`: man pages and completions of shells, made from the command line's own
//! definition when a package is built.

use std::path::{Path, PathBuf};

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::cli::Cli;
use crate::error::AnyError;

/// Shells with completions, and the directory of each below the prefix of a package.
const SHELLS: [(Shell, &str); 3] = [
    (Shell::Bash, "share/bash-completion/completions"),
    (Shell::Zsh, "share/zsh/vendor-completions"),
    (Shell::Fish, "share/fish/vendor_completions.d"),
];

/// `manual`.
#[derive(Args)]
pub struct ManualArgs {
    /// Prefix of a package, such as debian/usr: writes share/man and the completions below it
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
}

/// Writes all of it.
pub fn command(args: &ManualArgs) -> Result<(), AnyError> {
    write(&args.dir).map_err(|error| format!("manual {}: {error}", args.dir.display()).into())
}

fn write(prefix: &Path) -> std::io::Result<()> {
    let pages = prefix.join("share/man/man1");
    std::fs::create_dir_all(&pages)?;
    clap_mangen::generate_to(Cli::command(), &pages)?;
    for (shell, dir) in SHELLS {
        let dir = prefix.join(dir);
        std::fs::create_dir_all(&dir)?;
        let mut text = Vec::new();
        clap_complete::generate(shell, &mut Cli::command(), "pvswitch", &mut text);
        // bash looks for the name of the command alone.
        let name = match shell {
            Shell::Bash => "pvswitch",
            Shell::Zsh => "_pvswitch",
            _ => "pvswitch.fish",
        };
        std::fs::write(dir.join(name), text)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page_and_every_shell_its_options() {
        let dir = std::env::temp_dir().join(format!("pvs-manual-{}", std::process::id()));
        write(&dir).unwrap();
        let read = |name: &str| std::fs::read_to_string(dir.join(name)).unwrap();
        for command in Cli::command().get_subcommands().filter(|c| !c.is_hide_set()) {
            let name = command.get_name();
            let page = read(&format!("share/man/man1/pvswitch-{name}.1"));
            assert!(page.contains(".SH NAME") && page.contains(".SH SYNOPSIS"), "{name}");
            let listed = format!("pvswitch\\-{}(1)", name.replace('-', "\\-"));
            assert!(read("share/man/man1/pvswitch.1").contains(&listed), "{listed}");
        }
        assert!(!dir.join("share/man/man1/pvswitch-manual.1").exists());
        for name in [
            "share/bash-completion/completions/pvswitch",
            "share/zsh/vendor-completions/_pvswitch",
            "share/fish/vendor_completions.d/pvswitch.fish",
        ] {
            let text = read(name);
            assert!(text.contains("placement") && text.contains("add-port"), "{name}");
        }
        std::fs::remove_dir_all(dir).unwrap();
    }
}
