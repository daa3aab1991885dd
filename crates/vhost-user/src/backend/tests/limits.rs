//! A front-end's memory is charged to its port, and bounded.

use crate::foreign::ForeignFd;
use switch::account::{Budgets, Entry, defaults};

use super::*;

const GIB: u64 = 1 << 30;

impl Rig {
    /// All features negotiated, on an account of `budgets`, without memory.
    fn on(budgets: &Budgets) -> Self {
        let mut rig = Self::with(Account::new(budgets));
        rig.ok(R::SET_PROTOCOL_FEATURES, u(PROTOCOL_FEATURES.bits()));
        rig
    }

    /// Adds a region in its own file.
    fn add(&mut self, len: u64) -> Result<Vec<u8>, E> {
        // No two at the same address.
        let at = self.backend.slots.len() as u64 * (1 << 42);
        let region = region(GUEST + at, USER + at, len).to_single_bytes();
        self.send(R::ADD_MEM_REG, region, vec![sparse(len)])
    }

    fn used(&self) -> (u64, u64) {
        let account = self.backend.account();
        (account.mapped_bytes.used(), account.mappings.used())
    }

    fn refused(&self) -> u64 {
        let entries = self.backend.account().entries();
        entries.iter().map(|Entry { refused, .. }| refused).sum()
    }
}

/// A file of `len` bytes, none of which take any memory.
fn sparse(len: u64) -> OwnedFd {
    let mapping = Mapping::memfd("sparse", len).unwrap();
    mapping.fd().unwrap().try_clone_to_owned().unwrap()
}

/// Issue 14, row 7, with small numbers in place of 8 times 16 TiB of 128.
#[test]
fn front_ends_with_huge_sparse_memory_leave_an_honest_guest_what_it_needs() {
    let budgets = Budgets::new(1024 * GIB, 1000, 1000);
    let mut greedy = Vec::new();
    loop {
        let mut rig = Rig::on(&budgets);
        let added = rig.add(200 * GIB);
        greedy.push(rig);
        let Err(error) = added else { continue };
        let said = error.to_string();
        assert!(matches!(error, E::OverLimit { guest_addr: GUEST, .. }), "{said}");
        assert!(
            said.contains("mapped-bytes") && said.contains("the budget of all ports"),
            "{said}"
        );
        break;
    }
    assert_eq!((greedy.len(), budgets.mapped_bytes.used()), (4, 600 * GIB));
    assert_eq!((greedy[3].refused(), greedy[3].used()), (1, (0, 0)));
    let mut honest: Vec<_> = (0..3).map(|_| Rig::on(&budgets)).collect();
    honest.iter_mut().for_each(|rig| assert!(rig.add(GIB).is_ok()));
    assert_eq!((honest[0].used(), honest[0].refused()), ((GIB, 1), 0));
    drop((greedy, honest));
    assert_eq!((budgets.mapped_bytes.used(), budgets.mappings.used()), (0, 0));
}

/// Issue 14, row 1, with small numbers in place of 129 ports of 509 slots and 65,530 mappings.
#[test]
fn front_ends_with_many_slots_leave_an_honest_guest_what_it_needs() {
    let budgets = Budgets::new(1024 * GIB, 400, 1000);
    let mut greedy: Vec<_> = (0..4).map(|_| Rig::on(&budgets)).collect();
    let slots = |rig: &mut Rig| (0..200).take_while(|_| rig.add(4096).is_ok()).count();
    let got: Vec<_> = greedy.iter_mut().map(slots).collect();
    assert_eq!(got, [200, 100, 16, 16], "the reserve is for ports with few mappings");
    let error = greedy[1].add(4096).unwrap_err().to_string();
    assert!(
        error.contains("mappings: 1 more than the 100 in use") || error.contains("300"),
        "{error}"
    );
    let mut honest = Rig::on(&budgets);
    assert!((0..3).all(|_| honest.add(GIB).is_ok()));
    drop((greedy, honest));
    assert_eq!(budgets.mappings.used(), 0);
}

/// The limit that an operator sets for the port.
#[test]
fn memory_beyond_the_ports_limit_is_refused_and_the_table_stays() {
    let mut rig = Rig::ready(feature::VERSION_1);
    assert!(rig.backend.account().set_limit("mapped-bytes", 4 * SIZE));
    let more = region(GUEST + 8 * SIZE, USER + 8 * SIZE, 4 * SIZE);
    let message = Message::request(R::ADD_MEM_REG, more.to_single_bytes(), true);
    let fd = ForeignFd::new(sparse(4 * SIZE), rig.backend.account()).unwrap();
    let outcome = rig.backend.handle(&message, vec![fd]).unwrap();
    assert_eq!(outcome.reply.unwrap().payload, u(1), "the error is returned");
    let said = outcome.refused.unwrap().to_string();
    let limit = format!("{} more than the {SIZE} in use exceeds the port's limit", 4 * SIZE);
    assert!(said.contains(&limit), "{said}");
    assert_eq!((rig.used(), rig.refused()), ((SIZE, 1), 1));
    assert_eq!(rig.fake.state().memory.regions().len(), 1);
    // The rest of a refused table is dropped with it.
    let two = [region(GUEST, USER, SIZE), more];
    let fds = vec![memfd(), sparse(4 * SIZE)];
    let error = rig.send(R::SET_MEM_TABLE, MemRegion::table_to_bytes(&two), fds).unwrap_err();
    assert!(matches!(error, E::OverLimit { .. }), "{error}");
    assert_eq!((rig.used(), rig.refused()), ((SIZE, 1), 2));
}

/// A region is charged with the part of its file before it, which is mapped as well.
#[test]
fn offsets_into_the_file_are_charged() {
    let mut rig = Rig::on(&Budgets::new(1024 * GIB, 1000, 1000));
    let region = MemRegion { mmap_offset: 3 * GIB, ..region(GUEST, USER, SIZE) };
    rig.send(R::ADD_MEM_REG, region.to_single_bytes(), vec![sparse(4 * GIB)]).unwrap();
    assert_eq!(rig.used(), (3 * GIB + SIZE, 1));
}

#[test]
fn memory_is_charged_until_its_last_user_drops_it() {
    let mut rig = Rig::ready(feature::VERSION_1);
    assert_eq!(rig.used(), (SIZE, 1));
    let first = Arc::clone(&rig.backend.memory);
    rig.table(&[region(GUEST, USER, SIZE)]).unwrap();
    assert_eq!(rig.used(), (2 * SIZE, 2), "a ring may still use the first");
    drop(first);
    assert_eq!(rig.used(), (SIZE, 1));
    let account = Arc::clone(rig.backend.account());
    drop(rig);
    assert_eq!((account.mapped_bytes.used(), account.mappings.used()), (0, 0));
}

/// Every slot in use, by a table that is replaced while its rings still hold it.
#[test]
fn default_limit_of_mappings_has_room_for_a_table_that_replaces_another() {
    let all = SLOTS_MAX as u64 + crate::message::REGIONS_MAX as u64;
    assert!(defaults::MAPPINGS >= all && defaults::MAPPINGS >= 2 * SLOTS_MAX as u64);
}
