//! `pvswitch capture`: a port's frames as pcapng, to a file or a pipe.

use std::io::{BufWriter, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use switch::forward::Port;
use uplink::{Direction, PcapWriter};

use api::control::{ControlError, Request, call};

use crate::clock::Clock;

/// Maximum number of frames queued for the reader; further frames are lost and counted.
const QUEUE_FRAMES: usize = 4096;

/// Streams `port`'s frames to `client` until it disconnects. Runs in the switch.
pub fn start(port: Arc<Port>, client: UnixStream, clock: Clock) -> Result<(), String> {
    if port.mirror.is_on() {
        return Err(format!("port '{}' is already being captured", port.name));
    }
    let error = |e: std::io::Error| format!("cannot capture: {e}");
    client.set_nonblocking(false).map_err(error)?;
    let (sink, frames) = sync_channel(QUEUE_FRAMES);
    let wall_ns = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let epoch_ns = (wall_ns - clock.elapsed().as_nanos()) as u64;
    let lost_before = port.mirror.lost.load(Ordering::Relaxed);
    port.mirror.set(Some(sink));
    let thread = std::thread::Builder::new().name("capture".into()).spawn(move || {
        let copy = || -> std::io::Result<()> {
            (&client).write_all(b"{\"ok\":true}\n")?;
            let mut pcap = PcapWriter::new(BufWriter::new(client.try_clone()?), &port.name, 0)?;
            pcap.flush()?;
            let mut seen = 0;
            loop {
                match frames.recv_timeout(Duration::from_millis(100)) {
                    Ok(frame) => {
                        let way =
                            if frame.ingress { Direction::Ingress } else { Direction::Egress };
                        let len = frame.bytes.len() as u32;
                        pcap.frame(way, epoch_ns + frame.at.ns(), len, &frame.bytes)?;
                        seen += 1;
                    }
                    Err(RecvTimeoutError::Timeout) => {
                        pcap.flush()?;
                        if closed(&client) {
                            let lost = port.mirror.lost.load(Ordering::Relaxed) - lost_before;
                            let now = epoch_ns + clock.now().ns();
                            pcap.finish(now, seen, lost)?;
                            return Ok(());
                        }
                    }
                    Err(RecvTimeoutError::Disconnected) => return Ok(()),
                }
            }
        };
        if let Err(error) = copy() {
            tracing::debug!("capture of port {}: {error}", port.name);
        }
        port.mirror.set(None);
    });
    thread.map(|_| ()).map_err(error)
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

/// Copies the stream to `to` (`-`: standard output) until interrupted.
pub fn command(control: &Path, port: &str, to: &str) -> Result<(), ControlError> {
    let (_, mut stream) = call(control, &Request::Capture { port: port.into() })?;
    stream.get_ref().set_read_timeout(None)?;
    let signal_end = stream.get_ref().try_clone()?;
    // An interrupt shuts down our end; the switch then sends the closing block, which is still
    // read.
    let ends = crate::signals::readable().map_err(ControlError::Io)?;
    std::thread::spawn(move || {
        let _ = (&ends).read(&mut [0]);
        let _ = signal_end.shutdown(std::net::Shutdown::Write);
    });
    let mut out: Box<dyn Write> = if to == "-" {
        Box::new(std::io::stdout().lock())
    } else {
        Box::new(std::fs::File::create(to)?)
    };
    let mut buffer = [0; 65536];
    loop {
        let n = stream.read(&mut buffer)?;
        if n == 0 {
            return Ok(());
        }
        match out.write_all(&buffer[..n]).and_then(|()| out.flush()) {
            // The reader of our pipe (Wireshark) was closed: the usual end of a capture.
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => return Ok(()),
            result => result?,
        }
    }
}
