use super::*;
use crate::backend::{Options, PROTOCOL_FEATURES};
use crate::fake::{Did, Fake};
use crate::message::{FrontendReq, MemRegion};
use ConnectionError as C;
use ProtocolError as E;
use shm::Mapping;
use std::sync::Arc;

fn pair() -> (UnixStream, Connection, Fake) {
    let (front, back) = UnixStream::pair().unwrap();
    let fake = Fake::default();
    let options = Options { protocol_features: PROTOCOL_FEATURES, account: Arc::default() };
    let backend = Backend::new(Box::new(fake.clone()), options);
    (front, Connection::new(back, backend), fake)
}

fn send(front: &UnixStream, bytes: &[u8]) {
    assert!(os::send(front.as_fd(), bytes, &[]).unwrap());
}

fn header(request: u32, flags: u32, size: u32) -> Vec<u8> {
    [request, flags, size].map(u32::to_ne_bytes).concat()
}

fn fails(bytes: &[u8]) -> C {
    let (front, mut connection, _) = pair();
    send(&front, bytes);
    drop(front);
    loop {
        if let Err(error) = connection.on_readable() {
            assert!(!error.to_string().is_empty());
            return error;
        }
    }
}

#[test]
fn invalid_headers_end_the_connection() {
    assert!(matches!(fails(b""), C::Closed));
    assert!(matches!(fails(&header(1, 1, 0)[..5]), C::Protocol(E::Truncated { got: 5 })));
    assert!(matches!(fails(&header(2, 1, 8)), C::Protocol(E::Truncated { got: 12 })));
    assert!(matches!(fails(&header(1, 2, 0)), C::Protocol(E::Version { flags: 2 })));
    assert!(matches!(fails(&header(1, 5, 0)), C::Protocol(E::UnexpectedReply { request: 1 })));
    let long = header(5, 1, 4097);
    assert!(matches!(fails(&long), C::Protocol(E::TooLong { request: 5, size: 4097 })));
    assert!(matches!(fails(&header(99, 1, 0)), C::Protocol(E::UnknownRequest(99))));
    assert!(matches!(fails(&header(2, 9, 4)), C::Protocol(E::Truncated { .. })));
}

#[test]
fn message_in_pieces_is_put_together_with_its_descriptor() {
    let (front, mut connection, fake) = pair();
    let mapping = Mapping::memfd("t", 4096).unwrap();
    let region = MemRegion { guest_addr: 0, size: 4096, user_addr: 0, mmap_offset: 0 };
    let payload = MemRegion::table_to_bytes(&[region]);
    let bytes = Message::request(FrontendReq::SET_MEM_TABLE, payload, false).to_bytes();
    for (i, byte) in bytes.iter().enumerate() {
        assert_eq!(fake.did(), []);
        let fds = [mapping.fd().unwrap()];
        os::send(front.as_fd(), &[*byte], if i == 0 { &fds } else { &[] }).unwrap();
        connection.on_readable().unwrap();
    }
    assert_eq!(fake.did(), [Did::Memory(1)]);
}

#[test]
fn message_received_in_part_is_completed_by_another_process() {
    let (front, mut old, _) = pair();
    let mapping = Mapping::memfd("t", 4096).unwrap();
    let region = MemRegion { guest_addr: 0, size: 4096, user_addr: 0, mmap_offset: 0 };
    let payload = MemRegion::table_to_bytes(&[region]);
    let bytes = Message::request(FrontendReq::SET_MEM_TABLE, payload, false).to_bytes();
    // In the header, at its end, in the body.
    for cut in [5, HEADER_LEN, HEADER_LEN + 9] {
        os::send(front.as_fd(), &bytes[..cut], &[mapping.fd().unwrap()]).unwrap();
        old.on_readable().unwrap();
        let mut fds = crate::backend::Exported::default();
        let state = old.export(&mut fds);
        let import = |state: &ConnectionState| {
            let fds = fds.fds.iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect();
            let (fake, mut fds) = (Fake::default(), Descriptors::new(fds));
            let options = Options { protocol_features: PROTOCOL_FEATURES, account: Arc::default() };
            let device = Box::new(fake.clone());
            let permissions = crate::backend::Permissions::default();
            let backend = Backend::import(device, options, permissions, &state.backend, &mut fds);
            (Connection::import(backend.unwrap(), state, &mut fds), fake)
        };
        // One that does not take over leaves the connection alone.
        drop(import(&state).0.unwrap());
        let long = ConnectionState { received: vec![0; 200], ..state.clone() };
        assert!(matches!(import(&long).0, Err(ImportError::Refused(_))));
        let (new, fake) = import(&state);
        let mut new = new.unwrap();
        fake.did();
        send(&front, &bytes[cut..]);
        new.on_readable().unwrap();
        assert_eq!(fake.did(), [Did::Memory(1)], "{cut}");
        new.own();
        // The old process exits without an end of the connection.
        std::mem::forget(std::mem::replace(&mut old, new));
    }
}

