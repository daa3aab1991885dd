use super::*;
use crate::backend::{self, Backend, Options};
use crate::connection::Connection;
use crate::error::ConnectionError;
use crate::fake::{Did, FEATURES, Fake};
use FrontendError as F;
use ring::virtq::{Armed, Buf, Taken};
use std::thread::{self, JoinHandle};

fn params() -> Params {
    Params {
        features: FEATURES & !feature::RING_PACKED,
        protocol_features: PROTOCOL_FEATURES,
        pairs: 1,
        queue_size: 64,
        base: None,
        indirect_entries: 4,
        buffer_bytes: 1 << 16,
        timeout: Duration::from_secs(10),
    }
}

/// Runs our back-end in a thread; ends with the connection.
fn serve(protocol_features: ProtocolFeatures) -> (UnixStream, Fake, JoinHandle<ConnectionError>) {
    let (front, back) = UnixStream::pair().unwrap();
    let fake = Fake::default();
    let backend = Backend::new(
        Box::new(fake.clone()),
        Options { protocol_features, account: Arc::default() },
    );
    let mut connection = Connection::new(back, backend);
    let thread = thread::spawn(move || {
        let error = loop {
            os::wait_readable(connection.as_fd(), Duration::from_secs(10)).unwrap();
            if let Err(error) = connection.on_readable() {
                break error;
            }
        };
        connection.close();
        error
    });
    (front, fake, thread)
}

/// Passes one chain from the driver half to the device half and back, with notifications.
fn round_trip(frontend: &Frontend, queue: &mut Queue, fake: &Fake) {
    let buf = Buf { addr: frontend.buffers().start, len: 100, write: false };
    assert_eq!(queue.driver.arm(), Armed::Armed);
    let id = queue.driver.add(&[buf]).unwrap();
    queue.driver.publish();
    if queue.driver.kick_needed() {
        os::signal(queue.kick.as_fd());
    }
    let mut state = fake.state();
    let (memory, setup) = (Arc::clone(&state.memory), state.setups[&queue.ring].clone());
    let device = state.queues.get_mut(&queue.ring).unwrap();
    let mut taken = Taken::with_capacity(8, 64);
    assert_eq!(device.take(&memory, 8, &mut taken).unwrap(), 1);
    assert_eq!(taken.reads(&taken.chains[0]), [buf]);
    device.put(&taken.chains[0], 0);
    device.publish();
    assert!(device.call_needed());
    setup.call.unwrap().signal();
    assert!(os::wait_readable(queue.call.as_fd(), Duration::ZERO).unwrap());
    assert!(os::drain(queue.call.as_fd()));
    let mut used = Vec::new();
    assert_eq!(queue.driver.take_used(8, &mut used).unwrap(), 1);
    assert_eq!(used[0].id, id);
}

#[test]
fn both_halves_agree_on_rings_of_every_kind() {
    let none = ProtocolFeatures::empty();
    let slots = ProtocolFeatures::CONFIGURE_MEM_SLOTS;
    for packed in [0, feature::RING_PACKED] {
        for protocol in [PROTOCOL_FEATURES, PROTOCOL_FEATURES - slots, none] {
            let mut params = params();
            params.features |= packed;
            params.pairs = if protocol == none { 1 } else { 3 };
            let (stream, fake, thread) = serve(protocol);
            let (mut frontend, mut queues) = Frontend::start(stream, &params).unwrap();
            assert_eq!(frontend.features() & feature::RING_PACKED, packed);
            assert_eq!(frontend.protocol_features(), protocol);
            assert_eq!(frontend.config().len(), if protocol == none { 0 } else { 12 });
            // Without acknowledgements, a request with a reply is the barrier.
            frontend.client().get_u64(FrontendReq::GET_FEATURES).unwrap();
            for queue in &mut queues {
                round_trip(&frontend, queue, &fake);
            }
            frontend.enable(0, false).unwrap();
            let one = if packed == 0 { 1 } else { 0x8001_8001 };
            assert_eq!(frontend.stop().unwrap(), vec![one; queues.len()]);
            assert!(matches!(thread.join().unwrap(), ConnectionError::Closed));
            let did = fake.did();
            assert!(did.contains(&Did::Enable(1, true)) && did.contains(&Did::Enable(0, false)));
            assert_eq!(did.last(), Some(&Did::Reset));
        }
    }
}

#[test]
fn rings_start_at_the_given_base() {
    let params = Params { base: Some(65_535), ..params() };
    let (stream, fake, thread) = serve(PROTOCOL_FEATURES);
    let (frontend, mut queues) = Frontend::start(stream, &params).unwrap();
    round_trip(&frontend, &mut queues[1], &fake);
    assert_eq!(frontend.stop().unwrap(), [65_535, 0]);
    thread.join().unwrap();
}

