//! Fuzz targets. Each is a module with `run`, which must not fail for any bytes, and `seeds`, start
//! inputs for mutation.
//!
//! * `cargo xtask fuzz`: guided by coverage (cargo-fuzz, libFuzzer), from the committed inputs in
//!   `corpus/` on, which it extends and minimises.
//! * `cargo +nightly fuzz run ring_image`: one target, without a time limit.
//! * `cargo test` in this directory: a short seeded run on the stable toolchain, part of CI.
//! * `cargo run --bin ring_image -- FILE`: repeats one input, on the stable toolchain.

pub mod config_file;
pub mod dirty_log;
pub mod http_request;
pub mod mutate;
pub mod poll_policy;
mod racer;
pub mod ring_image;
pub mod ring_race;
pub mod stream_frames;
pub mod tenant_rules;
pub mod vhost_user_stream;
pub mod vnet_frame;
pub mod xen_ring;
pub mod xenstore;

use ring::virtq::Features;

/// Program of a target without libFuzzer: runs the files named on the command line, or writes the
/// start inputs into a directory: `--seeds DIR`.
pub fn replay(run: fn(&[u8]), seeds: fn() -> Vec<Vec<u8>>) {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let failed = |path: &std::path::Path, error: std::io::Error| -> ! {
        eprintln!("{}: {error}", path.display());
        std::process::exit(1);
    };
    if let [option, directory] = &arguments[..]
        && option == "--seeds"
    {
        for (number, seed) in seeds().iter().enumerate() {
            let path = std::path::Path::new(directory).join(format!("seed-{number:02}"));
            std::fs::write(&path, seed).unwrap_or_else(|error| failed(&path, error));
        }
        return;
    }
    for path in arguments.iter().map(std::path::Path::new) {
        run(&std::fs::read(path).unwrap_or_else(|error| failed(path, error)));
    }
}

/// The committed inputs of a target, in the order of their names: those that `cargo xtask fuzz`
/// found to reach something new.
pub fn corpus(target: &str) -> Vec<Vec<u8>> {
    let directory = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths.iter().filter_map(|path| std::fs::read(path).ok()).collect()
}

/// Features of a ring, by the lower bits of a byte.
fn features(bits: u8) -> Features {
    Features {
        packed: bits & 1 != 0,
        event_idx: bits & 2 != 0,
        indirect: bits & 4 != 0,
        in_order: bits & 8 != 0,
    }
}

/// Reader of an input's bytes; returns zeroes at the end.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn u8(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes([self.u8(), self.u8()])
    }

    fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }
}