#[test]
fn descriptors_stay_with_the_message_they_came_with() {
    let (front, mut connection, fake) = pair();
    let mapping = Mapping::memfd("t", 4096).unwrap();
    let region = MemRegion { guest_addr: 0, size: 4096, user_addr: 0, mmap_offset: 0 };
    let owner = Message::request(FrontendReq::SET_OWNER, vec![], false).to_bytes();
    let table = MemRegion::table_to_bytes(&[region]);
    let table = Message::request(FrontendReq::SET_MEM_TABLE, table, false).to_bytes();
    for _ in 0..5 {
        send(&front, &owner);
        os::send(front.as_fd(), &table, &[mapping.fd().unwrap()]).unwrap();
    }
    connection.on_readable().unwrap();
    assert_eq!(fake.did(), vec![Did::Memory(1); 5]);
}

#[test]
fn flood_is_served_in_bursts_and_unread_replies_end_it() {
    let (front, mut connection, _) = pair();
    let get = Message::request(FrontendReq::GET_FEATURES, vec![], false).to_bytes();
    send(&front, &get.repeat(BURST_MESSAGES + 1));
    connection.on_readable().unwrap();
    let mut buf = [0; 4096];
    let got = os::recv(front.as_fd(), &mut buf, &mut Vec::new(), FDS_MAX).unwrap();
    assert_eq!(got, Received::Bytes(20 * BURST_MESSAGES));
    let error = loop {
        let _ = os::send(front.as_fd(), &get.repeat(BURST_MESSAGES), &[]);
        if let Err(error) = connection.on_readable() {
            break error;
        }
    };
    assert!(matches!(error, C::NotReading), "{error}");
}

/// Whoever shares the thread is served between two steps; a message waits for the last one.
#[test]
fn pages_of_large_memory_are_marked_in_turns() {
    use crate::feature::{LOG_ALL, PROTOCOL_FEATURES as BIT_30, VERSION_1};
    use crate::message::{LogRegion, VringAddr, VringState};
    use FrontendReq as R;

    const SIZE: u64 = 11 << 30;
    const LOG_LEN: u64 = SIZE / 4096 / 8;
    let (front, mut connection, _) = pair();
    let (memory, log) = (Mapping::memfd("t", SIZE).unwrap(), Mapping::memfd("l", LOG_LEN).unwrap());
    let event = os::eventfd().unwrap();
    let request = |request, payload, fds: &[BorrowedFd<'_>]| {
        let bytes = Message::request(request, payload, false).to_bytes();
        assert!(os::send(front.as_fd(), &bytes, fds).unwrap());
    };
    let number = |value: u64| value.to_ne_bytes().to_vec();
    let region = MemRegion { guest_addr: 0, size: SIZE, user_addr: 0, mmap_offset: 0 };
    let state = |num| VringState { index: 0, num }.to_bytes();
    request(R::SET_PROTOCOL_FEATURES, number(PROTOCOL_FEATURES.bits()), &[]);
    request(R::SET_FEATURES, number(VERSION_1 | BIT_30 | LOG_ALL), &[]);
    request(R::SET_MEM_TABLE, MemRegion::table_to_bytes(&[region]), &[memory.fd().unwrap()]);
    request(R::SET_VRING_NUM, state(256), &[]);
    request(R::SET_VRING_BASE, state(0), &[]);
    let addr = VringAddr { index: 0, flags: 0, desc: 0, used: 0x4000, avail: 0x2000, log: 0 };
    request(R::SET_VRING_ADDR, addr.to_bytes(), &[]);
    request(R::SET_VRING_KICK, number(0), &[event.as_fd()]);
    let region = LogRegion { size: LOG_LEN, offset: 0 };
    request(R::SET_LOG_BASE, region.to_bytes(), &[log.fd().unwrap()]);
    request(R::GET_VRING_BASE, state(0), &[]);
    let replies = || {
        let mut buf = [0; 100];
        match os::recv(front.as_fd(), &mut buf, &mut Vec::new(), FDS_MAX).unwrap() {
            Received::Bytes(n) => n / 20,
            _ => 0,
        }
    };
    let marked = || {
        let mut bits = vec![0; LOG_LEN as usize];
        log.seg(0, LOG_LEN as u32).unwrap().read(&mut bits);
        bits.iter().map(|byte| u64::from(byte.count_ones())).sum::<u64>()
    };
    let (mut now, mut turns, mut replied) = (Instant::START, 0, 0);
    while let Turn::Rest(until) = connection.on_readable_at(now).unwrap() {
        replied += replies();
        // Where the machine is slow, it rests before SET_LOG_BASE and after the last step, too.
        if connection.backend().is_marking() {
            turns += 1;
            assert_eq!(replied, 1, "in turn {turns}: only that of SET_LOG_BASE");
            assert!(marked() < SIZE / 4096);
        } else {
            assert!(replied == 0 || marked() == SIZE / 4096);
        }
        now = until;
    }
    assert!(turns >= 3, "{turns}");
    assert_eq!((replied + replies(), marked()), (2, SIZE / 4096));
    // Nine messages, and each step as one more. Some turns are only rests after long steps.
    assert!(connection.backend().account().messages.spent() >= 9 + 4, "steps are charged");
}

