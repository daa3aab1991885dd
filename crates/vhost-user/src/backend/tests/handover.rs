//! State of a front-end in the hands of another process.

use super::*;
use crate::device::Kick;

impl Rig {
    /// The state, and copies of its descriptors, as another process gets them.
    pub(super) fn exported(&self) -> (BackendState, Vec<OwnedFd>) {
        let mut fds = Exported::default();
        let state = self.backend.export(&mut fds);
        let fds = fds.fds.iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect();
        (state, fds)
    }

    fn running(features: u64) -> Self {
        let mut rig = Self::ready(features);
        rig.ok(R::NET_SET_MTU, u(9000));
        rig.ok(R::SET_STATUS, u(15));
        rig.ring(0, 256, 7);
        rig.ring(1, 256, if features & feature::RING_PACKED != 0 { 0x8005_8005 } else { 9 });
        // Set up in part: it does not run.
        rig.ok(R::SET_VRING_NUM, st(2, 64));
        rig.ok(R::SET_VRING_BASE, st(2, 3));
        rig.send(R::SET_VRING_CALL, u(3 | NO_FD), vec![]).unwrap();
        rig.ok(R::SET_VRING_ENABLE, st(0, 1));
        rig.fake.did();
        rig
    }
}

pub(super) fn import(state: &BackendState, fds: Vec<OwnedFd>) -> Result<Rig, ImportError> {
    let fake = Fake::default();
    let options =
        Options { protocol_features: PROTOCOL_FEATURES, account: Arc::new(Account::default()) };
    let device = Box::new(fake.clone());
    let mut fds = Descriptors::new(fds);
    let backend = Backend::import(device, options, Permissions::default(), state, &mut fds)?;
    Ok(Rig { backend, fake })
}

#[test]
fn rings_continue_at_their_positions_in_another_process() {
    for features in [feature::VERSION_1, feature::VERSION_1 | feature::RING_PACKED] {
        let mut old = Rig::running(features);
        let (state, fds) = old.exported();
        let mut new = import(&state, fds).unwrap();
        assert_eq!(new.backend.features(), features);
        assert_eq!(new.backend.protocol_features(), PROTOCOL_FEATURES);
        let did = new.fake.did();
        assert!(did.contains(&Did::Mtu(9000)) && did.contains(&Did::Memory(1)), "{did:?}");
        let starts = |did: &[Did]| did.iter().any(|did| matches!(did, Did::Start { .. }));
        assert!(!starts(&did), "rings wait for their positions: {did:?}");
        // What is exported again is the same, before and after the start.
        assert_eq!(new.exported().0, state);
        let positions = old.backend.positions();
        assert_eq!(positions.iter().map(|(ring, _)| *ring).collect::<Vec<_>>(), [0, 1]);
        new.backend.resume(&positions).unwrap();
        let did = new.fake.did();
        let base = |ring: u16| positions[usize::from(ring)].1;
        for (ring, enabled) in [(0, true), (1, false)] {
            let begun = |did: &&Did| {
                matches!(did, Did::Start { ring: r, base: b, size: 256, kick: "fd", .. }
                    if *r == ring && *b == base(ring))
            };
            assert_eq!(did.iter().filter(begun).count(), 1, "{did:?}");
            assert!(did.contains(&Did::Enable(ring, enabled)), "{did:?}");
        }
        assert_eq!(new.ok(R::GET_STATUS, vec![]), u(15));
        assert_eq!(new.ok(R::GET_VRING_BASE, st(2, 0)), st(2, 3));
        assert_eq!(new.ok(R::GET_VRING_BASE, st(1, 0)), st(1, base(1)));
        // The memory is the same.
        let write = |rig: &Rig, byte: u8| {
            let memory = Arc::clone(&rig.fake.state().memory);
            let mut seg = memory.seg_mut(GUEST + 0x7000, 1, &mut 0).unwrap();
            seg.write(&[byte]);
        };
        write(&old, 7);
        let memory = Arc::clone(&new.fake.state().memory);
        let mut byte = [0];
        memory.seg(GUEST + 0x7000, 1, &mut 0).unwrap().read(&mut byte);
        assert_eq!(byte, [7]);
    }
}

#[test]
fn ways_of_notification_are_kept() {
    let mut old = Rig::ready(feature::VERSION_1);
    let (ours, theirs) = UnixStream::pair().unwrap();
    old.send(R::SET_BACKEND_REQ_FD, vec![], vec![theirs.into()]).unwrap();
    for ring in [0, 1] {
        old.ok(R::SET_VRING_NUM, st(ring, 256));
        old.ok(R::SET_VRING_BASE, st(ring, 0));
        old.ok(R::SET_VRING_ADDR, addr(ring, USER + u64::from(ring) * 0x8000).to_bytes());
    }
    // In-band kicks and calls at 0; at 1 a kick descriptor, and no calls.
    old.ok(R::VRING_KICK, st(0, 0));
    old.send(R::SET_VRING_CALL, u(1 | NO_FD), vec![]).unwrap();
    old.send(R::SET_VRING_KICK, u(1), vec![event()]).unwrap();
    let (state, fds) = old.exported();
    let mut new = import(&state, fds).unwrap();
    let positions = old.backend.positions();
    new.backend.resume(&positions).unwrap();
    let fake = new.fake.state();
    assert!(matches!(fake.setups[&0].kick, Kick::InBand) && fake.setups[&1].call.is_none());
    assert!(matches!(fake.setups[&1].kick, Kick::Fd(_)));
    fake.setups[&0].call.as_ref().unwrap().signal();
    assert!(os::wait_readable(ours.as_fd(), Duration::from_secs(20)).unwrap());
}

