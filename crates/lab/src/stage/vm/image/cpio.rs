//! Archives that Linux unpacks as its first file system: cpio's format "newc"
//! (`Documentation/driver-api/early-userspace/buffer-format.rst`).

use std::fmt::Write as _;

const FILE: u32 = 0o100_000;
const FOLDER: u32 = 0o040_000;
const CHARACTERS: u32 = 0o020_000;

/// One that is being written.
#[derive(Default)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    pub fn folder(&mut self, path: &str) {
        self.add(path, FOLDER | 0o755, &[], (0, 0));
    }

    pub fn file(&mut self, path: &str, mode: u32, bytes: &[u8]) {
        self.add(path, FILE | mode, bytes, (0, 0));
    }

    /// A device of characters, by its numbers.
    pub fn device(&mut self, path: &str, numbers: (u32, u32)) {
        self.add(path, CHARACTERS | 0o600, &[], numbers);
    }

    /// Ends it.
    pub fn done(mut self) -> Vec<u8> {
        self.add("TRAILER!!!", 0, &[], (0, 0));
        self.bytes
    }

    fn add(&mut self, path: &str, mode: u32, bytes: &[u8], (major, minor): (u32, u32)) {
        self.entries += 1;
        // Nobody's module is as long as 4 GiB.
        let size = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let name_size = u32::try_from(path.len() + 1).unwrap_or(u32::MAX);
        let (owner, links, time, of_device, check) = ((0, 0), 1, 0, (0, 0), 0);
        let mut header = String::from("070701");
        for field in [
            self.entries,
            mode,
            owner.0,
            owner.1,
            links,
            time,
            size,
            of_device.0,
            of_device.1,
            major,
            minor,
            name_size,
            check,
        ] {
            let _ = write!(header, "{field:08X}");
        }
        self.bytes.extend(header.as_bytes());
        self.bytes.extend(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(bytes);
        self.pad();
    }

    /// Names and files end at multiples of four.
    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_is_as_the_kernel_reads_it() {
        let mut archive = Archive::default();
        archive.folder("dev");
        archive.device("dev/console", (5, 1));
        archive.file("init", 0o755, b"hello");
        let bytes = archive.done();
        let mut seen = Vec::new();
        let mut at = 0;
        let field = |at: usize, i: usize| {
            let digits = std::str::from_utf8(&bytes[at + 6 + 8 * i..at + 14 + 8 * i]).unwrap();
            usize::from_str_radix(digits, 16).unwrap()
        };
        while at < bytes.len() {
            assert_eq!(&bytes[at..at + 6], b"070701");
            let name_end = at + 110 + field(at, 11);
            let name = std::str::from_utf8(&bytes[at + 110..name_end - 1]).unwrap();
            let start = name_end.next_multiple_of(4);
            let end = start + field(at, 6);
            let numbers = (field(at, 9), field(at, 10));
            seen.push((name, field(at, 1), numbers, &bytes[start..end]));
            at = end.next_multiple_of(4);
        }
        let none = (0, 0);
        assert_eq!(
            seen,
            [
                ("dev", 0o040_755, none, &b""[..]),
                ("dev/console", 0o020_600, (5, 1), b""),
                ("init", 0o100_755, none, b"hello"),
                ("TRAILER!!!", 0, none, b""),
            ]
        );
    }
}
