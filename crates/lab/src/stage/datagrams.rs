//! A thread that sends UDP datagrams, paced or as fast as its socket accepts them: traffic that
//! enters a switch from the kernel's network stack.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, LinkNameSpaceType, move_into_link_name_space, sched_setaffinity};

use super::Namespace;
use crate::error::Fail;

/// Payload of the shortest Ethernet frame: 18 bytes after the headers of IPv4 and UDP.
const PAYLOAD: [u8; 18] = [0; 18];

/// Interval at which a paced sender sends.
const SEND_INTERVAL: Duration = Duration::from_millis(1);

/// A thread in a namespace that sends minimum-size datagrams until this is dropped.
#[derive(Debug)]
pub struct Datagrams {
    running: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Datagrams {
    /// Sends to the addresses round-robin on `cpus`: `rate` datagrams per second, or as many as
    /// the socket accepts. Datagrams that the kernel rejects are lost.
    ///
    /// # Errors
    ///
    /// The namespace cannot be entered, or has no route to one of the addresses.
    pub fn start(
        netns: &Namespace,
        cpus: &[usize],
        to: &[SocketAddr],
        rate: Option<u32>,
    ) -> Result<Self, Fail> {
        let running = Arc::new(AtomicBool::new(true));
        let (keep_running, cpus, to) = (running.clone(), cpus.to_vec(), to.to_vec());
        let path = netns.path();
        let (ready, started) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || match sockets(&path, &cpus, &to) {
            Err(error) => drop(ready.send(Err(error))),
            Ok(sockets) => {
                drop(ready.send(Ok(())));
                let (began, mut sent) = (Instant::now(), 0_u64);
                for socket in sockets.iter().cycle() {
                    let due = rate.map(|rate| began.elapsed().as_secs_f64() * f64::from(rate));
                    if due.is_some_and(|due| sent as f64 > due) {
                        std::thread::sleep(SEND_INTERVAL);
                    }
                    if !keep_running.load(Ordering::Relaxed) {
                        break;
                    }
                    let _ = socket.send(&PAYLOAD);
                    sent += 1;
                }
            }
        });
        let datagrams = Self { running, thread: Some(thread) };
        let result = started.recv().unwrap_or_else(|_| Err("its thread ended".into()));
        result.map_err(|why| Fail::Cell(format!("datagrams in {}: {why}", netns.path())))?;
        Ok(datagrams)
    }
}

/// Moves the calling thread into a namespace and opens a socket there for each address.
fn sockets(path: &str, cpus: &[usize], to: &[SocketAddr]) -> Result<Vec<UdpSocket>, String> {
    let text = |error: std::io::Error| error.to_string();
    let namespace = std::fs::File::open(path).map_err(text)?;
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
        .map_err(|error| text(error.into()))?;
    if !cpus.is_empty() {
        let mut set = CpuSet::new();
        cpus.iter().for_each(|cpu| set.set(*cpu));
        sched_setaffinity(None, &set).map_err(|error| text(error.into()))?;
    }
    let connected = |to: &SocketAddr| {
        let socket = UdpSocket::bind(("0.0.0.0", 0))?;
        socket.connect(to)?;
        Ok(socket)
    };
    to.iter().map(|to| connected(to).map_err(|error| format!("{to}: {}", text(error)))).collect()
}

impl Drop for Datagrams {
    fn drop(&mut self) {
        self.running.store(false, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
