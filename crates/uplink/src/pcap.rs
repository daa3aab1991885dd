//! Packet capture files: pcapng (draft-ietf-opsawg-pcapng), as Wireshark and tcpdump read them,
//! from a file or a pipe.
//!
//! A file is blocks: a section header, one interface, then packets, and at the end a block with the
//! counts of frames seen and lost. Every block has its type, its length, a body padded to four
//! bytes, and its length again; numbers are little-endian here.

use std::io::{self, Write};

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE_DESCRIPTION: u32 = 1;
const INTERFACE_STATISTICS: u32 = 5;
const ENHANCED_PACKET: u32 = 6;

const BYTE_ORDER_MAGIC: u32 = 0x1a2b_3c4d;
const LINKTYPE_ETHERNET: u16 = 1;

const OPT_END: u16 = 0;
const SHB_USERAPPL: u16 = 4;
const IF_NAME: u16 = 2;
const IF_TSRESOL: u16 = 9;
const EPB_FLAGS: u16 = 2;
const ISB_IFRECV: u16 = 4;
const ISB_IFDROP: u16 = 5;
/// `if_tsresol`: time stamps count 10^-9 s.
const NANOSECONDS: u8 = 9;

/// Direction of a captured frame, as seen by the switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the port into the switch.
    Ingress,
    /// From the switch to the port.
    Egress,
}

/// Writes one capture of one port.
pub struct PcapWriter<W: Write> {
    out: W,
    snap_len: u32,
    /// The block being written.
    block: Vec<u8>,
}

impl<W: Write> PcapWriter<W> {
    /// Starts a capture of `interface` that keeps at most `snap_len` bytes of each frame (0: all).
    ///
    /// # Errors
    /// Write errors of `out`.
    pub fn new(out: W, interface: &str, snap_len: u32) -> io::Result<Self> {
        let mut writer = Self { out, snap_len, block: Vec::with_capacity(2048) };
        writer.begin(SECTION_HEADER);
        writer.u32(BYTE_ORDER_MAGIC);
        writer.u16(1); // version 1.0
        writer.u16(0);
        writer.u64(u64::MAX); // length of the section: not known
        writer.option(SHB_USERAPPL, concat!("pvswitch ", env!("CARGO_PKG_VERSION")).as_bytes());
        writer.option(OPT_END, &[]);
        writer.end()?;
        writer.begin(INTERFACE_DESCRIPTION);
        writer.u16(LINKTYPE_ETHERNET);
        writer.u16(0); // reserved
        writer.u32(snap_len);
        writer.option(IF_NAME, interface.as_bytes());
        writer.option(IF_TSRESOL, &[NANOSECONDS]);
        writer.option(OPT_END, &[]);
        writer.end()?;
        Ok(writer)
    }

    /// Adds a frame of `len` bytes, of which `bytes` were kept, seen `at_ns` after 1970.
    ///
    /// # Errors
    /// Write errors of `out`.
    pub fn frame(
        &mut self,
        direction: Direction,
        at_ns: u64,
        len: u32,
        bytes: &[u8],
    ) -> io::Result<()> {
        let keep = if self.snap_len == 0 { len } else { len.min(self.snap_len) };
        let bytes = &bytes[..bytes.len().min(keep as usize)];
        self.begin(ENHANCED_PACKET);
        self.u32(0); // the interface
        self.time(at_ns);
        self.u32(bytes.len() as u32);
        self.u32(len);
        self.write_padded(bytes);
        let flags: u32 = match direction {
            Direction::Ingress => 0b01,
            Direction::Egress => 0b10,
        };
        self.option(EPB_FLAGS, &flags.to_le_bytes());
        self.option(OPT_END, &[]);
        self.end()
    }

