//! Fuzz targets. Each is a module with `run`, which must not fail for any bytes, and `seeds`, start
//! inputs for mutation.
//!
//! * `cargo +nightly fuzz run ring_image`: coverage-guided, without a time limit.
//! * `cargo test` in this directory: a short seeded run on the stable toolchain, part of CI.
//! * `cargo run --bin ring_image -- FILE`: repeats one input, on the stable toolchain.

pub mod http_request;
pub mod mutate;
pub mod poll_policy;
pub mod ring_image;
pub mod stream_frames;
pub mod vhost_user_stream;
pub mod vnet_frame;
pub mod xen_ring;
pub mod xenstore;

/// Runs the files named on the command line through `run`.
pub fn replay(run: fn(&[u8])) {
    for path in std::env::args_os().skip(1) {
        match std::fs::read(&path) {
            Ok(data) => run(&data),
            Err(error) => {
                eprintln!("{}: {error}", path.display());
                std::process::exit(1);
            }
        }
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
