//! Cases with file descriptors of the wrong kind, or too many of them.

use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::net::sockopt;
use vhost_user::message::{FrontendReq as R, MemRegion, NO_FD, VringState};

use super::wire::{BUFFERS, FEATURES, GUEST, RX, TX, USER, addr, memfd, whole};
use crate::{Attack, Error};

/// A TCP socket that is slow to close and cannot be written to: it lingers for a second, and its
/// unsent data exceeds what its peer reads. The other value holds the peer.
fn lingering() -> Result<(OwnedFd, TcpStream), Error> {
    let listener = TcpListener::bind(("127.0.0.1", 0))?;
    let socket = TcpStream::connect(listener.local_addr()?)?;
    let (peer, _) = listener.accept()?;
    sockopt::set_socket_linger(&socket, Some(Duration::from_secs(1)))?;
    socket.set_nonblocking(true)?;
    let fill = [0; 65_536];
    while rustix::io::write(&socket, &fill).is_ok() {}
    socket.set_nonblocking(false)?;
    Ok((socket.into(), peer))
}

/// Such a socket in place of each descriptor; ours is closed, so the switch has the last reference.
pub fn blocking(attack: &mut Attack<'_>) -> Result<(), Error> {
    // Their peers are alive and read nothing: closing waits for them.
    let mut peers = Vec::new();
    let memory = [
        (R::SET_MEM_TABLE, MemRegion::table_to_bytes(&[whole()])),
        (R::ADD_MEM_REG, whole().to_single_bytes()),
        // With a message that takes none.
        (R::GET_FEATURES, Vec::new()),
        (R::SET_LOG_FD, Vec::new()),
    ];
    for way in (0..memory.len() + 4).cycle() {
        let Some(raw) = attack.raw()? else { return Ok(()) };
        let (socket, peer) = lingering()?;
        peers.push(peer);
        if peers.len() > 64 {
            peers.remove(0);
        }
        if !raw.negotiate(FEATURES) {
            attack.tally.turned_away += 1;
            continue;
        }
        let fds = [socket.as_fd()];
        let number = u64::from(TX).to_ne_bytes().to_vec();
        match way.checked_sub(memory.len()) {
            None => {
                let (request, payload) = memory[way].clone();
                raw.send(request, payload, false, &fds);
            }
            // It is never read from the socket.
            Some(3) => drop(os::send(raw.stream.as_fd(), &[1], &fds)),
            // As call, error or kick fd of a running ring.
            Some(i) => {
                let request = [R::SET_VRING_CALL, R::SET_VRING_ERR, R::SET_VRING_KICK][i];
                if raw.share() && raw.ring(RX) && raw.place(TX, addr(TX), super::wire::SIZE) {
                    raw.send(request, number.clone(), false, &fds);
                    if request != R::SET_VRING_KICK {
                        raw.send(R::SET_VRING_KICK, number, false, &[raw.event.as_fd()]);
                    }
                    let on = VringState { index: TX, num: 1 }.to_bytes();
                    raw.send(R::SET_VRING_ENABLE, on, false, &[]);
                    // It wants calls for what it sent.
                    raw.chain(TX, &[(BUFFERS, 72, 0)]);
                }
            }
        }
        attack.tally.attempts += 1;
        drop(socket);
        attack.tally.ended += u64::from(raw.is_closed(Duration::from_millis(20)));
    }
    Ok(())
}