/// VPP starts a ring at its first kick, and sets the flag that suppresses kicks before that.
#[test]
fn every_ring_is_kicked_once_at_the_start() {
    let (stream, _, thread) = serve(PROTOCOL_FEATURES);
    let (mut frontend, queues) = Frontend::start(stream, &params()).unwrap();
    // A request with a reply is the barrier.
    frontend.client().get_u64(FrontendReq::GET_FEATURES).unwrap();
    for queue in &queues {
        assert!(os::drain(queue.kick.as_fd()));
    }
    frontend.stop().unwrap();
    thread.join().unwrap();
}

#[test]
fn front_end_that_disconnects_leaves_stopped_rings() {
    let (stream, fake, thread) = serve(backend::PROTOCOL_FEATURES);
    let (frontend, queues) = Frontend::start(stream, &params()).unwrap();
    drop((frontend, queues));
    assert!(matches!(thread.join().unwrap(), ConnectionError::Closed));
    assert!(fake.state().queues.is_empty());
    assert!(fake.did().ends_with(&[Did::Stop(0), Did::Stop(1), Did::Reset]));
}

fn start_error(protocol: ProtocolFeatures, params: &Params) -> F {
    let (stream, _, thread) = serve(protocol);
    let Err(error) = Frontend::start(stream, params) else { panic!("it started") };
    thread.join().unwrap();
    assert!(error.to_string().len() > 10);
    error
}

#[test]
fn missing_features_are_reported() {
    let many = Params { pairs: 17, ..params() };
    let error = start_error(PROTOCOL_FEATURES, &many);
    assert!(matches!(error, F::Pairs { wanted: 17, has: 16 }), "{error}");
    let odd = Params { queue_size: 3, ..params() };
    assert!(matches!(start_error(PROTOCOL_FEATURES, &odd), F::Layout(_)));
    let huge = Params { buffer_bytes: 1 << 62, ..params() };
    assert!(matches!(start_error(PROTOCOL_FEATURES, &huge), F::Memory(_)));
    let (stream, _, thread) = serve(PROTOCOL_FEATURES);
    let (mut frontend, _) = Frontend::start(stream, &params()).unwrap();
    let error = frontend.enable(99, true).unwrap_err();
    let refused = FrontendReq::SET_VRING_ENABLE;
    assert!(matches!(error, F::Refused { request, value: 1 } if request == refused), "{error}");
    frontend.enable(1, true).unwrap();
    drop(frontend);
    thread.join().unwrap();
}

/// A client whose back-end has already sent `reply`.
fn replied(reply: &[u8]) -> (Client, UnixStream) {
    let (front, back) = UnixStream::pair().unwrap();
    assert!(os::send(back.as_fd(), reply, &[]).unwrap());
    (Client::new(front, Duration::from_millis(20)), back)
}

#[test]
fn malformed_replies() {
    let get = FrontendReq::GET_FEATURES;
    let fine = Message::reply(get.into(), vec![0; 8]);
    let wrong = [
        Message::reply(get.into(), vec![0; 4]),
        Message::reply(2, vec![0; 8]),
        Message::request(get, vec![0; 8], false),
        Message { flags: 6, ..fine.clone() },
        Message::reply(get.into(), vec![0; PAYLOAD_MAX + 1]),
    ];
    for message in wrong {
        let (mut client, _back) = replied(&message.to_bytes());
        let error = client.get_u64(get).unwrap_err();
        assert!(matches!(error, F::BadReply { .. }), "{error}");
    }
    let (mut client, _back) = replied(&fine.to_bytes()[..15]);
    assert!(matches!(client.get_u64(get).unwrap_err(), F::Timeout(_)));
    let (mut client, back) = replied(&[]);
    drop(back);
    assert!(matches!(client.get_u64(get).unwrap_err(), F::Closed));
    let reply = Message::reply(FrontendReq::GET_FEATURES.into(), vec![0; 8]);
    let (client, _back) = replied(&reply.to_bytes());
    let Err(error) = Frontend::start(client.stream, &params()) else { panic!("it started") };
    assert!(matches!(error, F::Lacks { features: feature::VERSION_1 }), "{error}");
    let bits = feature::VERSION_1.to_ne_bytes().to_vec();
    let reply = Message::reply(FrontendReq::GET_FEATURES.into(), bits);
    let (client, _back) = replied(&reply.to_bytes());
    let many = Params { pairs: 2, ..params() };
    let Err(error) = Frontend::start(client.stream, &many) else { panic!("it started") };
    assert!(matches!(error, F::Pairs { wanted: 2, has: 1 }), "{error}");
}

#[test]
fn back_end_that_does_not_read_is_an_error_and_not_a_hang() {
    let (mut client, _back) = replied(&[]);
    let message = Message::request(FrontendReq::SET_CONFIG, vec![0; PAYLOAD_MAX], false);
    let error = loop {
        if let Err(error) = client.send(&message, &[]) {
            break error;
        }
    };
    assert!(matches!(error, F::Os(_)), "{error}");
}
