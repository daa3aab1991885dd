//! `pvswitch capture`: a port's frames as pcapng, to a file or a pipe.

use std::fs::File;
use std::io::{BufWriter, IsTerminal, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use switch::forward::Port;
use uplink::{Direction, PcapCount, PcapWriter};

use api::Request;
use api::control::{Client, default_path};
use api::http::{PCAPNG, Response};

use crate::clock::Clock;
use crate::demo::format::plural;
use crate::{AnyError, Usage};

/// Maximum number of frames queued for the reader; further frames are lost and counted.
const QUEUE_FRAMES: usize = 4096;
/// Time after which frames are passed on, and it is checked whether the reader is there.
const CHECKED_EVERY: Duration = Duration::from_millis(100);

/// Streams `port`'s frames to `client` until it disconnects. Runs in the switch.
///
/// # Errors
/// Out of descriptors, or of memory for a thread.
pub fn start(port: Arc<Port>, client: UnixStream, clock: Clock) -> std::io::Result<()> {
    // All that can fail is before the first frame, but for the thread.
    let writer = BufWriter::new(client.try_clone()?);
    client.set_nonblocking(false)?;
    let (sink, frames) = sync_channel(QUEUE_FRAMES);
    let wall_ns = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    // Without a battery the wall clock may show less than the time since the start.
    let epoch_ns = wall_ns.saturating_sub(clock.elapsed().as_nanos()) as u64;
    let lost_before = port.mirror.lost.load(Ordering::Relaxed);
    port.mirror.set(Some(sink));
    let mirrored = Arc::clone(&port);
    let thread = std::thread::Builder::new().name("capture".into());
    let thread = os::spawn(thread, os::ThreadKind::Capture, move || {
        let copy = || -> std::io::Result<()> {
            let head = Response::stream(PCAPNG).bytes(SystemTime::now(), true, false);
            (&client).write_all(&head)?;
            let mut pcap = PcapWriter::new(writer, &port.name, 0)?;
            pcap.flush()?;
            let (mut seen, mut checked) = (0, clock.now());
            loop {
                match frames.recv_timeout(CHECKED_EVERY) {
                    Ok(frame) => {
                        let way =
                            if frame.ingress { Direction::Ingress } else { Direction::Egress };
                        let len = frame.bytes.len() as u32;
                        pcap.frame(way, epoch_ns + frame.at.ns(), len, &frame.bytes)?;
                        seen += 1;
                        // Frames may come without a pause.
                        if frame.at < checked + CHECKED_EVERY.into() {
                            continue;
                        }
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return Ok(()),
                }
                checked = clock.now();
                pcap.flush()?;
                if closed(&client) {
                    let lost = port.mirror.lost.load(Ordering::Relaxed) - lost_before;
                    pcap.finish(epoch_ns + checked.ns(), seen, lost)?;
                    return Ok(());
                }
            }
        };
        if let Err(error) = copy() {
            tracing::debug!("capture of port {}: {error}", port.name);
        }
        port.mirror.set(None);
    });
    if thread.is_err() {
        mirrored.mirror.set(None);
    }
    thread.map(drop)
}

/// Whether the reader has closed its end. It sends nothing, so readable means closed.
fn closed(client: &UnixStream) -> bool {
    let _ = client.set_nonblocking(true);
    let mut byte = [0];
    let mut reader = client;
    let got = reader.read(&mut byte);
    let _ = client.set_nonblocking(false);
    matches!(got, Ok(0))
}

/// Copies the stream to `to` (`-`: standard output) until interrupted, and prints a count.
pub fn command(control: Option<PathBuf>, port: &str, to: &str) -> Result<(), AnyError> {
    if to == "-" && std::io::stdout().is_terminal() {
        let what = format!(
            "a capture is binary, and standard output is a terminal: use -w FILE, or a pipe: \
             pvswitch capture {port} | wireshark -k -i -"
        );
        return Err(Usage(what).into());
    }
    let control = control.map_or_else(default_path, Ok)?;
    let out = Output::open(to).map_err(|error| no_file(to, &error))?;
    let request = Request::Capture { name: port.into() };
    let mut stream = match Client::connect(&control).and_then(|client| client.open(&request)) {
        Ok(started) => started,
        Err(error) => {
            out.undo();
            return Err(error.into());
        }
    };
    out.begin().map_err(|error| no_file(to, &error))?;
    let mut out = out.writer;
    stream.get_ref().set_read_timeout(None)?;
    let signal_end = stream.get_ref().try_clone()?;
    // An interrupt shuts down our end; the switch then sends the closing block, which is still
    // read.
    let ends = crate::signals::readable()?;
    std::thread::spawn(move || {
        let _ = (&ends).read(&mut [0]);
        let _ = signal_end.shutdown(std::net::Shutdown::Write);
    });
    let mut count = PcapCount::default();
    let mut buffer = [0; 65536];
    loop {
        let n = stream.read(&mut buffer)?;
        if n == 0 {
            break;
        }
        count.take(&buffer[..n]);
        match out.write_all(&buffer[..n]).and_then(|()| out.flush()) {
            // The reader of our pipe (Wireshark) was closed: the usual end of a capture.
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => break,
            result => result.map_err(|error| no_file(to, &error))?,
        }
    }
    let place = if to == "-" { String::new() } else { format!(" to {to}") };
    let frames = plural(count.frames, "frame");
    match count.lost {
        Some(0) => eprintln!("captured {frames}{place}"),
        Some(lost) => eprintln!(
            "captured {frames}{place}; lost {}, because they were read too slowly",
            plural(lost, "frame")
        ),
        None => eprintln!("captured {frames}{place}; the number of lost frames is not known"),
    }
    Ok(())
}

/// Where a capture goes. The file is opened before the capture starts and emptied after: neither a
/// wrong path nor a wrong port changes anything.
struct Output {
    writer: Box<dyn Write>,
    /// The regular file to empty.
    file: Option<File>,
    /// The file, if it was created here.
    created: Option<PathBuf>,
}

impl Output {
    fn open(to: &str) -> std::io::Result<Self> {
        if to == "-" {
            return Ok(Self { writer: Box::new(std::io::stdout()), file: None, created: None });
        }
        let created = (!Path::new(to).exists()).then(|| to.into());
        let file = File::options().write(true).create(true).truncate(false).open(to)?;
        let regular = file.metadata()?.is_file();
        let copy = if regular { Some(file.try_clone()?) } else { None };
        Ok(Self { writer: Box::new(file), file: copy, created })
    }

    fn begin(&self) -> std::io::Result<()> {
        self.file.as_ref().map_or(Ok(()), |file| file.set_len(0))
    }

    fn undo(&self) {
        if let Some(path) = &self.created {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Error for a file that cannot be written.
fn no_file(path: &str, error: &std::io::Error) -> AnyError {
    use std::io::ErrorKind::{FileTooLarge, IsADirectory, NotFound, PermissionDenied, StorageFull};
    let advice = match error.kind() {
        NotFound => "; its directory does not exist: create it, or choose another path",
        PermissionDenied | IsADirectory => "; choose another path",
        StorageFull => "; free some space; the file ends in the middle of a frame",
        FileTooLarge => {
            "; raise the limit of file sizes (ulimit -f); the file ends in the middle of a frame"
        }
        _ => "",
    };
    format!("-w {path}: cannot write this file: {error}{advice}").into()
}