    /// Flushes `out`, for a reader that follows live.
    ///
    /// # Errors
    /// Write errors of `out`.
    pub fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    /// Ends the capture: `seen` frames passed, `lost` of them were not captured. Returns `out`.
    ///
    /// # Errors
    /// Write errors of `out`.
    pub fn finish(mut self, at_ns: u64, seen: u64, lost: u64) -> io::Result<W> {
        self.begin(INTERFACE_STATISTICS);
        self.u32(0); // the interface
        self.time(at_ns);
        self.option(ISB_IFRECV, &seen.to_le_bytes());
        self.option(ISB_IFDROP, &lost.to_le_bytes());
        self.option(OPT_END, &[]);
        self.end()?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn begin(&mut self, block_type: u32) {
        self.block.clear();
        self.u32(block_type);
        self.u32(0); // the length, known at the end
    }

    fn end(&mut self) -> io::Result<()> {
        let len = self.block.len() as u32 + 4;
        self.u32(len);
        self.block[4..8].copy_from_slice(&len.to_le_bytes());
        self.out.write_all(&self.block)
    }

    fn option(&mut self, code: u16, value: &[u8]) {
        // The longest value is a name from the operator; longer ones are truncated.
        let value = &value[..value.len().min(usize::from(u16::MAX))];
        self.u16(code);
        self.u16(value.len() as u16);
        self.write_padded(value);
    }

    /// Appends `bytes`, padded to 32 bits.
    fn write_padded(&mut self, bytes: &[u8]) {
        self.block.extend_from_slice(bytes);
        self.block.resize(self.block.len().next_multiple_of(4), 0);
    }

    /// Writes a time stamp, upper half first.
    fn time(&mut self, ns: u64) {
        self.u32((ns >> 32) as u32);
        self.u32(ns as u32);
    }

    fn u16(&mut self, value: u16) {
        self.block.extend_from_slice(&value.to_le_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.block.extend_from_slice(&value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.block.extend_from_slice(&value.to_le_bytes());
    }
}

/// Bytes of a block's type and length.
const HEAD: usize = 8;
/// Longest block of which the body is kept: the statistics of an interface.
const KEPT_MAX: usize = 128;
/// Bytes before the options of an interface's statistics: type, length, interface, time.
const STATISTICS_HEAD: usize = 20;

/// Counts the frames of a stream that a [`PcapWriter`] made, while it passes.
#[derive(Debug, Default)]
pub struct PcapCount {
    /// Frames so far.
    pub frames: u64,
    /// Frames not captured; `None`: the stream has not ended yet.
    pub lost: Option<u64>,
    /// The block's bytes so far, at most [`KEPT_MAX`].
    block: Vec<u8>,
    /// Bytes of the block that are to be skipped.
    skip: usize,
}

impl PcapCount {
    /// Takes the next bytes of the stream.
    pub fn take(&mut self, mut bytes: &[u8]) {
        loop {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = &bytes[skipped..];
            // Type and length first, then what is kept of the rest.
            let kept = self.block_len().map_or(HEAD, |len| len.clamp(HEAD, KEPT_MAX));
            let more = (kept - self.block.len()).min(bytes.len());
            self.block.extend_from_slice(&bytes[..more]);
            bytes = &bytes[more..];
            match self.block_len() {
                Some(len) if self.block.len() >= len.min(KEPT_MAX) => self.end_block(len),
                _ if bytes.is_empty() => return,
                _ => {}
            }
        }
    }

    /// Length of the block, if its bytes so far contain it.
    fn block_len(&self) -> Option<usize> {
        let len = self.block.get(4..HEAD)?.try_into().expect("four bytes");
        Some(u32::from_le_bytes(len) as usize)
    }

    fn end_block(&mut self, len: usize) {
        let kind = u32::from_le_bytes(self.block[..4].try_into().expect("four bytes"));
        self.skip = len.saturating_sub(self.block.len());
        if kind == ENHANCED_PACKET {
            self.frames += 1;
        } else if kind == INTERFACE_STATISTICS {
            self.lost = self.option(ISB_IFDROP);
        }
        self.block.clear();
    }

    /// A number among the options of the statistics.
    fn option(&self, wanted: u16) -> Option<u64> {
        let mut options = self.block.get(STATISTICS_HEAD..)?;
        loop {
            let code = u16::from_le_bytes(options.get(..2)?.try_into().ok()?);
            let len = usize::from(u16::from_le_bytes(options.get(2..4)?.try_into().ok()?));
            let value = options.get(4..4 + len)?;
            if code == wanted {
                return Some(u64::from_le_bytes(value.try_into().ok()?));
            }
            options = options.get(4 + len.next_multiple_of(4)..)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn capture() -> Vec<u8> {
        let mut writer = PcapWriter::new(Vec::new(), "vm1", 96).unwrap();
        let frame: Vec<u8> = (0..61).collect();
        writer.frame(Direction::Ingress, 1_700_000_000_123_456_789, 61, &frame).unwrap();
        writer.frame(Direction::Egress, 1_700_000_000_123_456_790, 1500, &[7; 1500]).unwrap();
        writer.flush().unwrap();
        writer.finish(1_700_000_001_000_000_000, 5, 3).unwrap()
    }

    fn u32_at(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    /// Type and body of every block.
    fn blocks(mut file: &[u8]) -> Vec<(u32, &[u8])> {
        let mut all = Vec::new();
        while !file.is_empty() {
            let len = u32_at(file, 4) as usize;
            assert!(len.is_multiple_of(4) && u32_at(file, len - 4) as usize == len);
            all.push((u32_at(file, 0), &file[8..len - 4]));
            file = &file[len..];
        }
        all
    }

    #[test]
    fn blocks_are_well_formed_and_complete() {
        let file = capture();
        let blocks = blocks(&file);
        let types: Vec<u32> = blocks.iter().map(|b| b.0).collect();
        assert_eq!(types, [SECTION_HEADER, INTERFACE_DESCRIPTION, 6, 6, INTERFACE_STATISTICS]);
        let first = blocks[2].1;
        let time = u64::from(u32_at(first, 4)) << 32 | u64::from(u32_at(first, 8));
        assert_eq!(time, 1_700_000_000_123_456_789);
        assert_eq!((u32_at(first, 12), u32_at(first, 16)), (61, 61));
        assert_eq!(first[20..81], (0..61).collect::<Vec<u8>>());
        assert_eq!(first[84..], [2, 0, 4, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        let second = blocks[3].1;
        assert_eq!((u32_at(second, 12), u32_at(second, 16)), (96, 1500));
        let end = blocks[4].1;
        assert_eq!(end[16..24], 5_u64.to_le_bytes());
        assert_eq!(end[28..36], 3_u64.to_le_bytes());
    }

    #[test]
    fn frames_of_a_stream_are_counted_in_pieces_of_any_size() {
        let file = capture();
        for piece in [1, 3, 7, 64, 4096] {
            let mut count = PcapCount::default();
            let end = file.len() - 1;
            file[..end].chunks(piece).for_each(|bytes| count.take(bytes));
            assert_eq!((count.frames, count.lost), (2, None), "pieces of {piece}");
            count.take(&file[end..]);
            assert_eq!((count.frames, count.lost), (2, Some(3)), "pieces of {piece}");
        }
    }

    #[test]
    fn snap_length_zero_keeps_all() {
        let mut writer = PcapWriter::new(Vec::new(), "x", 0).unwrap();
        writer.frame(Direction::Ingress, 0, 9000, &[1; 9000]).unwrap();
        let file = writer.finish(0, 1, 0).unwrap();
        assert_eq!(u32_at(blocks(&file)[2].1, 12), 9000);
    }

    #[test]
    fn wireshark_reads_captures() {
        let path = std::env::temp_dir().join(format!("pvswitch-{}.pcapng", std::process::id()));
        std::fs::write(&path, capture()).unwrap();
        let fields = ["frame.interface_name", "frame.time_epoch", "frame.len", "frame.cap_len"];
        let mut command = std::process::Command::new("tshark");
        command.arg("-r").arg(&path).args(["-T", "fields", "-e", "frame.packet_flags_direction"]);
        command.args(fields.iter().flat_map(|f| ["-e", *f]));
        let output = command.output();
        std::fs::remove_file(&path).unwrap();
        let Ok(output) = output else {
            println!("skipped: tshark is not installed");
            return;
        };
        let text = String::from_utf8_lossy(&output.stdout);
        let lines: Vec<Vec<&str>> = text.lines().map(|l| l.split('\t').collect()).collect();
        assert_eq!(lines.len(), 2, "{text} {}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(lines[0][1..], ["vm1", "1700000000.123456789", "61", "61"]);
        assert_eq!(lines[1][1..], ["vm1", "1700000000.123456790", "1500", "96"]);
        assert!(lines[0][0].ends_with('1') && lines[1][0].ends_with('2'), "{text}");
    }

    #[test]
    fn full_disk_is_an_error() {
        struct Full;
        impl Write for Full {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::StorageFull.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let error = PcapWriter::new(Full, "x", 0).err().map(|e| e.kind());
        assert_eq!(error, Some(io::ErrorKind::StorageFull));
    }
}
