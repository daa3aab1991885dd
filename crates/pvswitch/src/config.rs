//! Where the configuration of a run comes from, and `pvswitch check`.

use std::path::{Path, PathBuf};

use api::Config;
use api::file::{File, Problem, Problems};
use serde_json::json;

use crate::cli::CheckArgs;
use crate::error::AnyError;

/// The file and the command line of a run.
#[derive(Clone, Debug, Default)]
pub struct Origin {
    /// The file of `--config`, absolute.
    pub file: Option<PathBuf>,
    /// Settings and ports of the command line, which take precedence.
    pub command_line: Config,
}

/// What [`Origin::reload`] reads.
pub struct Reloaded {
    /// The file merged with the command line.
    pub config: Config,
    /// The include directory.
    pub include: Option<PathBuf>,
    /// What is valid and probably not meant.
    pub warnings: Vec<Problem>,
}

impl Origin {
    /// Reads the file, and merges it with the command line. Returns the configuration and the
    /// include directory.
    pub fn load(&self) -> Result<(Config, Option<PathBuf>), Problems> {
        let file = self.file.as_deref().map(File::load).transpose()?.unwrap_or_default();
        let include = file.include.clone();
        Ok((file.with(self.command_line.clone())?, include))
    }

    /// Loads the configuration of a running switch: as [`load`](Self::load), but a file without a
    /// key is an error, because it is more likely being written than meant to remove all ports.
    pub fn reload(&self, path: &Path) -> Result<Reloaded, Problems> {
        let file = File::load(path)?;
        if file.empty {
            let what = format!(
                "{} is empty; if it is still being written, reload again; to remove ports, use \
                 ctl del-port",
                path.display()
            );
            return Err(Problem::new(Some(path), what).into());
        }
        let config = file.with(self.command_line.clone())?;
        let warnings = file.located(config.warnings());
        Ok(Reloaded { config, include: file.include, warnings })
    }
}

/// Runs `pvswitch check`. Returns whether the file is valid.
pub fn check(args: &CheckArgs) -> Result<bool, AnyError> {
    let Some(path) = &args.file else {
        print!("{}", api::json_schema::text());
        return Ok(true);
    };
    let loaded = File::load(path).and_then(|file| {
        let config = file.with(Config::default())?;
        Ok((config, file.included.len(), file.warnings()))
    });
    let file = path.display().to_string();
    match loaded {
        Ok((config, included, warnings)) if args.json => {
            let ports = config.ports.len();
            let value = json!({
                "ok": true, "file": file, "problems": [], "warnings": warnings, "ports": ports,
                "included": included,
            });
            println!("{value}");
            Ok(true)
        }
        Ok((config, included, warnings)) => {
            warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
            let count =
                |n: usize, what: &str| format!("{n} {what}{}", if n == 1 { "" } else { "s" });
            let include = match included {
                0 => String::new(),
                n => format!(", {}", count(n, "included file")),
            };
            println!("{file}: valid, {}{include}", count(config.ports.len(), "port"));
            Ok(true)
        }
        Err(Problems(problems)) => {
            if args.json {
                println!("{}", json!({ "ok": false, "file": file, "problems": problems }));
            } else {
                problems.iter().for_each(|problem| eprintln!("{problem}"));
            }
            Ok(false)
        }
    }
}