#[test]
fn too_many_descriptors_end_the_connection() {
    let (front, mut connection, _) = pair();
    let event = os::eventfd().unwrap();
    let fds = vec![event.as_fd(); FDS_MAX];
    os::send(front.as_fd(), &header(1, 1, 8), &fds).unwrap();
    os::send(front.as_fd(), &[0], &fds).unwrap();
    let error = connection.on_readable().unwrap_err();
    assert!(matches!(error, C::Protocol(E::TooManyFds)), "{error}");
}

#[test]
fn refusals_are_kept_for_the_log_but_not_without_bound() {
    let (front, mut connection, _) = pair();
    let ack = crate::message::ProtocolFeatures::REPLY_ACK.bits().to_ne_bytes().to_vec();
    send(&front, &Message::request(FrontendReq::SET_PROTOCOL_FEATURES, ack, false).to_bytes());
    for _ in 0..2 * REFUSALS_MAX {
        send(&front, &header(99, 9, 0));
    }
    (0..2).for_each(|_| connection.on_readable().unwrap());
    assert_eq!(connection.take_refusals().len(), REFUSALS_MAX);
    assert!(connection.take_refusals().is_empty());
    let device = connection.close();
    assert_eq!(device.queues_max(), 32);
}

#[test]
fn socket_that_fails_is_an_os_error() {
    use rustix::net::{AddressFamily, SocketType, socket};
    let lone = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    let options = Options { protocol_features: PROTOCOL_FEATURES, account: Arc::default() };
    let backend = Backend::new(Box::new(Fake::default()), options);
    let mut connection = Connection::new(lone.into(), backend);
    let error = connection.on_readable().unwrap_err();
    assert!(matches!(error, C::Os(_)), "{error}");
}

/// The front-end of the `vhost` crate (Cloud Hypervisor's), every request acknowledged.
#[test]
fn front_end_of_the_vhost_crate_is_served() {
    use std::os::fd::AsRawFd;
    use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag};
    use vhost::vhost_user::{Frontend, VhostUserFrontend};
    use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
    use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

    let (stream, mut connection, fake) = pair();
    let server = std::thread::spawn(move || {
        loop {
            os::wait_readable(connection.as_fd(), std::time::Duration::from_secs(10)).unwrap();
            if let Err(error) = connection.on_readable() {
                return (error, connection.take_refusals().len());
            }
        }
    });
    let mut front = Frontend::from_stream(stream, 32);
    front.set_owner().unwrap();
    let features = front.get_features().unwrap();
    assert_ne!(features & crate::feature::PROTOCOL_FEATURES, 0);
    let protocol = front.get_protocol_features().unwrap();
    assert_eq!(protocol, PROTOCOL_FEATURES);
    front.set_protocol_features(protocol).unwrap();
    front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    front.set_features(features & !crate::feature::RING_PACKED).unwrap();
    assert_eq!(front.get_queue_num().unwrap(), 32);
    assert_eq!(front.get_max_mem_slots().unwrap(), 509);
    let mapping = Mapping::memfd("t", 1 << 20).unwrap();
    let region = |guest_phys_addr: u64| VhostUserMemoryRegionInfo {
        guest_phys_addr,
        memory_size: 1 << 20,
        userspace_addr: guest_phys_addr + (1 << 40),
        mmap_offset: 0,
        mmap_handle: mapping.fd().unwrap().as_raw_fd(),
    };
    front.set_mem_table(&[region(0)]).unwrap();
    front.add_mem_region(&region(1 << 30)).unwrap();
    front.remove_mem_region(&region(1 << 30)).unwrap();
    front.remove_mem_region(&region(1 << 30)).unwrap_err();
    let (_, config) = front.get_config(0, 12, VhostUserConfigFlags::WRITABLE, &[0; 12]).unwrap();
    assert_eq!(config[6..], [1, 0, 16, 0, 220, 5][..]);
    let event = EventFd::new(EFD_NONBLOCK).unwrap();
    let rings = VringConfigData {
        queue_max_size: 256,
        queue_size: 256,
        flags: 0,
        desc_table_addr: 1 << 40,
        used_ring_addr: (1 << 40) + 0x4000,
        avail_ring_addr: (1 << 40) + 0x8000,
        log_addr: None,
    };
    // The last ring: the front-end refuses an index that is not below the number of queues.
    front.set_vring_num(31, 256).unwrap();
    front.set_vring_base(31, 77).unwrap();
    front.set_vring_addr(31, &rings).unwrap();
    front.set_vring_call(31, &event).unwrap();
    front.set_vring_kick(31, &event).unwrap();
    front.set_vring_err(31, &event).unwrap();
    front.set_vring_enable(31, true).unwrap();
    assert_eq!(fake.state().setups[&31].layout.driver, 0x8000);
    assert_eq!(front.get_vring_base(31).unwrap(), 77);
    front.reset_device().unwrap();
    assert_eq!(fake.did().last(), Some(&Did::Reset));
    drop(front);
    let (error, refusals) = server.join().unwrap();
    assert!(matches!(error, C::Closed), "{error}");
    assert_eq!(refusals, 1);
}