/// A full pipe as call fd, a saturated eventfd as kick fd, and files of other kinds.
pub fn other_kinds(attack: &mut Attack<'_>) -> Result<(), Error> {
    let index = |ring: u32| u64::from(ring).to_ne_bytes().to_vec();
    while let Some(raw) = attack.raw()? {
        if !(raw.negotiate(FEATURES) && raw.share()) {
            attack.tally.turned_away += 1;
            attack.rest(Duration::from_millis(5));
            continue;
        }
        let (_read, full) = os::pipe()?;
        while rustix::io::write(&full, &[0; 4096]).is_ok() {}
        os::set_nonblocking(full.as_fd());
        let null: OwnedFd = std::fs::File::open("/dev/null")?.into();
        let folder: OwnedFd = std::fs::File::open("/")?.into();
        let (ours, _theirs) = std::os::unix::net::UnixStream::pair()?;
        let fds = [full.as_fd(), null.as_fd(), folder.as_fd(), ours.as_fd(), raw.file.as_fd()];
        let mut continues = true;
        for fd in fds {
            for request in [R::SET_VRING_CALL, R::SET_VRING_KICK] {
                continues = continues
                    && raw.place(TX, addr(TX), super::wire::SIZE)
                    && attack.count_reply(raw.request(request, index(TX), &[fd]));
            }
        }
        for fd in fds.iter().take(4) {
            let table = MemRegion::table_to_bytes(&[whole()]);
            continues =
                continues && attack.count_reply(raw.request(R::SET_MEM_TABLE, table, &[*fd]));
        }
        attack.rest(Duration::from_millis(1));
    }
    Ok(())
}

/// Rings without a kick fd, which must be polled.
pub fn polled(attack: &mut Attack<'_>) -> Result<(), Error> {
    while let Some(raw) = attack.raw()? {
        if !(raw.negotiate(FEATURES) && raw.share()) {
            attack.tally.turned_away += 1;
            attack.rest(Duration::from_millis(5));
            continue;
        }
        for ring in [RX, TX] {
            let number = (u64::from(ring) | NO_FD).to_ne_bytes().to_vec();
            if raw.place(ring, addr(ring), super::wire::SIZE) {
                attack.count_reply(raw.request(R::SET_VRING_KICK, number, &[]));
                raw.request(R::SET_VRING_ENABLE, super::wire::state(ring, 1), &[]);
            }
        }
        while attack.on() && !raw.is_closed(Duration::ZERO) {
            attack.rest(Duration::from_millis(20));
        }
    }
    Ok(())
}

/// Sends as many descriptors as fit a message, with messages that take none or one, and inside
/// messages that never end.
pub fn many(attack: &mut Attack<'_>) -> Result<(), Error> {
    let file = memfd(4096)?;
    let fds = vec![file.as_fd(); 32];
    while let Some(raw) = attack.raw()? {
        let region = MemRegion { guest_addr: GUEST, size: 4096, user_addr: USER, mmap_offset: 0 };
        for (request, payload) in [
            (R::GET_FEATURES, Vec::new()),
            (R::SET_VRING_CALL, vec![0; 8]),
            (R::ADD_MEM_REG, region.to_single_bytes()),
            (R::SET_MEM_TABLE, MemRegion::table_to_bytes(&[region])),
            (R::GET_INFLIGHT_FD, vec![0; 24]),
            (R::SET_INFLIGHT_FD, vec![0; 24]),
            (R::SET_BACKEND_REQ_FD, Vec::new()),
            (R::SET_LOG_BASE, vec![0; 16]),
        ] {
            raw.send(request, payload, false, &fds);
            attack.tally.attempts += 1;
        }
        let header = [3_u32, 1, 400].map(u32::to_ne_bytes).concat();
        let _ = os::send(raw.stream.as_fd(), &header, &fds);
        let _ = os::send(raw.stream.as_fd(), &[0], &fds);
        attack.tally.ended += u64::from(raw.is_closed(Duration::from_millis(20)));
    }
    Ok(())
}

/// The size and the call fd of a ring set repeatedly, with a new descriptor each time.
pub fn leaks(attack: &mut Attack<'_>) -> Result<(), Error> {
    while let Some(raw) = attack.connect_and_start()? {
        for n in 0..1000_u32 {
            let number = u64::from(n % 2).to_ne_bytes().to_vec();
            let event = os::eventfd()?;
            let continues =
                attack.count_reply(raw.request(
                    R::SET_VRING_NUM,
                    super::wire::state(n % 2, 256),
                    &[],
                )) && attack.count_reply(raw.request(
                    R::SET_VRING_CALL,
                    number.clone(),
                    &[event.as_fd()],
                )) && attack.count_reply(raw.request(R::SET_VRING_ERR, number, &[event.as_fd()]));
            if !continues || !attack.on() {
                break;
            }
        }
    }
    Ok(())
}
