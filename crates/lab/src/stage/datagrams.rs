//! Datagrams of a thread, paced or as fast as a socket takes them: what enters a switch from a
//! network of the kernel's.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, LinkNameSpaceType, move_into_link_name_space, sched_setaffinity};

use super::Namespace;
use crate::error::Fail;

/// The least that an Ethernet frame holds: 18 bytes beside the headers of IPv4 and UDP.
const PAYLOAD: [u8; 18] = [0; 18];

/// How often a paced sender sends.
const TURN: Duration = Duration::from_millis(1);

/// A thread in a namespace that sends the shortest datagrams until it is dropped.
#[derive(Debug)]
pub struct Datagrams {
    on: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Datagrams {
    /// To these addresses in turn, on these CPUs; `rate` datagrams a second, or as many as pass.
    /// What the kernel does not take is lost, as it would be from a program that does not wait.
    ///
    /// # Errors
    ///
    /// The namespace cannot be entered, or has no way to one of them.
    pub fn start(
        netns: &Namespace,
        cpus: &[usize],
        to: &[SocketAddr],
        rate: Option<u32>,
    ) -> Result<Self, Fail> {
        let on = Arc::new(AtomicBool::new(true));
        let (goes_on, cpus, to) = (on.clone(), cpus.to_vec(), to.to_vec());
        let path = netns.path();
        let (ready, is_ready) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || match sockets(&path, &cpus, &to) {
            Err(error) => drop(ready.send(Err(error))),
            Ok(sockets) => {
                drop(ready.send(Ok(())));
                let (began, mut sent) = (Instant::now(), 0_u64);
                for socket in sockets.iter().cycle() {
                    let due = rate.map(|rate| began.elapsed().as_secs_f64() * f64::from(rate));
                    if due.is_some_and(|due| sent as f64 > due) {
                        std::thread::sleep(TURN);
                    }
                    if !goes_on.load(Ordering::Relaxed) {
                        break;
                    }
                    let _ = socket.send(&PAYLOAD);
                    sent += 1;
                }
            }
        });
        let started = Self { on, thread: Some(thread) };
        let begun = is_ready.recv().unwrap_or_else(|_| Err("its thread ended".into()));
        begun.map_err(|why| Fail::Cell(format!("datagrams in {}: {why}", netns.path())))?;
        Ok(started)
    }
}

/// Moves the calling thread into a namespace; a socket there for each address.
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
        self.on.store(false, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
