//! A service without its thread, and the other ends of its connections.

use switch::time::Ns;

use super::*;

/// A service without its thread, with connections of another process for domain 1 and an internal
/// one for domain 0. Returns the other ends. Their shares of the CPU are not limited.
fn service_with(connections: usize) -> (Service, Vec<OwnedFd>) {
    limited_service(connections, 1000, |_| 1)
}

/// As [`service_with`], with thousandths of a CPU for each domain, by connection.
fn limited_service(
    connections: usize,
    cpu_per_mille: u64,
    domain: impl Fn(usize) -> u16,
) -> (Service, Vec<OwnedFd>) {
    let epoll = Epoll::new().unwrap();
    let wake = os::eventfd().unwrap();
    let shared = Arc::new(Shared { wake, commands: Mutex::new(Lock::LocalCommands, Vec::new()) });
    let limits = Limits { cpu_per_mille, ..Limits::XENSTORED };
    let tree = Tree::new(&[Perm::new(Access::Read, 0)]);
    let mut service = Service::new(shared, epoll, limits, tree);
    let mut ends = Vec::new();
    for n in 0..=connections {
        let (ours, theirs) = os::socketpair().unwrap();
        let (domid, listened) = if n == 0 { (0, false) } else { (domain(n), true) };
        service.add(theirs, domid, listened);
        ends.push(ours);
    }
    (service, ends)
}

/// Sends a request, and has the service handle it.
fn ask(service: &mut Service, ends: &[OwnedFd], n: usize, kind: u32, tx_id: u32, body: &[u8]) {
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
    ask(&mut service, &ends, 0, 4, 0, b"/x\0t\0");
    ask(&mut service, &ends, 0, 11, 0, b"/x\0");
    ask(&mut service, &ends, 0, 14, 0, b"/x\0n1\0");
    for n in 1..=62 {
        for watch in 0..128 {
            ask(&mut service, &ends, n, 4, 0, format!("/x\0{watch}\0").as_bytes());
        }
        received(&ends[n]);
    }
    while service.events.domains().next().is_some() {
        service.deliver_some(shares::now());
    }
    received(&ends[0]);
    ask(&mut service, &ends, 1, 6, 0, b"\0");
    for node in 0..900 {
        ask(&mut service, &ends, 1, 11, 1, format!("/x/{node}\0v").as_bytes());
    }
    assert!(service.events.domains().next().is_none(), "nothing was committed");
    ask(&mut service, &ends, 1, 7, 1, b"T\0");
    assert!(received(&ends[0]).contains(&EVENT), "domain 0 is notified at once");
    assert!(service.events.is_over_limit(1) && !service.events.is_over_limit(0));
    // Each part is limited.
    let most = events::STEPS + Limits::XENSTORED.watches + 1;
    assert!((1..=most).contains(&service.deliver_some(shares::now())));
    // No requests are read from the domain that made the changes; others are served.
    received(&ends[2]);
    ask(&mut service, &ends, 2, 10, 0, b"1\0");
    assert!(!received(&ends[2]).contains(&10));
    ask(&mut service, &ends, 0, 10, 0, b"1\0");
    assert!(receives(&mut service, &ends, 0, 10));
    let mut parts = 1;
    while service.events.domains().next().is_some() {
        assert!(service.deliver_some(shares::now()) <= most);
        parts += 1;
    }
    assert!(parts > 1000, "{parts} parts for 7 million comparisons");
    // All watchers were notified, and the domain is served again.
    assert!(ends[3..].iter().all(|end| received(end).contains(&EVENT)));
    assert!(!service.events.is_over_limit(1));
    service.serve(WAKE + 3, true);
    assert!(receives(&mut service, &ends, 2, 10));
}

const READ_WHOLE: u32 = 10;

#[test]
fn domain_in_debt_waits_with_its_requests_and_events_and_delays_no_other() {
    const EVENT: u32 = 15;
    let (mut service, ends) = limited_service(3, shares::PER_MILLE, |n| n.min(2) as u16);
    // Connection 1 is of domain 1, 2 and 3 are of domain 2.
    ask(&mut service, &ends, 0, 11, 0, b"/x\0");
    for n in [1, 2] {
        ask(&mut service, &ends, 0, 11, 0, format!("/x/{n}\0").as_bytes());
        ask(&mut service, &ends, 0, 14, 0, format!("/x/{n}\0n{n}\0r0\0").as_bytes());
    }
    ask(&mut service, &ends, 0, 14, 0, b"/x\0b0\0");
    ask(&mut service, &ends, 3, 4, 0, b"/x\0t\0");
    received(&ends[3]);
    for n in [1, 2] {
        ask(&mut service, &ends, n, 11, 0, format!("/x/{n}\0v").as_bytes());
    }
    // A second of CPU time: a debt of 100 seconds.
    let now = shares::now();
    service.shares.charge(1, Ns::from_secs(1), now);
    assert!(service.is_held(1, now) && !service.is_held(2, now) && !service.is_held(0, now));
    // Events of the other domain are delivered, and then there is nothing to do for a long time.
    while service.timeout(now) == Some(Duration::ZERO) {
        assert!(service.deliver_some(now) > 0);
    }
    let left: Vec<u16> = service.events.domains().collect();
    assert_eq!(left, [1]);
    assert!(service.timeout(now).unwrap() > Duration::from_secs(80));
    // Its requests are not read, and do not wake the thread again and again; others are served.
    received(&ends[1]);
    ask(&mut service, &ends, 1, READ_WHOLE, 0, b"1\0");
    assert!(received(&ends[1]).is_empty());
    assert!(service.epoll.wait(Some(Duration::ZERO)).unwrap().iter().all(|r| r.tag != WAKE + 2));
    ask(&mut service, &ends, 2, READ_WHOLE, 0, b"1\0");
    assert!(received(&ends[2]).contains(&READ_WHOLE));
    // Out of debt, the pending request is served without another event of the socket.
    let later = now + Ns::from_secs(120);
    assert_eq!(service.timeout(later), Some(Duration::ZERO));
    service.shares = Shares::new(shares::PER_MILLE);
    service.resume(later);
    assert!(received(&ends[1]).contains(&READ_WHOLE));
    received(&ends[3]);
    assert!(service.deliver_some(later) > 0);
    assert!(received(&ends[3]).contains(&EVENT));
    assert_eq!(service.timeout(later), None);
}

#[test]
fn connection_that_closes_while_its_domain_is_in_debt_is_removed() {
    let (mut service, mut ends) = limited_service(1, shares::PER_MILLE, |_| 1);
    service.shares.charge(1, Ns::from_secs(1), shares::now());
    ask(&mut service, &ends, 1, READ_WHOLE, 0, b"1\0");
    ends.pop();
    for ready in service.epoll.wait(Some(Duration::ZERO)).unwrap() {
        service.serve(ready.tag, ready.readable);
    }
    assert_eq!((service.connections.len(), service.paused.len()), (1, 0));
}