#[test]
fn state_that_a_front_end_could_not_have_made_is_refused() {
    let old = Rig::running(feature::VERSION_1);
    let (state, _) = old.exported();
    let error = |change: &dyn Fn(&mut BackendState, &mut Vec<OwnedFd>)| {
        let (mut state, mut fds) = (state.clone(), old.exported().1);
        change(&mut state, &mut fds);
        import(&state, fds).err().expect("it is refused")
    };
    let refused = |change: &dyn Fn(&mut BackendState, &mut Vec<OwnedFd>)| match error(change) {
        ImportError::Refused(error) => error,
        other => panic!("{other}"),
    };
    assert!(matches!(refused(&|s, _| s.features |= 1 << 50), E::Features { .. }));
    assert!(matches!(refused(&|s, _| s.protocol |= 1 << 50), E::ProtocolFeatures { .. }));
    assert!(matches!(refused(&|s, _| s.mtu = Some(3)), E::Mtu { .. }));
    assert!(matches!(refused(&|s, _| s.rings[0].size = Some(3)), E::QueueSize { .. }));
    let outside = refused(&|s, _| s.rings[0].addr = Some(([5, 5, 5, 0], 0)));
    assert!(matches!(outside, E::RingOutside { .. }), "{outside}");
    assert!(matches!(refused(&|s, _| s.regions[0].size = 1 << 40), E::Map { .. }));
    let twice = refused(&|s, fds| {
        let again = RegionState { fd: fds.len() as u32, ..s.regions[0].clone() };
        s.regions.push(again);
        fds.push(memfd());
    });
    assert!(matches!(twice, E::Table(_)), "{twice}");
    let kind = refused(&|s, fds| fds[s.regions[0].fd as usize] = event());
    assert!(matches!(kind, E::FdKind { .. }), "{kind}");
    assert!(matches!(error(&|_, fds| fds.truncate(1)), ImportError::Descriptor(_)));
    assert!(matches!(error(&|s, _| s.requests = Some(0)), ImportError::Descriptor(0)));
    let rings = error(&|s, _| s.rings.resize(99, RingState::default()));
    assert!(matches!(rings, ImportError::Rings(99)) && rings.to_string().contains("99"));
    let (state, fds) = old.exported();
    let account = Account::default();
    account.set_limit("descriptors", 2);
    let options = Options { protocol_features: PROTOCOL_FEATURES, account: Arc::new(account) };
    let over = Backend::import(
        Box::new(Fake::default()),
        options,
        Permissions::default(),
        &state,
        &mut Descriptors::new(fds),
    );
    assert!(matches!(over, Err(ImportError::OverLimit(_))));
}

#[test]
fn position_that_is_missing_or_invalid_is_an_error() {
    let old = Rig::running(feature::VERSION_1);
    let (state, fds) = old.exported();
    let mut new = import(&state, fds).unwrap();
    assert!(matches!(new.backend.resume(&[(0, 7)]), Err(E::Ring { index: 1, .. })));
    let (state, fds) = old.exported();
    let mut new = import(&state, fds).unwrap();
    assert!(matches!(new.backend.resume(&[(0, 1 << 20)]), Err(E::Layout { ring: 0, .. })));
    let (state, fds) = old.exported();
    let mut new = import(&state, fds).unwrap();
    assert!(matches!(new.backend.resume(&[(99, 0)]), Err(E::Ring { index: 99, .. })));
}

/// Rings of a killed process: split ones start at base 0, which their used index replaces; packed
/// ones where their ledger says, and not without it.
#[test]
fn rings_of_a_killed_process_continue_where_their_memory_says() {
    let split = Rig::running(feature::VERSION_1);
    let (state, fds) = split.exported();
    let mut new = import(&state, fds).unwrap();
    new.fake.did();
    new.backend.resume_killed().unwrap();
    let did = new.fake.did();
    let begun = |ring: u16| {
        did.iter().any(|did| matches!(did, Did::Start { ring: r, base: 0, .. } if *r == ring))
    };
    assert!(begun(0) && begun(1), "{did:?}");
    // A packed one that wrote nothing down.
    let packed = Rig::running(feature::VERSION_1 | feature::RING_PACKED);
    let (state, fds) = packed.exported();
    assert_eq!(state.ledgers, None);
    let mut new = import(&state, fds).unwrap();
    let error = new.backend.resume_killed().unwrap_err();
    assert!(matches!(error, ProtocolError::Ring { .. }), "{error}");
}
