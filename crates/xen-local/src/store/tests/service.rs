//! A service without its thread, and the other ends of its connections.

use super::*;

/// A service without its thread, with connections of another process for domain 1 and an internal
/// one for domain 0. Returns the other ends.
fn service_with(connections: usize) -> (Service, Vec<OwnedFd>) {
    let epoll = Epoll::new().unwrap();
    let wake = os::eventfd().unwrap();
    let shared = Arc::new(Shared { wake, commands: Mutex::default() });
    let mut service = Service::new(shared, epoll, Limits::XENSTORED);
    let mut ends = Vec::new();
    for n in 0..=connections {
        let (ours, theirs) = os::socketpair().unwrap();
        let (domid, listened) = if n == 0 { (0, false) } else { (1, true) };
        service.add(theirs, domid, listened);
        ends.push(ours);
    }
    (service, ends)
}

/// Sends a request, and has the service handle it.
fn ask(service: &mut Service, ends: &[OwnedFd], n: usize, (kind, tx_id): (u32, u32), body: &[u8]) {
    let header = Header { kind, req_id: 1, tx_id, len: body.len() as u32 };
    assert_eq!(os::write(ends[n].as_fd(), &header.to_bytes()).unwrap(), 16);
    assert_eq!(os::write(ends[n].as_fd(), body).unwrap(), body.len());
    service.serve(WAKE + 1 + n as u64, true);
}

/// Types of the replies and events received.
fn received(end: &OwnedFd) -> Vec<u32> {
    let (mut bytes, mut all) = ([0; 65_536], Vec::new());
    while let Ok(Received::Bytes(n)) = os::read(end.as_fd(), &mut bytes) {
        all.extend_from_slice(&bytes[..n]);
    }
    let (mut kinds, mut at) = (Vec::new(), 0);
    while at + 16 <= all.len() {
        let word = |i: usize| u32::from_le_bytes(all[at + i..at + i + 4].try_into().unwrap());
        kinds.push(word(0));
        at += 16 + word(12) as usize;
    }
    kinds
}

/// Whether a message of this type is received, while the service writes and the test reads.
fn receives(service: &mut Service, ends: &[OwnedFd], n: usize, kind: u32) -> bool {
    (0..100).any(|_| {
        service.serve(WAKE + 1 + n as u64, false);
        received(&ends[n]).contains(&kind)
    })
}

/// Issue 14, row 12.
#[test]
fn events_of_a_large_commit_are_delivered_in_parts_and_its_domain_waits() {
    const EVENT: u32 = 15;
    let (mut service, ends) = service_with(62);
    // Clients in this process are notified at once.
    ask(&mut service, &ends, 0, (4, 0), b"/x\0t\0");
    ask(&mut service, &ends, 0, (11, 0), b"/x\0");
    ask(&mut service, &ends, 0, (14, 0), b"/x\0n1\0");
    for n in 1..=62 {
        for watch in 0..128 {
            ask(&mut service, &ends, n, (4, 0), format!("/x\0{watch}\0").as_bytes());
        }
        received(&ends[n]);
    }
    while !service.events.is_empty() {
        service.deliver_some();
    }
    received(&ends[0]);
    ask(&mut service, &ends, 1, (6, 0), b"\0");
    for node in 0..900 {
        ask(&mut service, &ends, 1, (11, 1), format!("/x/{node}\0v").as_bytes());
    }
    assert!(service.events.is_empty(), "nothing was committed");
    ask(&mut service, &ends, 1, (7, 1), b"T\0");
    assert!(received(&ends[0]).contains(&EVENT), "domain 0 is notified at once");
    assert!(service.events.is_over_limit(1) && !service.events.is_over_limit(0));
    // Each part is limited.
    let most = events::STEPS + Limits::XENSTORED.watches + 1;
    assert!((1..=most).contains(&service.deliver_some()));
    // No requests are read from the domain that made the changes; others are served.
    received(&ends[2]);
    ask(&mut service, &ends, 2, (10, 0), b"1\0");
    assert!(!received(&ends[2]).contains(&10));
    ask(&mut service, &ends, 0, (10, 0), b"1\0");
    assert!(receives(&mut service, &ends, 0, 10));
    let mut parts = 1;
    while !service.events.is_empty() {
        assert!(service.deliver_some() <= most);
        parts += 1;
    }
    assert!(parts > 1000, "{parts} parts for 7 million comparisons");
    // All watchers were notified, and the domain is served again.
    assert!(ends[3..].iter().all(|end| received(end).contains(&EVENT)));
    assert!(!service.events.is_over_limit(1));
    service.serve(WAKE + 3, true);
    assert!(receives(&mut service, &ends, 2, 10));
}
