use super::*;
use crate::backend::{Options, PROTOCOL_FEATURES};
use crate::fake::{Did, Fake};
use crate::message::{FrontendReq, MemRegion};
use ConnectionError as C;
use ProtocolError as E;
use shm::Mapping;

fn pair() -> (UnixStream, Connection, Fake) {
    let (front, back) = UnixStream::pair().unwrap();
    let fake = Fake::default();
    let options = Options { protocol_features: PROTOCOL_FEATURES };
    let backend = Backend::new(Box::new(fake.clone()), options);
    (front, Connection::new(back, backend), fake)
}

fn send(front: &UnixStream, bytes: &[u8]) {
    assert!(sys::send(front.as_fd(), bytes, &[]).unwrap());
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
fn headers_that_make_no_sense_end_the_connection() {
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
        sys::send(front.as_fd(), &[*byte], if i == 0 { &fds } else { &[] }).unwrap();
        connection.on_readable().unwrap();
    }
    assert_eq!(fake.did(), [Did::Memory(1)]);
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
        sys::send(front.as_fd(), &table, &[mapping.fd().unwrap()]).unwrap();
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
    let got = sys::recv(front.as_fd(), &mut buf, &mut Vec::new()).unwrap();
    assert_eq!(got, Received::Bytes(20 * BURST_MESSAGES));
    let error = loop {
        let _ = sys::send(front.as_fd(), &get.repeat(BURST_MESSAGES), &[]);
        if let Err(error) = connection.on_readable() {
            break error;
        }
    };
    assert!(matches!(error, C::NotReading), "{error}");
}

#[test]
fn too_many_descriptors_end_the_connection() {
    let (front, mut connection, _) = pair();
    let event = sys::eventfd().unwrap();
    let fds = vec![event.as_fd(); FDS_MAX];
    sys::send(front.as_fd(), &header(1, 1, 8), &fds).unwrap();
    sys::send(front.as_fd(), &[0], &fds).unwrap();
    let error = connection.on_readable().unwrap_err();
    assert!(matches!(error, C::Protocol(E::TooManyFds)), "{error}");
}

#[test]
fn refusals_are_kept_for_the_log_but_not_without_bound() {
    let (front, mut connection, _) = pair();
    let ack = crate::message::ProtocolFeatures::REPLY_ACK.bits().to_ne_bytes().to_vec();
    send(&front, &Message::request(FrontendReq::SET_PROTOCOL_FEATURES, ack, false).to_bytes());
    for _ in 0..20 {
        send(&front, &header(99, 9, 0));
    }
    connection.on_readable().unwrap();
    assert_eq!(connection.take_refusals().len(), REFUSALS_MAX);
    assert!(connection.take_refusals().is_empty());
    let device = connection.close();
    assert_eq!(device.queues_max(), 32);
}

#[test]
fn socket_that_fails_is_an_os_error() {
    use rustix::net::{AddressFamily, SocketType, socket};
    let lone = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    let options = Options { protocol_features: PROTOCOL_FEATURES };
    let backend = Backend::new(Box::new(Fake::default()), options);
    let mut connection = Connection::new(lone.into(), backend);
    let error = connection.on_readable().unwrap_err();
    assert!(matches!(error, C::Os(_)), "{error}");
}
